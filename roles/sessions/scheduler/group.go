package scheduler

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
)

// GroupState is the state of a placement group.
type GroupState string

const (
	GroupPending      GroupState = "PENDING"      // waits until all bundles fit
	GroupCreated      GroupState = "CREATED"      // all bundles are held
	GroupRescheduling GroupState = "RESCHEDULING" // a node is gone: some bundles wait again
	GroupRemoved      GroupState = "REMOVED"      // nothing is held
)

// The strategies of groups: on few nodes, on many, on one, each on a node of its own.
const (
	Pack         = "PACK"
	Spread       = "SPREAD"
	StrictPack   = "STRICT_PACK"
	StrictSpread = "STRICT_SPREAD"
)

// removedMost is the number of removed groups that stay in the table.
const removedMost = 10_000

// GroupInfo is a placement group as it was requested.
type GroupInfo struct {
	ID        string               `json:"id"`
	Name      string               `json:"name,omitempty"`
	Namespace string               `json:"namespace"`
	Owner     string               `json:"owner"` // the process with which it ends
	Detached  bool                 `json:"detached,omitempty"`
	Bundles   []map[string]float64 `json:"bundles"`
	Strategy  string               `json:"strategy"`
	Target    string               `json:"target,omitempty"` // a node id that is preferred
	Gang      Gang                 `json:"gang,omitzero"`
}

// Gang names groups that are created together: all of them are held, or none. The zero Gang is the group alone.
type Gang struct {
	Name string `json:"name" msgpack:"name"`
	Size int    `json:"size" msgpack:"size"` // groups
}

// Group is a placement group. Its fields must not be changed.
type Group struct {
	GroupInfo
	State   GroupState
	bundles []bundle
	order   int
}

// bundle is one bundle of a group; node and room are nil while it is not held.
type bundle struct {
	demand amounts
	node   *node
	room   *room
	shares shares // of the node's devices
}

// Placed is the node id of each bundle, empty where it is not held.
func (g *Group) Placed() []string {
	out := make([]string, len(g.bundles))
	for i, b := range g.bundles {
		if b.node != nil {
			out[i] = b.node.id
		}
	}
	return out
}

// Devices are the devices of each bundle by resource.
func (g *Group) Devices() []map[string][]string {
	out := make([]map[string][]string, len(g.bundles))
	for i, b := range g.bundles {
		out[i] = b.shares.indices()
	}
	return out
}

// Group is the group of that id; nil: there is none.
func (s *Scheduler) Group(id string) *Group { return s.groups[id] }

// Groups lists the groups in the order of their requests, with those that were removed of late.
func (s *Scheduler) Groups() []*Group {
	out := make([]*Group, 0, len(s.groups))
	for _, g := range s.groups {
		out = append(out, g)
	}
	slices.SortFunc(out, func(a, b *Group) int { return a.order - b.order })
	return out
}

// GroupNamed is the living group of that name; nil: there is none.
func (s *Scheduler) GroupNamed(namespace, name string) *Group {
	for _, g := range s.Groups() {
		if g.Name == name && g.Namespace == namespace && g.State != GroupRemoved {
			return g
		}
	}
	return nil
}

// HasGroups reports whether a group exists that was not removed.
func (s *Scheduler) HasGroups() bool {
	for _, g := range s.groups {
		if g.State != GroupRemoved {
			return true
		}
	}
	return false
}

func (s *Scheduler) addGroup(info GroupInfo) *Group {
	g := &Group{GroupInfo: info, State: GroupPending, order: s.requests}
	s.requests++
	for _, demand := range info.Bundles {
		g.bundles = append(g.bundles, bundle{demand: unitsOf(demand)})
	}
	s.groups[info.ID] = g
	return g
}

// await puts a group among those whose bundles are not all held.
func (s *Scheduler) await(g *Group) {
	s.pending = append(s.pending, g)
	slices.SortFunc(s.pending, func(a, b *Group) int { return a.order - b.order })
}

// CreateGroup queues a group. A group that is known is left as it is.
func (s *Scheduler) CreateGroup(info GroupInfo) Decisions {
	var d Decisions
	if s.groups[info.ID] == nil {
		s.await(s.addGroup(info))
		s.grant(&d)
	}
	return d
}

// RestoreGroup adds a group of an earlier Scheduler whose bundles lie where they lay, with the same devices. A bundle whose node is
// unknown, or has no room, waits.
func (s *Scheduler) RestoreGroup(info GroupInfo, state GroupState, placed []string, devices []map[string][]string) {
	g := s.addGroup(info)
	if g.State = state; state == GroupRemoved {
		s.removed = append(s.removed, g.ID)
		return
	}
	for i := range g.bundles {
		b := &g.bundles[i]
		if i >= len(placed) || placed[i] == "" {
			continue
		}
		n := s.nodes[placed[i]]
		if n == nil || !n.alive {
			g.State = GroupRescheduling
			continue
		}
		var held map[string][]string
		if i < len(devices) {
			held = devices[i]
		}
		g.hold(i, n, n.takeDevices(b.demand, held))
	}
	if g.State != GroupCreated {
		s.await(g)
	}
}

// hold records that a bundle has what was taken from the node.
func (g *Group) hold(i int, n *node, taken shares) {
	inside := shares{}
	for name, devices := range taken {
		inside[name] = map[int]int64{}
		for index, share := range devices {
			inside[name][index] = share
		}
	}
	r := newRoom(g.bundles[i].demand, inside)
	g.bundles[i].node, g.bundles[i].room, g.bundles[i].shares = n, &r, taken
}

// createGang creates a group, and with it the others of its gang: all of them, or none. It returns those that were created.
func (s *Scheduler) createGang(g *Group) []*Group {
	if g.State == GroupCreated { // with another of its gang
		return nil
	}
	gang := []*Group{g}
	if g.Gang.Name != "" && g.State == GroupPending {
		members := s.GangOf(g)
		if len(members) < g.Gang.Size {
			return nil // the others have not been requested yet
		}
		gang = slices.DeleteFunc(members, func(m *Group) bool { return m.State != GroupPending }) // the others were removed
	}
	for i, one := range gang {
		if !s.holdAll(one) {
			for _, held := range gang[:i] {
				held.giveAll()
			}
			return nil
		}
	}
	for _, one := range gang {
		one.State = GroupCreated
	}
	return gang
}

// GangOf lists the groups of a gang in the order of their requests, with those that were removed of late.
func (s *Scheduler) GangOf(g *Group) []*Group {
	return slices.DeleteFunc(s.Groups(), func(m *Group) bool { return m.Gang.Name != g.Gang.Name })
}

// RemovedGangs lists the removed groups that are of a gang.
func (s *Scheduler) RemovedGangs() []*Group {
	var out []*Group
	for _, id := range s.removed {
		if g := s.groups[id]; g.Gang.Name != "" {
			out = append(out, g)
		}
	}
	return out
}

// holdAll holds the bundles of a group that are not held yet: all of them, or none.
func (s *Scheduler) holdAll(g *Group) bool {
	chosen, ok := s.nodesFor(g)
	if !ok {
		return false
	}
	for _, i := range slices.Sorted(maps.Keys(chosen)) { // so that the first bundle has the first devices
		n := chosen[i]
		g.hold(i, n, n.take(g.bundles[i].demand))
	}
	return true
}

// giveAll gives the bundles of a group back to their nodes.
func (g *Group) giveAll() {
	for i := range g.bundles {
		if b := &g.bundles[i]; b.node != nil {
			b.node.give(b.demand, b.shares)
			b.node, b.room, b.shares = nil, nil, nil
		}
	}
}

// nodesFor chooses a node for each bundle that has none, by index; false: they do not all fit.
func (s *Scheduler) nodesFor(g *Group) (map[int]*node, bool) {
	alive := s.alive()
	var missing []int
	there := map[*node]int{}
	for i, b := range g.bundles {
		if b.node == nil {
			missing = append(missing, i)
		} else {
			there[b.node]++
		}
	}
	slices.SortStableFunc(missing, func(a, b int) int { return compareDemands(g.bundles[b].demand, g.bundles[a].demand) }) // the largest first
	switch g.Strategy {
	case StrictSpread:
		others := slices.DeleteFunc(slices.Clone(alive), func(n *node) bool { return there[n] > 0 })
		return g.assign(missing, others, func(_ map[*node]int, n *node) []float64 { return []float64{float64(n.order)} }, true)
	case Spread:
		return g.assign(missing, alive, func(used map[*node]int, n *node) []float64 {
			return []float64{float64(used[n] + there[n]), float64(n.order)}
		}, false)
	}
	for _, n := range g.singleNodes(alive, there) {
		if found, ok := g.assign(missing, []*node{n}, func(map[*node]int, *node) []float64 { return nil }, false); ok {
			return found, true
		}
	}
	if g.Strategy == StrictPack {
		return nil, false
	}
	return g.assign(missing, alive, func(used map[*node]int, n *node) []float64 {
		return []float64{float64(-used[n] - there[n]), float64(-n.free["GPU"]), float64(-n.free["CPU"]), float64(n.order)}
	}, false)
}

// singleNodes are the nodes that may hold all of a packed group, the best first.
func (g *Group) singleNodes(alive []*node, there map[*node]int) []*node {
	if g.Strategy == StrictPack && len(there) > 0 {
		return slices.DeleteFunc(slices.Clone(alive), func(n *node) bool { return there[n] == 0 })
	}
	out := slices.Clone(alive)
	rank := func(n *node) []float64 {
		return []float64{boolRank(there[n] == 0), boolRank(n.id != g.Target), -n.load(), float64(n.order)}
	}
	slices.SortStableFunc(out, func(a, b *node) int { return slices.Compare(rank(a), rank(b)) })
	return out
}

func boolRank(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// assign gives each bundle the first node by rank that has room for it. once: each a node of its own. Nothing stays taken.
func (g *Group) assign(order []int, nodes []*node, rank func(used map[*node]int, n *node) []float64, once bool) (map[int]*node, bool) {
	chosen, taken, used := map[int]*node{}, map[int]shares{}, map[*node]int{}
	defer func() {
		for i, n := range chosen {
			n.give(g.bundles[i].demand, taken[i])
		}
	}()
	for _, i := range order {
		var best *node
		var bestRank []float64
		for _, n := range nodes {
			if !n.fits(g.bundles[i].demand) || once && used[n] > 0 {
				continue
			}
			if r := rank(used, n); best == nil || slices.Compare(r, bestRank) < 0 {
				best, bestRank = n, r
			}
		}
		if best == nil {
			return nil, false
		}
		chosen[i], taken[i] = best, best.take(g.bundles[i].demand)
		used[best]++
	}
	return chosen, true
}

// compareDemands orders demands by their scarcest resources: devices before others, then by amount.
func compareDemands(a, b amounts) int {
	type term struct {
		device bool
		amount int64
	}
	terms := func(m amounts) []term {
		var out []term
		for name, amount := range m {
			out = append(out, term{slices.Contains(deviceNames, name), amount})
		}
		slices.SortFunc(out, func(x, y term) int {
			return cmp.Or(cmp.Compare(boolRank(y.device), boolRank(x.device)), cmp.Compare(y.amount, x.amount))
		})
		return out
	}
	return slices.CompareFunc(terms(a), terms(b), func(x, y term) int {
		return cmp.Or(cmp.Compare(boolRank(x.device), boolRank(y.device)), cmp.Compare(x.amount, y.amount))
	})
}

// RemoveGroup removes a group: requests that wait for it are refused, and what runs in it is evicted.
func (s *Scheduler) RemoveGroup(id, why string) Decisions {
	var d Decisions
	s.removeGroup(s.groups[id], why, &d)
	s.grant(&d)
	return d
}

// EndOwner removes the groups of a process that has ended, unless they are detached.
func (s *Scheduler) EndOwner(owner string) Decisions {
	var d Decisions
	for _, g := range s.Groups() {
		if g.Owner == owner && !g.Detached && g.State != GroupRemoved {
			s.removeGroup(g, fmt.Sprintf("the creator of the placement group %s has ended", g.ID), &d)
		}
	}
	if len(d.Removed) > 0 {
		s.grant(&d)
	}
	return d
}

func (s *Scheduler) removeGroup(g *Group, why string, d *Decisions) {
	if g == nil || g.State == GroupRemoved {
		return
	}
	for key, a := range s.held {
		if a.group == g {
			d.Evicted = append(d.Evicted, key)
			delete(s.held, key)
		}
	}
	slices.Sort(d.Evicted)
	g.giveAll()
	g.State = GroupRemoved
	s.pending = slices.DeleteFunc(s.pending, func(p *Group) bool { return p == g })
	d.Removed = append(d.Removed, g.ID)
	for _, r := range s.inOrder() {
		if r.strategy.Group == g.ID {
			s.dequeue(r)
			d.Refused = append(d.Refused, Refusal{Key: r.key, Why: &RefusedError{GroupRemoved: true, Text: why}})
		}
	}
	s.removed = append(s.removed, g.ID)
	if len(s.removed) > removedMost {
		delete(s.groups, s.removed[0])
		s.removed = s.removed[1:]
	}
}
