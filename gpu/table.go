package gpu

import (
	"fmt"
	"strconv"
	"strings"
	"text/tabwriter"
	"unicode"
)

// Row is one device in the table, with what only the ledger and its agent know.
type Row struct {
	Node    string    `json:"node" msgpack:"node"`
	Device  Device    `json:"device" msgpack:"device"`
	HeldBy  []Holder  `json:"held_by,omitempty" msgpack:"held_by,omitempty"`
	Foreign []Process `json:"foreign,omitempty" msgpack:"foreign,omitempty"` // processes that no worker started
	Closed  string    `json:"closed,omitempty" msgpack:"closed,omitempty"`   // why nothing new is granted on a healthy device: its cordon
}

// Holder is a worker that holds a device.
type Holder struct {
	Namespace string `json:"namespace,omitempty" msgpack:"namespace,omitempty"` // empty: none is known
	Role      string `json:"role" msgpack:"role"`
	Rank      int    `json:"rank" msgpack:"rank"`
	Milli     int    `json:"milli" msgpack:"milli"` // thousandths of the device; 0 and 1000 mean all of it
}

func (h Holder) String() string {
	name := fmt.Sprintf("%s/%d", h.Role, h.Rank)
	if h.Namespace != "" {
		name = h.Namespace + "/" + name
	}
	if h.Milli == 0 || h.Milli == whole {
		return name
	}
	return fmt.Sprintf("%s %d‰", name, h.Milli)
}

// Table formats the rows in the order given, with a heading and a line of totals. The name of a node is shown in its
// first row only. Unknown values are dashes.
func Table(rows []Row) string {
	if len(rows) == 0 {
		return "no devices\n"
	}
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	line(w, "NODE", "GPU", "MODEL", "MEMORY", "UTIL", "TEMP", "HELD BY", "HEALTH")
	node := ""
	for i, r := range rows {
		shown := r.Node
		if i > 0 && r.Node == node {
			shown = ""
		}
		node = r.Node
		line(w, shown, strconv.Itoa(r.Device.Index), r.Device.Model, memory(r.Device),
			reading(r.Device.Sample.Utilisation, "%"), reading(r.Device.Sample.Temperature, "°C"), r.heldBy(), r.health())
	}
	_ = w.Flush() // a strings.Builder never fails
	return b.String() + summary(rows) + "\n"
}

func line(w *tabwriter.Writer, cells ...string) {
	for i, cell := range cells {
		cells[i] = printable(cell)
	}
	_, _ = fmt.Fprintln(w, strings.Join(cells, "\t"))
}

// printable replaces characters that would break a line or control a terminal: names of processes and models are
// untrusted.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, text)
}

const barWidth = 10

func memory(d Device) string {
	if d.Sample.MemoryFree == nil {
		return fmt.Sprintf("%s –/%s GiB", strings.Repeat("·", barWidth), gib(d.MemoryTotal))
	}
	used := d.MemoryTotal - min(*d.Sample.MemoryFree, d.MemoryTotal)
	return fmt.Sprintf("%s %s/%s GiB", bar(used, d.MemoryTotal), gib(used), gib(d.MemoryTotal))
}

// bar rounds up, so that memory in use always shows.
func bar(used, total Bytes) string {
	full := 0
	if total > 0 {
		full = int((used*barWidth + total - 1) / total)
	}
	return strings.Repeat("█", full) + strings.Repeat("░", barWidth-full)
}

// gib formats a size with at most one decimal.
func gib(b Bytes) string {
	return strings.TrimSuffix(strconv.FormatFloat(float64(b)/float64(GiB), 'f', 1, 64), ".0")
}

func reading(value *int, unit string) string {
	if value == nil {
		return "–"
	}
	return strconv.Itoa(*value) + unit
}

func (r Row) heldBy() string {
	if len(r.HeldBy) == 0 {
		return "–"
	}
	names := make([]string, len(r.HeldBy))
	for i, h := range r.HeldBy {
		names[i] = h.String()
	}
	return strings.Join(names, ", ")
}

func (r Row) health() string {
	words := r.Device.Unfit()
	for _, p := range r.Foreign {
		words = append(words, "foreign "+p.String())
	}
	if r.Closed != "" {
		words = append(words, r.Closed)
	}
	if len(words) == 0 {
		return "ok"
	}
	return strings.Join(words, "; ")
}

func summary(rows []Row) string {
	nodes := make(map[string]bool)
	held, unfit, dirty, closed := 0, 0, 0, 0
	for _, r := range rows {
		nodes[r.Node] = true
		held += count(len(r.HeldBy) > 0)
		unfit += count(len(r.Device.Unfit()) > 0)
		dirty += count(len(r.Foreign) > 0)
		closed += count(r.Closed != "")
	}
	return fmt.Sprintf("devices: %d, nodes: %d, held: %d, unfit: %d, with foreign processes: %d, closed: %d",
		len(rows), len(nodes), held, unfit, dirty, closed)
}

func count(yes bool) int {
	if yes {
		return 1
	}
	return 0
}
