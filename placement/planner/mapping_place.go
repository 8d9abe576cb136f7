package planner

import (
	"cmp"
	"fmt"
	"slices"

	"troupe/placement/internal/text"
)

// mappedKind returns the workers of a mapping as one kind of bundle whose devices may span nodes.
func (r *Request) mappedKind() bundleKind {
	var bundle Bundle
	if len(r.Bundles) > 0 {
		bundle = r.Bundles[0]
	}
	bundle.Devices = Wholes(len(r.Mapping.Devices) / r.Mapping.World)
	bundle.Spans = true
	ranks := make([]int, r.Mapping.World)
	for i := range ranks {
		ranks[i] = i
	}
	return bundleKind{bundle: &bundle, ranks: ranks}
}

// deviceNumbering resolves device ids of a mapping: id = node number × stride + index.
type deviceNumbering struct {
	stride  int
	nodes   []*nodeState // by number
	subject string       // of the sentence that describe returns
}

// numberingFor returns the numbering of all nodes or, for a colocated gang, of the nodes of its reservation.
func (pl *Planner) numberingFor(g *gang) deviceNumbering {
	if g.colocated == nil {
		return deviceNumbering{pl.deviceStride(), pl.nodes, "there are"}
	}
	return deviceNumbering{pl.deviceStride(), pl.colocatedView(g.colocated), fmt.Sprintf("reservation %q has", g.colocated.ID)}
}

// find returns the device with a global id.
func (n deviceNumbering) find(id int) (deviceRef, bool) {
	if id < 0 || n.stride == 0 {
		return deviceRef{}, false
	}
	at, ok := slices.BinarySearchFunc(n.nodes, id/n.stride, func(s *nodeState, number int) int { return cmp.Compare(s.idNumber, number) })
	if !ok {
		return deviceRef{}, false
	}
	s := n.nodes[at]
	pos := slices.IndexFunc(s.info.Devices, func(d Device) bool { return d.Index == id%n.stride })
	return deviceRef{s, pos}, pos >= 0 && s.isVisible(pos)
}

// describe lists the ids that exist: "there are devices 0 to 7, 16 to 23".
func (n deviceNumbering) describe() string {
	var ids []int
	for _, s := range n.nodes {
		for pos, d := range s.info.Devices {
			if s.isVisible(pos) {
				ids = append(ids, s.idNumber*n.stride+d.Index)
			}
		}
	}
	if len(ids) == 0 {
		return n.subject + " no devices"
	}
	slices.Sort(ids)
	return n.subject + " devices " + text.Join(", ", formatRanges(ids))
}

// formatRanges formats ascending ids, consecutive ones as "0 to 7".
func formatRanges(ids []int) []string {
	var said []string
	for first := 0; first < len(ids); {
		last := first
		for last+1 < len(ids) && ids[last+1] == ids[last]+1 {
			last++
		}
		if first == last {
			said = append(said, fmt.Sprint(ids[first]))
		} else {
			said = append(said, fmt.Sprintf("%d to %d", ids[first], ids[last]))
		}
		first = last + 1
	}
	return said
}

// mappedDevices returns the devices of the gang's mapping, in its order.
func (g *gang) mappedDevices(n deviceNumbering) ([]deviceRef, error) {
	ids := g.request.Mapping.Devices
	refs := make([]deviceRef, len(ids))
	for i, id := range ids {
		ref, ok := n.find(id)
		if !ok {
			return nil, &RequestError{ErrUnknownDevice, fmt.Sprintf("device %d of the mapping does not exist", id), n.describe()}
		}
		refs[i] = ref
	}
	return refs, nil
}

// placeMapped assigns every worker exactly the devices of its part of the mapping; it runs on the node of the first.
// Workers without devices are placed on the nodes in turn.
func (g *gang) placeMapped(d *draftPlan, n deviceNumbering) bool {
	kind := &g.kinds[0]
	refs, err := g.mappedDevices(n)
	if err != nil {
		return false
	}
	if len(refs) == 0 {
		return d.placeRoundRobin(n.nodes, kind)
	}
	each := len(refs) / len(kind.ranks)
	for devices := range slices.Chunk(refs, each) {
		runs := candidate{nodeState: devices[0].node}
		if !runs.matches(kind.bundle) || !runs.canRun(kind.bundle) || slices.ContainsFunc(devices, deviceRef.unavailable) {
			return false
		}
		d.assignDevices(runs.nodeState, kind, devices)
	}
	return true
}

// unavailable reports whether any part of the device is not available.
func (s deviceRef) unavailable() bool { return !s.node.open || s.node.available(s.pos) < Whole }

// placeRoundRobin places each bundle on the next node with room for it.
func (d *draftPlan) placeRoundRobin(nodes []*nodeState, kind *bundleKind) bool {
	next := 0
	for range kind.ranks {
		at := -1
		for i := range nodes {
			turn := (next + i) % len(nodes)
			if (candidate{nodeState: nodes[turn]}).fits(kind.bundle, 1) == 1 {
				at = turn
				break
			}
		}
		if at < 0 {
			return false
		}
		d.assignBundles(candidate{nodeState: nodes[at]}, kind, 1)
		next = at + 1
	}
	return true
}
