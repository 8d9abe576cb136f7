package gpu

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// Declared is an inventory that is declared in a file: accelerators without a supported driver library. Its devices
// have no readings.
type Declared struct {
	name    string
	devices []Device
}

// declaration is one device as the file has it, in JSON:
//
//	[
//	  {"uuid": "npu-0", "vendor": "ascend", "model": "910B", "memory": "64GiB", "numa": 0,
//	   "links": [{"peer": "npu-1", "distance": "fabric"}]},
//	  {"uuid": "npu-1", "vendor": "ascend", "model": "910B", "memory": "64GiB", "numa": 0}
//	]
//
// The index is the place in the list unless it is said, and a link need be said at one end only.
type declaration struct {
	UUID   string `json:"uuid"`
	Index  *int   `json:"index"`
	Vendor Vendor `json:"vendor"`
	Model  string `json:"model"`
	Memory string `json:"memory"`
	NUMA   *int   `json:"numa"`
	Links  []Link `json:"links"`

	line int
}

// Declare parses a file of declarations; errors refer to it by name. It reports all errors joined, each an
// *InvalidError with its line.
func Declare(name string, data []byte) (*Declared, error) {
	c := checker{name: name, byUUID: make(map[string]*Device), byIndex: make(map[int]string)}
	declarations := c.decode(data)
	devices := make([]Device, len(declarations))
	for i, d := range declarations {
		devices[i] = c.device(d, i)
		c.enter(&devices[i], d.line)
	}
	for _, d := range declarations {
		c.links(d)
	}
	if len(c.problems) > 0 {
		return nil, errors.Join(c.problems...)
	}
	c.arrange(devices)
	return &Declared{name: name, devices: devices}, nil
}

// Devices returns the declared devices.
func (d *Declared) Devices(ctx context.Context) ([]Device, error) {
	return slices.Clone(d.devices), ctx.Err()
}

// Watch waits for ctx to end: declared devices do not change.
func (d *Declared) Watch(ctx context.Context, _ func()) error { <-ctx.Done(); return nil }

func (d *Declared) String() string { return "declared in " + d.name }

// Close does nothing.
func (d *Declared) Close() error { return nil }

// checker converts declarations to devices and collects errors.
type checker struct {
	name     string
	problems []error
	byUUID   map[string]*Device
	byIndex  map[int]string
}

func (c *checker) fail(line int, field, format string, args ...any) {
	c.problems = append(c.problems, &InvalidError{Source: c.name, Line: line, Field: field, Problem: fmt.Sprintf(format, args...)})
}

// decode checks the syntax of the whole file first, so that errors have exact positions; errors within one device are
// reported at the line where it begins.
func (c *checker) decode(data []byte) []declaration {
	if err := json.Unmarshal(data, new(any)); err != nil {
		c.fail(lineOf(data, offsetOf(err)), "", "%v", err)
		return nil
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if open, _ := dec.Token(); open != json.Delim('[') {
		c.fail(1, "", "want a list of devices: [{\"uuid\": ...}, ...]")
		return nil
	}
	var declarations []declaration
	for dec.More() {
		d := declaration{line: lineOf(data, start(data, dec.InputOffset()))}
		if err := dec.Decode(&d); err != nil {
			c.failDecode(d.line, err)
		}
		declarations = append(declarations, d)
	}
	if len(c.problems) > 0 {
		return nil // further checks would report the same errors again
	}
	if len(declarations) == 0 {
		c.fail(1, "", "declares no devices")
	}
	return declarations
}

func (c *checker) failDecode(line int, err error) {
	if mismatch, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		c.fail(line, mismatch.Field, "found %s, want %s", mismatch.Value, kindWords[mismatch.Type.Kind()])
		return
	}
	c.fail(line, "", "%s", strings.TrimPrefix(err.Error(), "json: "))
}

// kindWords names the types of values in a declaration.
var kindWords = map[reflect.Kind]string{
	reflect.String: "text", reflect.Int: "a whole number", reflect.Slice: "a list", reflect.Struct: "an object",
}

func offsetOf(err error) int64 {
	if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
		return syntax.Offset
	}
	return 0
}

// start returns where the next value begins, after a comma and white space.
func start(data []byte, offset int64) int64 {
	rest := data[offset:]
	return offset + int64(len(rest)-len(bytes.TrimLeft(rest, ", \t\r\n")))
}

func lineOf(data []byte, offset int64) int { return 1 + bytes.Count(data[:offset], []byte("\n")) }

func (c *checker) device(d declaration, position int) Device {
	device := Device{UUID: d.UUID, Index: position, Vendor: d.Vendor, Model: d.Model, NUMA: d.NUMA}
	if d.Index != nil {
		device.Index = *d.Index
	}
	if d.UUID == "" || printable(d.UUID) != d.UUID || strings.ContainsAny(d.UUID, ", ") {
		c.fail(d.line, "uuid", "%q is not a name: want printable characters without spaces and commas", d.UUID)
	}
	if !slices.Contains([]Vendor{NVIDIA, AMD, Ascend, Other}, d.Vendor) {
		c.fail(d.line, "vendor", "%q is not known: want nvidia, amd, ascend or other", d.Vendor)
	}
	if d.Model == "" || printable(d.Model) != d.Model {
		c.fail(d.line, "model", "%q is not a name: want one or more printable characters", d.Model)
	}
	if d.NUMA != nil && *d.NUMA < 0 {
		c.fail(d.line, "numa", "%d is negative: leave it out if it is not known", *d.NUMA)
	}
	size, err := ParseBytes(d.Memory)
	if err != nil {
		c.fail(d.line, "memory", "%v", err)
	}
	device.MemoryTotal = size
	return device
}

// enter registers the device by UUID and index, both of which must be unique.
func (c *checker) enter(d *Device, line int) {
	if _, taken := c.byUUID[d.UUID]; taken {
		c.fail(line, "uuid", "%q is declared twice", d.UUID)
	}
	if owner, taken := c.byIndex[d.Index]; taken {
		c.fail(line, "index", "%d is taken by %q", d.Index, owner)
	}
	if d.Index < 0 {
		c.fail(line, "index", "%d is negative", d.Index)
	}
	c.byUUID[d.UUID], c.byIndex[d.Index] = d, d.UUID
}

func (c *checker) links(d declaration) {
	for _, link := range d.Links {
		peer, known := c.byUUID[link.Peer]
		switch {
		case !known:
			c.fail(d.line, "links", "peer %q is not declared", link.Peer)
		case link.Peer == d.UUID:
			c.fail(d.line, "links", "%q is linked to itself", d.UUID)
		case link.Distance.Rank() == len(distances):
			c.fail(d.line, "links", "distance %q is not known: want one of %v", link.Distance, distances)
		default:
			self := c.byUUID[d.UUID]
			if connect(self, peer, link.Distance) && connect(peer, self, link.Distance) {
				continue
			}
			c.fail(d.line, "links", "%q to %q is %s here and something else elsewhere", d.UUID, link.Peer, link.Distance)
		}
	}
}

// connect adds one direction of a link. It returns false if the link exists with another distance.
func connect(from, to *Device, distance Distance) bool {
	i := slices.IndexFunc(from.Links, func(l Link) bool { return l.Peer == to.UUID })
	if i >= 0 {
		return from.Links[i].Distance == distance
	}
	from.Links = append(from.Links, Link{Peer: to.UUID, Distance: distance})
	return true
}

// arrange sorts devices, and the links of each, by index.
func (c *checker) arrange(devices []Device) {
	for i := range devices {
		slices.SortFunc(devices[i].Links, func(a, b Link) int {
			return cmp.Compare(c.byUUID[a.Peer].Index, c.byUUID[b.Peer].Index)
		})
	}
	// byUUID points into devices and is not used after the sort.
	slices.SortFunc(devices, func(a, b Device) int { return cmp.Compare(a.Index, b.Index) })
}
