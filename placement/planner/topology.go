package planner

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"troupe/placement/internal/text"
)

// Topology is a preference for what lies near to each other. It is met if it can be, and then best first: the whole
// gang in one neighbourhood, otherwise each bundle in one.
type Topology struct {
	Within   Within `json:"within,omitempty" msgpack:"within,omitempty"`
	Label    string `json:"label,omitempty" msgpack:"label,omitempty"`       // all the nodes carry one value of this label, such as "rack"
	Required bool   `json:"required,omitempty" msgpack:"required,omitempty"` // rather nothing than without it
}

// Within is a neighbourhood of devices on one node.
type Within string

const (
	Anywhere Within = ""
	Island   Within = "island" // joined by NVLink
	NUMA     Within = "numa"   // on one NUMA node
)

func (t Topology) check() error {
	switch {
	case t.Within != Anywhere && t.Within != Island && t.Within != NUMA:
		return &RequestError{ErrBadTopology, fmt.Sprintf("neighbourhood %q is unknown", text.Clip(string(t.Within))), "there are island, numa and, as a label, any label of the nodes"}
	case t.Required && t.Within == Anywhere && t.Label == "":
		return &RequestError{ErrBadTopology, "a topology is required, but none is named", "there are island, numa and, as a label, any label of the nodes"}
	}
	return nil
}

// area is a way to divide the nodes: into those with one value of a label, or not at all.
type partition struct {
	label bool
	parts [][]candidate
}

func (g *gang) partitions(nodes []candidate) []partition {
	all := partition{parts: [][]candidate{nodes}}
	t := g.request.Topology
	switch {
	case t.Label == "":
		return []partition{all}
	case t.Required:
		return []partition{{true, byLabel(nodes, t.Label)}}
	}
	return []partition{{true, byLabel(nodes, t.Label)}, all}
}

// byLabel divides nodes by their value of a label, those with the fewest free devices first: a gang goes to the
// fullest rack that takes it. Nodes without the label are in none.
func byLabel(nodes []candidate, label string) [][]candidate {
	parts := map[string][]candidate{}
	idle := map[string]int{}
	for _, cand := range nodes {
		if value, ok := cand.info.Labels[label]; ok {
			parts[value] = append(parts[value], cand)
			idle[value] += cand.freeCount
		}
	}
	values := slices.SortedFunc(maps.Keys(parts), func(a, b string) int {
		return cmp.Or(idle[a]-idle[b], cmp.Compare(a, b))
	})
	divided := make([][]candidate, len(values))
	for i, value := range values {
		divided[i] = parts[value]
	}
	return divided
}

// tie says how much must lie in one neighbourhood of devices.
type affinity int

const (
	noAffinity     affinity = iota // nothing
	bundleAffinity                 // each bundle by itself
	gangAffinity                   // the whole gang
)

func (g *gang) affinities() []affinity {
	t := g.request.Topology
	ties := []affinity{gangAffinity, bundleAffinity, noAffinity}
	switch {
	case t.Within == Anywhere:
		return ties[2:]
	case t.Required:
		ties = ties[:2]
	}
	if g.strategy == Spread || g.strategy == StrictSpread {
		ties = ties[1:]
	}
	return ties
}

// confine is nodes as places for bundles under a tie: as they are, each with its neighbourhoods, or each neighbourhood
// by itself.
func (t affinity) restrict(nodes []candidate, w Within) []candidate {
	if t == noAffinity {
		return nodes
	}
	confined := make([]candidate, 0, len(nodes))
	for _, cand := range nodes {
		groups := cand.layout.levels(w)[0]
		if t == bundleAffinity {
			confined = append(confined, candidate{cand.nodeState, groups})
			continue
		}
		for i := range groups {
			confined = append(confined, candidate{cand.nodeState, groups[i : i+1]})
		}
	}
	return confined
}

// unmetBy is the part of a topology that was let go, in words; empty if none was.
func unmetTopology(sameLabel bool, t affinity, asked Topology) string {
	switch {
	case asked.Label != "" && !sameLabel:
		return "no single " + asked.Label + " has room for all of it"
	case asked.Within != Anywhere && t == noAffinity:
		return "not every bundle finds room in one " + string(asked.Within)
	}
	return ""
}
