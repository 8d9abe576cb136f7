package groups

import (
	"slices"
	"time"

	"troupe/bus"
	"troupe/pipeline/spec"
)

// Spec says what a group is and when it is complete.
type Spec struct {
	Siblings int           `msgpack:"siblings"` // samples of one prompt
	Turns    int           `msgpack:"turns"`    // of a sample, at most
	Fields   []string      `msgpack:"fields"`   // fields that a sample needs beside its turns, such as a reward
	Open     int           `msgpack:"open"`     // groups that are not trained, at most; a put waits for room. Zero: 1000
	Bytes    int           `msgpack:"bytes"`    // of their parts, at most; a put waits while half of it is used. Zero: 256 MiB
	AtLeast  int           `msgpack:"at_least"` // complete siblings that are enough After the first take of the group. Zero: all
	After    time.Duration `msgpack:"after"`
	Timeout  time.Duration `msgpack:"timeout"` // of one turn; then the sample goes to another worker. Zero: none
	// Bound drops a complete group when its oldest part is more than so much behind the current version. Zero: none.
	Bound spec.Version `msgpack:"bound"`
}

const (
	defaultOpen  = 1000
	defaultBytes = 256 << 20
	maxSiblings  = 4096
	maxTurns     = 100_000
	maxNames     = 64 // fields of a sample
	maxName      = 64 // bytes
)

// WithDefaults fills in what is left out.
func (s Spec) WithDefaults() Spec {
	if s.Open == 0 {
		s.Open = defaultOpen
	}
	if s.Bytes == 0 {
		s.Bytes = defaultBytes
	}
	if s.Turns == 0 {
		s.Turns = 1
	}
	return s
}

// Check reports the first thing that is wrong.
func (s Spec) Check() error {
	for _, n := range []struct {
		name        string
		have, least int
		most        int
	}{
		{"siblings", s.Siblings, 1, maxSiblings}, {"turns", s.Turns, 1, maxTurns}, {"open", s.Open, 1, 1_000_000}, {"bytes", s.Bytes, 1, 1 << 50},
		{"fields", len(s.Fields), 0, maxNames}, {"at_least", s.AtLeast, 0, s.Siblings},
	} {
		if n.have < n.least || n.have > n.most {
			return bus.Errorf(bus.CodeInvalid, "rollouts: %s %d must be between %d and %d", n.name, n.have, n.least, n.most)
		}
	}
	if (s.AtLeast > 0) != (s.After > 0) {
		return bus.Errorf(bus.CodeInvalid, "rollouts: at_least and after belong together: so many siblings are enough after that time")
	}
	if s.Timeout < 0 || s.After < 0 || s.Bound < 0 {
		return bus.Errorf(bus.CodeInvalid, "rollouts: timeout, after and stale must not be negative")
	}
	for i, name := range s.Fields {
		if err := checkField(name); err != nil {
			return err
		}
		if slices.Contains(s.Fields[:i], name) {
			return bus.Errorf(bus.CodeInvalid, "rollouts: field %s is named twice", name)
		}
	}
	return nil
}

func checkField(name string) error {
	if name == "" || len(name) > maxName {
		return bus.Errorf(bus.CodeInvalid, "rollouts: the name of a field has 1 to %d bytes, not %d", maxName, len(name))
	}
	return nil
}
