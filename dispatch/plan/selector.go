package plan

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Selector selects ranks by their coordinates: "tp=0,dp=1" is every rank with tp 0 and dp 1. The zero Selector selects
// all.
type Selector struct {
	terms []term
}

type term struct {
	axis  Axis
	index int
}

// Where selects the ranks with that coordinate on the axis.
func Where(axis Axis, index int) Selector {
	return Selector{}.And(axis, index)
}

// And narrows the selector by one more coordinate.
func (s Selector) And(axis Axis, index int) Selector {
	terms := make([]term, 0, len(s.terms)+1)
	return Selector{terms: append(append(terms, s.terms...), term{axis, index})}
}

// ParseSelector parses "tp=0,dp=1"; spaces are ignored, and the empty text selects all. Mesh.Select checks whether the
// coordinates exist.
func ParseSelector(text string) (Selector, error) {
	var s Selector
	if strings.TrimSpace(text) == "" {
		return s, nil
	}
	for _, field := range strings.Split(text, ",") {
		name, value, found := strings.Cut(field, "=")
		if !found {
			return Selector{}, invalid("selector %q: %q is not of the form axis=coordinate, like tp=0", text, strings.TrimSpace(field))
		}
		index, err := strconv.Atoi(strings.TrimSpace(value))
		if err != nil {
			return Selector{}, invalid("selector %q: %q is not a coordinate, which is a whole number from 0", text, strings.TrimSpace(value))
		}
		s = s.And(Axis(strings.ToLower(strings.TrimSpace(name))), index)
	}
	if err := s.check(); err != nil {
		return Selector{}, err
	}
	return s, nil
}

// check refuses selectors that are invalid for every mesh.
func (s Selector) check() error {
	for i, t := range s.terms {
		sameAxis := func(other term) bool { return other.axis == t.axis }
		switch {
		case !slices.Contains(Axes[:], t.axis):
			return invalid("selector %q: there is no axis %q, only tp, cp, dp and pp", s, string(t.axis))
		case slices.ContainsFunc(s.terms[:i], sameAxis):
			return invalid("selector %q: %s is given twice", s, t.axis)
		case t.index < 0:
			return invalid("selector %q: %s=%d, but coordinates start at 0", s, t.axis, t.index)
		}
	}
	return nil
}

// Select returns the selected ranks in rank order, at least one. A coordinate outside the mesh is an error.
func (m Mesh) Select(s Selector) ([]int, error) {
	if err := m.check(); err != nil {
		return nil, err
	}
	if err := s.check(); err != nil {
		return nil, err
	}
	for _, t := range s.terms {
		if size := m.Size(t.axis); t.index >= size {
			return nil, invalid("selector %q: there is no %s=%d, the mesh has %s 0 to %d", s, t.axis, t.index, t.axis, size-1)
		}
	}
	var ranks []int
	for rank := range m.World() {
		if s.matches(m.Coord(rank)) {
			ranks = append(ranks, rank)
		}
	}
	return ranks, nil
}

func (s Selector) matches(c Coord) bool {
	for _, t := range s.terms {
		if c.On(t.axis) != t.index {
			return false
		}
	}
	return true
}

// String is the inverse of ParseSelector.
func (s Selector) String() string {
	receiver := make([]string, len(s.terms))
	for i, t := range s.terms {
		receiver[i] = fmt.Sprintf("%s=%d", t.axis, t.index)
	}
	return strings.Join(receiver, ",")
}
