package book

import (
	"fmt"
	"maps"
	"slices"

	"troupe/bus"
	"troupe/placement"
	"troupe/placement/planner"
)

// GroupState is the state of a placement group.
type GroupState string

const (
	GroupPending      GroupState = "PENDING"      // waits until all bundles fit
	GroupCreated      GroupState = "CREATED"      // all bundles are held
	GroupRescheduling GroupState = "RESCHEDULING" // a node is gone: some bundles wait again
	GroupRemoved      GroupState = "REMOVED"      // nothing is held
)

// removedMost is the number of removed groups that stay in the table.
const removedMost = 10_000

// GroupInfo is a placement group as it was requested.
type GroupInfo struct {
	ID        string               `msgpack:"id"`
	Name      string               `msgpack:"name"`
	Namespace string               `msgpack:"namespace"`
	Owner     string               `msgpack:"owner"` // the process with which it ends
	Detached  bool                 `msgpack:"detached"`
	Bundles   []map[string]float64 `msgpack:"bundles"`
	Strategy  string               `msgpack:"strategy"`
	Target    string               `msgpack:"target"` // a node id that is preferred
	Gang      planner.Gang         `msgpack:"gang"`
	Where     [][]planner.Selector `msgpack:"where"`  // by bundle, as in Strategy; fewer: the others may be on any node
	Holder    string               `msgpack:"holder"` // shown to requests that wait for it
}

// Group is a placement group. Its fields must not be changed.
type Group struct {
	GroupInfo
	State   GroupState
	bundles []placed
	parts   []*Part
	order   int
}

// Part is a reservation of bundles of a group: all of them, or those that were placed again after a node was gone.
type Part struct {
	ID      string `msgpack:"id"`
	Bundles []int  `msgpack:"bundles"` // indices in the group; that in the list is the index in the reservation
	token   uint64 // 0: not granted yet
}

// placed is where one bundle of a group is; node is empty while it is not held.
type placed struct {
	node    string // name
	part    string // the reservation
	index   int    // in the reservation
	devices map[string][]string
}

// Placed is the node id of each bundle, empty where it is not held.
func (g *Group) Placed() []string {
	out := make([]string, len(g.bundles))
	for i, p := range g.bundles {
		if p.node != "" {
			out[i] = NodeID(p.node)
		}
	}
	return out
}

// Parts are the reservations of a group.
func (g *Group) Parts() []Part {
	out := make([]Part, len(g.parts))
	for i, p := range g.parts {
		out[i] = *p
	}
	return out
}

// Group is the group of that id; nil: there is none.
func (b *Book) Group(id string) *Group { return b.groups[id] }

// Groups lists the groups in the order of their requests, with those that were removed of late.
func (b *Book) Groups() []*Group {
	out := slices.Collect(maps.Values(b.groups))
	slices.SortFunc(out, func(a, b *Group) int { return a.order - b.order })
	return out
}

// GroupNamed is the living group of that name; nil: there is none.
func (b *Book) GroupNamed(namespace, name string) *Group {
	for _, g := range b.Groups() {
		if g.Name == name && g.Namespace == namespace && g.State != GroupRemoved {
			return g
		}
	}
	return nil
}

// HasGroups reports whether a group exists that was not removed.
func (b *Book) HasGroups() bool {
	for _, g := range b.groups {
		if g.State != GroupRemoved {
			return true
		}
	}
	return false
}

// CreateGroup queues a group. A group that is known is left as it is.
func (b *Book) CreateGroup(info GroupInfo) {
	if b.groups[info.ID] == nil {
		b.ask(b.addGroup(info))
	}
}

func (b *Book) addGroup(info GroupInfo) *Group {
	g := &Group{GroupInfo: info, State: GroupPending, order: b.requests, bundles: make([]placed, len(info.Bundles))}
	b.requests++
	b.groups[info.ID] = g
	return g
}

// RestoreGroup adds a group of an earlier Book with its reservations, which are in the ledger unless they were not granted.
func (b *Book) RestoreGroup(info GroupInfo, state GroupState, parts []Part) {
	g := b.addGroup(info)
	if state == GroupRemoved {
		g.State = state
		b.removed = append(b.removed, g.ID)
		return
	}
	records, _ := b.cfg.Desk.Reservations(b.cfg.Namespace)
	for _, p := range parts {
		at := slices.IndexFunc(records, func(r placement.Record) bool { return r.ID == p.ID })
		if at < 0 || len(records[at].Workers) != len(p.Bundles) {
			continue
		}
		part := p
		g.parts = append(g.parts, &part)
		b.place(g, &part, records[at])
		b.cfg.Desk.OnEnd(part.ID, func(string) { b.cfg.Locked(func() { b.partEnded(g, &part) }) })
	}
	if len(g.missing()) < len(g.bundles) && state != GroupPending {
		g.State = GroupRescheduling
	}
	if len(g.missing()) == 0 {
		g.State = GroupCreated
	}
}

// missing lists the bundles that are not held.
func (g *Group) missing() []int {
	var out []int
	for i := range g.bundles {
		if g.bundles[i].node == "" {
			out = append(out, i)
		}
	}
	return out
}

// ask asks for the bundles of a group that are not held and not asked for. The groups of a gang are asked for when all are known.
func (b *Book) ask(g *Group) {
	if b.paused || g.State == GroupCreated || g.State == GroupRemoved || slices.ContainsFunc(g.parts, func(p *Part) bool { return p.token == 0 }) {
		return
	}
	if g.Gang.Name == "" || g.State == GroupRescheduling {
		b.reserve(g, planner.Gang{})
		return
	}
	gang := b.gangOf(g)
	if len(gang) < g.Gang.Size {
		return // the others have not been requested yet
	}
	gang = slices.DeleteFunc(gang, func(m *Group) bool { return m.State != GroupPending || len(m.parts) > 0 })
	for _, m := range gang {
		b.reserve(m, planner.Gang{Name: g.Gang.Name, Size: len(gang)})
	}
}

// gangOf lists the groups of a gang in the order of their requests, with those that were removed of late.
func (b *Book) gangOf(g *Group) []*Group {
	return slices.DeleteFunc(b.Groups(), func(m *Group) bool { return m.Gang.Name != g.Gang.Name })
}

// RemovedGangs lists the removed groups that are of a gang.
func (b *Book) RemovedGangs() []*Group {
	var out []*Group
	for _, id := range b.removed {
		if g := b.groups[id]; g != nil && g.Gang.Name != "" {
			out = append(out, g)
		}
	}
	return out
}

// bundleIn is a bundle of a group.
func (b *Book) bundleIn(g *Group, i int) placement.Bundle {
	bundle := b.bundleOf(g.Bundles[i])
	if i < len(g.Where) {
		bundle.Where = b.byName(g.Where[i])
	}
	return bundle
}

// reserve asks for a reservation of the bundles of a group that are not held.
func (b *Book) reserve(g *Group, gang planner.Gang) {
	part := &Part{ID: Prefix + "group-" + bus.NewID(), Bundles: g.missing()}
	g.parts = append(g.parts, part)
	q := planner.Request{ID: part.ID, Namespace: b.cfg.Namespace, Holder: g.Holder, Strategy: planner.Strategy(g.Strategy), Opportunistic: true, AwaitNodes: true, Gang: gang}
	for _, i := range part.Bundles {
		bundle := b.bundleIn(g, i)
		b.constrain(g, &bundle)
		q.Bundles = append(q.Bundles, bundle)
	}
	b.cfg.Desk.Reserve(q,
		func(rec placement.Record, err error) { b.cfg.Locked(func() { b.granted(g, part, rec, err) }) },
		func(string) { b.cfg.Locked(func() { b.partEnded(g, part) }) })
}

// constrain restricts a bundle to the nodes on which it may join those that are held.
func (b *Book) constrain(g *Group, bundle *placement.Bundle) {
	if n := b.nodes[g.Target]; n != nil && n.alive {
		bundle.Prefer = n.name
	}
	for _, p := range g.bundles {
		switch {
		case p.node == "":
		case g.Strategy == string(planner.StrictSpread):
			bundle.Avoid = append(bundle.Avoid, p.node)
		case g.Strategy == string(planner.StrictPack):
			bundle.Node = p.node
		case g.Strategy == string(planner.Pack):
			bundle.Prefer = p.node
		}
	}
}

// granted is the outcome of the request for a part of a group.
func (b *Book) granted(g *Group, part *Part, rec placement.Record, err error) {
	known := slices.Contains(g.parts, part)
	switch {
	case err != nil && known: // an invalid request: the group waits for good
		part.token = 0
		return
	case err != nil:
		return
	case !known:
		b.cfg.Desk.Release(rec.ID, rec.Token)
		return
	}
	b.place(g, part, rec)
	if len(g.missing()) == 0 {
		g.State = GroupCreated
		b.cfg.Decided(Decisions{Created: []string{g.ID}}, false)
		b.submitAll()
	}
}

// place records where the bundles of a part are.
func (b *Book) place(g *Group, part *Part, rec placement.Record) {
	part.token = rec.Token
	for j, i := range part.Bundles {
		w := &rec.Workers[j]
		g.bundles[i] = placed{node: w.Node, part: part.ID, index: j, devices: b.devicesOf(w, g.Bundles[i], nil)}
	}
}

// lose marks bundles as not held.
func (g *Group) lose(which func(*placed) bool) {
	for i := range g.bundles {
		if p := &g.bundles[i]; p.node != "" && which(p) {
			*p = placed{}
			if g.State == GroupCreated {
				g.State = GroupRescheduling
			}
		}
	}
}

// mend asks again for the bundles of a group that are lost.
func (b *Book) mend(g *Group) {
	if g.State == GroupRescheduling {
		b.ask(g)
	}
}

// partEnded is the end of a reservation that the group did not release: it was preempted, or all its nodes are gone.
func (b *Book) partEnded(g *Group, part *Part) {
	g.parts = slices.DeleteFunc(g.parts, func(p *Part) bool { return p == part })
	var d Decisions
	for _, key := range slices.Sorted(maps.Keys(b.held)) {
		if at := b.held[key].at; at.Group == g.ID && g.bundles[at.Bundle].part == part.ID {
			d.Evicted = append(d.Evicted, key)
			b.drop(key)
		}
	}
	g.lose(func(p *placed) bool { return p.part == part.ID })
	b.mend(g)
	b.cfg.Decided(d, true)
}

// bundleFor is where a request inside a group asks: the reservation, and the index in it; below zero: any. False: nothing is held yet.
func (g *Group) bundleFor(index int, want *placement.Bundle) (part string, at int, ok bool) {
	if index >= 0 {
		if index >= len(g.bundles) || g.bundles[index].node == "" {
			return "", 0, false
		}
		return g.bundles[index].part, g.bundles[index].index, true
	}
	if len(g.parts) == 1 && g.State == GroupCreated {
		return g.parts[0].ID, -1, true
	}
	for i, p := range g.bundles { // placed by several requests: the first that could hold it
		if p.node != "" && shareOf(g.Bundles[i][gpu]) >= want.Devices && shareOf(g.Bundles[i][cpu]) >= want.CPUs {
			return p.part, p.index, true
		}
	}
	return "", 0, false
}

// indexOf is the bundle of a group at an index of a reservation.
func (g *Group) indexOf(part string, index int) int {
	return slices.IndexFunc(g.bundles, func(p placed) bool { return p.part == part && p.index == index && p.node != "" })
}

// RemoveGroup removes a group: requests that wait for it are refused, and what runs in it is evicted.
func (b *Book) RemoveGroup(id, why string) { b.remove(b.groups[id], why) }

// EndOwner removes the groups of a process that has ended, unless they are detached.
func (b *Book) EndOwner(owner string) {
	for _, g := range b.Groups() {
		if g.Owner == owner && !g.Detached && g.State != GroupRemoved {
			b.remove(g, fmt.Sprintf("the creator of the placement group %s has ended", g.ID))
		}
	}
}

func (b *Book) remove(g *Group, why string) {
	if g == nil || g.State == GroupRemoved {
		return
	}
	var d Decisions
	for _, key := range slices.Sorted(maps.Keys(b.held)) {
		if b.held[key].at.Group == g.ID {
			d.Evicted = append(d.Evicted, key)
			b.drop(key)
		}
	}
	for _, part := range g.parts {
		b.cfg.Desk.Release(part.ID, part.token)
	}
	g.State, g.parts, g.bundles = GroupRemoved, nil, make([]placed, len(g.Bundles))
	d.Removed = append(d.Removed, g.ID)
	for _, w := range b.inOrder() {
		if w.Strategy.Kind == KindGroup && w.Strategy.Group == g.ID {
			b.withdraw(w)
			d.Refused = append(d.Refused, Refusal{Key: w.Key, Why: &RefusedError{GroupRemoved: true, Text: why}})
		}
	}
	b.removed = append(b.removed, g.ID)
	if len(b.removed) > removedMost {
		delete(b.groups, b.removed[0])
		b.removed = b.removed[1:]
	}
	b.cfg.Decided(d, false)
	if g.Gang.Name != "" { // the others of its gang may be complete without it
		gang := b.gangOf(g)
		for _, m := range gang {
			m.parts = slices.DeleteFunc(m.parts, func(p *Part) bool { return p.token == 0 && b.cfg.Desk.Withdraw(p.ID) })
		}
		for _, m := range gang {
			b.ask(m)
		}
	}
}
