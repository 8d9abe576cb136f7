package planner

import (
	"fmt"
	"slices"
	"strings"
)

// NameLabel stands for the name of a node in a Selector.
const NameLabel = "troupe.io/node"

// Selector is a set of terms about the labels of a node, which matches all of them.
type Selector []LabelTerm

// LabelTerm is about one label: its value is among Values, or, without Values, the node carries it. Not: the opposite,
// which a node without the label matches too.
type LabelTerm struct {
	Key    string   `json:"key" msgpack:"key"`
	Values []string `json:"values,omitempty" msgpack:"values,omitempty"`
	Not    bool     `json:"not,omitempty" msgpack:"not,omitempty"`
}

func (s Selector) equal(other Selector) bool {
	return slices.EqualFunc(s, other, func(a, b LabelTerm) bool {
		return a.Key == b.Key && a.Not == b.Not && slices.Equal(a.Values, b.Values)
	})
}

// choice returns the first alternative of b that the node matches; zero if b has none, and -1 if it matches none.
func (s *nodeState) choice(b *Bundle) int {
	if len(b.Where) == 0 {
		return 0
	}
	return slices.IndexFunc(b.Where, s.carries)
}

func (s *nodeState) carries(selector Selector) bool {
	return !slices.ContainsFunc(selector, func(t LabelTerm) bool { return !t.holds(s.info) })
}

func (t LabelTerm) holds(n *Node) bool {
	value, has := n.Labels[t.Key]
	if t.Key == NameLabel {
		value, has = n.ID, true
	}
	return (has && (len(t.Values) == 0 || slices.Contains(t.Values, value))) != t.Not
}

func (t LabelTerm) String() string {
	switch {
	case len(t.Values) == 0 && t.Not:
		return "no label " + t.Key
	case len(t.Values) == 0:
		return t.Key
	case t.Not:
		return fmt.Sprintf("%s not in (%s)", t.Key, strings.Join(t.Values, ", "))
	}
	return fmt.Sprintf("%s in (%s)", t.Key, strings.Join(t.Values, ", "))
}

// unmet describes the terms of the preferred alternative that the node does not match.
func (s *nodeState) unmet(b *Bundle) []string {
	var terms []string
	for _, t := range b.Where[0] {
		if !t.holds(s.info) {
			terms = append(terms, t.String())
		}
	}
	return terms
}
