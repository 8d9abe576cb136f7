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
type area struct {
	label bool
	parts [][]site
}

func (g *gang) areas(nodes []site) []area {
	all := area{parts: [][]site{nodes}}
	t := g.request.Topology
	switch {
	case t.Label == "":
		return []area{all}
	case t.Required:
		return []area{{true, byLabel(nodes, t.Label)}}
	}
	return []area{{true, byLabel(nodes, t.Label)}, all}
}

// byLabel divides nodes by their value of a label, those with the fewest free devices first: a gang goes to the
// fullest rack that takes it. Nodes without the label are in none.
func byLabel(nodes []site, label string) [][]site {
	parts := map[string][]site{}
	idle := map[string]int{}
	for _, s := range nodes {
		if value, ok := s.node.Labels[label]; ok {
			parts[value] = append(parts[value], s)
			idle[value] += s.idle
		}
	}
	values := slices.SortedFunc(maps.Keys(parts), func(a, b string) int {
		return cmp.Or(idle[a]-idle[b], cmp.Compare(a, b))
	})
	divided := make([][]site, len(values))
	for i, value := range values {
		divided[i] = parts[value]
	}
	return divided
}

// tie says how much must lie in one neighbourhood of devices.
type tie int

const (
	untied     tie = iota // nothing
	bundleTied            // each bundle by itself
	gangTied              // the whole gang
)

func (g *gang) ties() []tie {
	t := g.request.Topology
	ties := []tie{gangTied, bundleTied, untied}
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
func (t tie) confine(nodes []site, w Within) []site {
	if t == untied {
		return nodes
	}
	confined := make([]site, 0, len(nodes))
	for _, s := range nodes {
		groups := s.layout.levels(w)[0]
		if t == bundleTied {
			confined = append(confined, site{s.stock, groups})
			continue
		}
		for i := range groups {
			confined = append(confined, site{s.stock, groups[i : i+1]})
		}
	}
	return confined
}

// unmetBy is the part of a topology that was let go, in words; empty if none was.
func unmetBy(sameLabel bool, t tie, asked Topology) string {
	switch {
	case asked.Label != "" && !sameLabel:
		return "no single " + asked.Label + " has room for all of it"
	case asked.Within != Anywhere && t == untied:
		return "not every bundle finds room in one " + string(asked.Within)
	}
	return ""
}
