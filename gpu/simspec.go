package gpu

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// SimSpec describes simulated nodes, all alike. Zero fields after the first two have defaults.
type SimSpec struct {
	Nodes   int
	Devices int    // per node
	Memory  Bytes  // per device; 80GiB by default
	Model   string // H100 by default
	NUMA    int    // NUMA nodes over which the devices of a node are distributed, in order; 1 by default
	Island  int    // devices connected by NVLink; all of a node by default
}

func (s SimSpec) withDefaults() SimSpec {
	s.Memory = cmp.Or(s.Memory, simMemory)
	s.Model = cmp.Or(s.Model, simModel)
	s.NUMA = cmp.Or(s.NUMA, 1)
	s.Island = cmp.Or(s.Island, s.Devices)
	return s
}

const (
	simPrefix = "sim:"
	simForm   = "sim:NODESxDEVICES[,mem=80GiB][,model=H100][,numa=2][,island=4]"

	simMemory = 80 * GiB
	simModel  = "H100"

	maxSimDevices = 64
	maxSimNUMA    = 16
	maxSimTotal   = 65536 // devices of all nodes: twice the largest world in the design
)

// ParseSim parses sim:NODESxDEVICES[,mem=80GiB][,model=H100][,numa=2][,island=4]. Errors are *InvalidError with the
// field and the allowed values.
func ParseSim(text string) (SimSpec, error) {
	shape, options, hasOptions := strings.Cut(strings.TrimPrefix(text, simPrefix), ",")
	nodes, devices, found := strings.Cut(shape, "x")
	p := simParser{text: text}
	if !found || !strings.HasPrefix(text, simPrefix) {
		p.fail("", "want "+simForm)
		return SimSpec{}, p.err
	}
	spec := SimSpec{Devices: p.number("devices", devices, maxSimDevices)}
	spec.Nodes = p.number("nodes", nodes, maxSimTotal/max(spec.Devices, 1))
	if hasOptions {
		p.options(&spec, strings.Split(options, ","))
	}
	if p.err != nil {
		return SimSpec{}, p.err
	}
	return spec.withDefaults(), nil
}

// simParser keeps the first error, so that the parsing steps need no error checks.
type simParser struct {
	text string
	err  error
}

func (p *simParser) fail(field, problem string) {
	if p.err == nil {
		p.err = &InvalidError{Source: p.text, Field: field, Problem: problem}
	}
}

func (p *simParser) number(field, text string, most int) int {
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > most {
		p.fail(field, fmt.Sprintf("%q is not a whole number from 1 to %d", text, most))
	}
	return n
}

func (p *simParser) options(spec *SimSpec, options []string) {
	seen := make(map[string]bool)
	for _, option := range options {
		key, value, _ := strings.Cut(option, "=")
		if seen[key] {
			p.fail(key, "is given twice")
		}
		seen[key] = true
		switch key {
		case "mem":
			p.memory(spec, value)
		case "model":
			p.model(spec, value)
		case "numa":
			spec.NUMA = p.number(key, value, maxSimNUMA)
		case "island":
			spec.Island = p.number(key, value, spec.Devices)
		default:
			p.fail(key, "is not an option: want mem, model, numa or island")
		}
	}
}

func (p *simParser) memory(spec *SimSpec, value string) {
	size, err := ParseBytes(value)
	if err != nil {
		p.fail("mem", err.Error())
	}
	spec.Memory = size
}

func (p *simParser) model(spec *SimSpec, value string) {
	if value == "" || printable(value) != value {
		p.fail("model", fmt.Sprintf("%q is not a name: want one or more printable characters", value))
	}
	spec.Model = value
}

// String formats the spec in its shortest form. [ParseSim] accepts the result.
func (s SimSpec) String() string {
	s = s.withDefaults()
	var b strings.Builder
	fmt.Fprintf(&b, "%s%dx%d", simPrefix, s.Nodes, s.Devices)
	if s.Memory != simMemory {
		fmt.Fprintf(&b, ",mem=%s", s.Memory)
	}
	if s.Model != simModel {
		fmt.Fprintf(&b, ",model=%s", s.Model)
	}
	if s.NUMA != 1 {
		fmt.Fprintf(&b, ",numa=%d", s.NUMA)
	}
	if s.Island != s.Devices {
		fmt.Fprintf(&b, ",island=%d", s.Island)
	}
	return b.String()
}
