package planner

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"troupe/placement/internal/text"
)

// Topology is a preference for proximity. It is met as well as possible: the whole gang in one group of devices,
// otherwise each bundle in one group.
type Topology struct {
	Within   Within `json:"within,omitempty" msgpack:"within,omitempty"`
	Label    string `json:"label,omitempty" msgpack:"label,omitempty"`       // all nodes have the same value of this label, such as "rack"
	Required bool   `json:"required,omitempty" msgpack:"required,omitempty"` // refuse the request rather than place it otherwise
}

// Within is a kind of group of devices on one node.
type Within string

const (
	Anywhere Within = ""
	Island   Within = "island" // connected by NVLink
	NUMA     Within = "numa"   // on one NUMA node
)

func (t Topology) check() error {
	switch {
	case t.Within != Anywhere && t.Within != Island && t.Within != NUMA:
		return &RequestError{ErrBadTopology, fmt.Sprintf("topology %q is unknown", text.Clip(string(t.Within))), "valid are island, numa and, as a label, any label of the nodes"}
	case t.Required && t.Within == Anywhere && t.Label == "":
		return &RequestError{ErrBadTopology, "a topology is required, but none is named", "valid are island, numa and, as a label, any label of the nodes"}
	}
	return nil
}

// partition is a division of the nodes: by the value of a label, or none.
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

// byLabel divides nodes by their value of a label, the part with the fewest free devices first: a gang is placed in the
// fullest rack that has room. Nodes without the label are left out.
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

// affinity is how much must be placed in one group of devices.
type affinity int

const (
	noAffinity     affinity = iota
	bundleAffinity          // each bundle in one group
	gangAffinity            // the whole gang in one group
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

// restrict returns nodes restricted by the affinity: unrestricted, each with its groups, or one candidate for each
// group.
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

// unmetTopology describes the part of the topology that is not met; empty if all is.
func unmetTopology(sameLabel bool, t affinity, asked Topology) string {
	switch {
	case asked.Label != "" && !sameLabel:
		return "no single " + asked.Label + " has room for all of it"
	case asked.Within != Anywhere && t == noAffinity:
		return "not every bundle fits in one " + string(asked.Within)
	}
	return ""
}
