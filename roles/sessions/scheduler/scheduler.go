package scheduler

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// hybrid is the part of its busiest resource up to which a node is filled before the next is used.
const hybrid = 0.5

// Kinds of strategies of a request.
const (
	KindDefault = ""
	KindSpread  = "SPREAD"
	KindNode    = "node"
	KindGroup   = "placement_group"
	KindLabels  = "labels"
)

// Strategy says where a request may run. The zero Strategy is any node.
type Strategy struct {
	Kind   string
	NodeID string // with KindNode
	Soft   bool   // with KindNode: another node will do where this one is gone or too small
	Group  string // with KindGroup: the id
	Bundle int    // with KindGroup: the index; below zero: any
	Hard   map[string][]string
}

// text is the same for equal strategies alone.
func (s Strategy) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s|%s|%t|%s|%d", s.Kind, s.NodeID, s.Soft, s.Group, s.Bundle)
	for _, k := range slices.Sorted(maps.Keys(s.Hard)) {
		fmt.Fprintf(&b, "|%q=%q", k, s.Hard[k])
	}
	return b.String()
}

// Allocation is what a request was given.
type Allocation struct {
	Key     string
	Node    string // name
	NodeID  string
	Devices map[string][]string // by resource, the indices
	Group   string              // whose bundle provides it; empty: the node itself
	Bundle  int
}

// Refusal is a request that can never run.
type Refusal struct {
	Key string
	Why *RefusedError
}

// RefusedError says that a request can never run: its node is gone, or its placement group was removed.
type RefusedError struct {
	GroupRemoved bool
	Text         string
}

func (e *RefusedError) Error() string { return e.Text }

// Decisions follow from a change.
type Decisions struct {
	Granted []Allocation
	Refused []Refusal
	Created []string // groups
	Removed []string // groups
	Evicted []string // keys whose resources are gone: what holds them must end
}

// allocation is what a key holds.
type allocation struct {
	node      *node
	group     *Group
	bundle    int
	room      *room
	demand    amounts
	shares    shares
	suspended bool
}

// request is a request that waits.
type request struct {
	key      string
	units    amounts
	demand   map[string]float64
	strategy Strategy
	shape    string
	order    int
}

// Scheduler is the state of nodes, requests and groups. It is not safe for concurrent use.
type Scheduler struct {
	nodes   map[string]*node // by id
	groups  map[string]*Group
	held    map[string]*allocation
	waiting map[string]*request
	queues  map[string][]*request // by shape, in order: of equal requests the first decides
	pending []*Group              // with bundles that are not held, in the order of their requests

	paused   bool     // nothing is granted
	arrivals int      // of nodes
	requests int      // so far
	spreads  int      // requests with KindSpread that were granted
	removed  []string // ids of removed groups, the oldest first
}

// New makes an empty Scheduler.
func New() *Scheduler {
	return &Scheduler{nodes: map[string]*node{}, groups: map[string]*Group{}, held: map[string]*allocation{}, waiting: map[string]*request{}, queues: map[string][]*request{}}
}

// Request asks for resources under a key, which is granted or refused by these or later decisions. A key that holds or waits
// already is left as it is.
func (s *Scheduler) Request(key string, demand map[string]float64, strategy Strategy) Decisions {
	var d Decisions
	if s.held[key] != nil || s.waiting[key] != nil {
		return d
	}
	if why := s.impossible(strategy); why != nil {
		d.Refused = append(d.Refused, Refusal{Key: key, Why: why})
		return d
	}
	r := &request{key: key, units: unitsOf(demand), demand: demand, strategy: strategy, order: s.requests}
	s.requests++
	r.shape = shapeOf(r.units, strategy)
	queue := s.queues[r.shape]
	s.waiting[key] = r
	s.queues[r.shape] = append(queue, r)
	if len(queue) == 0 && !s.paused && s.try(r.shape, &d) && len(s.pending) > 0 { // behind an equal request that waits it does not fit either
		s.grant(&d)
	}
	return d
}

func shapeOf(units amounts, strategy Strategy) string {
	var b strings.Builder
	for _, name := range units.names() {
		b.WriteString(strconv.Quote(name) + "=" + strconv.FormatInt(units[name], 10) + " ")
	}
	return b.String() + strategy.text()
}

// Withdraw takes a request back that waits; what a key holds it keeps. It reports whether the request waited.
func (s *Scheduler) Withdraw(key string) bool {
	r := s.waiting[key]
	if r != nil {
		s.dequeue(r)
	}
	return r != nil
}

func (s *Scheduler) dequeue(r *request) {
	delete(s.waiting, r.key)
	queue := s.queues[r.shape]
	if queue[0] == r {
		queue[0] = nil
		queue = queue[1:]
	} else {
		queue = slices.DeleteFunc(queue, func(q *request) bool { return q == r })
	}
	if s.queues[r.shape] = queue; len(queue) == 0 {
		delete(s.queues, r.shape)
	}
}

// Release gives back what a key holds; one that holds nothing is left as it is.
func (s *Scheduler) Release(key string) Decisions {
	var d Decisions
	s.Withdraw(key)
	a := s.held[key]
	if a == nil {
		return d
	}
	delete(s.held, key)
	demand := a.demand
	if a.suspended {
		demand = maps.Clone(demand)
		delete(demand, "CPU")
	}
	a.room.give(demand, a.shares)
	s.grant(&d)
	return d
}

// Suspend frees the CPUs of a key that waits for something else.
func (s *Scheduler) Suspend(key string) Decisions {
	var d Decisions
	if a := s.held[key]; a != nil && !a.suspended && a.demand["CPU"] > 0 {
		a.suspended = true
		a.room.free["CPU"] += a.demand["CPU"]
		s.grant(&d)
	}
	return d
}

// Resume takes the CPUs of a suspended key back, also where others have them by now.
func (s *Scheduler) Resume(key string) {
	if a := s.held[key]; a != nil && a.suspended {
		a.suspended = false
		a.room.free["CPU"] -= a.demand["CPU"]
	}
}

// Restore gives a key what it held of an earlier Scheduler. False: the node or the bundle is gone.
func (s *Scheduler) Restore(key string, demand map[string]float64, nodeID, group string, bundleIndex int, devices map[string][]string) bool {
	n, units := s.nodes[nodeID], unitsOf(demand)
	if n == nil || !n.alive || s.held[key] != nil {
		return false
	}
	a := &allocation{node: n, room: &n.room, bundle: bundleIndex, demand: units}
	if group != "" {
		g := s.groups[group]
		if g == nil || bundleIndex < 0 || bundleIndex >= len(g.bundles) || g.bundles[bundleIndex].node != n {
			return false
		}
		a.group, a.room = g, g.bundles[bundleIndex].room
	}
	a.shares = a.room.takeDevices(units, devices)
	s.held[key] = a
	return true
}

// takeDevices takes a demand with given devices, as far as they are there.
func (r *room) takeDevices(demand amounts, devices map[string][]string) shares {
	taken := shares{}
	for name, amount := range demand {
		if _, indexed := r.devices[name]; !indexed {
			continue
		}
		taken[name] = map[int]int64{}
		for _, text := range devices[name] {
			i, err := strconv.Atoi(text)
			if share := min(amount, Unit, r.devices[name][i]); err == nil && share > 0 {
				taken[name][i] = share
				amount -= share
			}
		}
	}
	r.move(demand, taken, -1)
	return taken
}

// Held reports whether a key holds resources.
func (s *Scheduler) Held(key string) bool { return s.held[key] != nil }

// Waiting lists the demands of requests that wait, the oldest first.
func (s *Scheduler) Waiting() []map[string]float64 {
	out := []map[string]float64{}
	for _, r := range s.inOrder() {
		out = append(out, r.demand)
	}
	return out
}

// inOrder lists the requests that wait, the oldest first.
func (s *Scheduler) inOrder() []*request {
	out := slices.Collect(maps.Values(s.waiting))
	slices.SortFunc(out, func(a, b *request) int { return a.order - b.order })
	return out
}

// Pause grants nothing until Continue: what others hold is not known yet.
func (s *Scheduler) Pause() { s.paused = true }

// Continue ends a pause.
func (s *Scheduler) Continue() Decisions {
	var d Decisions
	if s.paused {
		s.paused = false
		s.grant(&d)
	}
	return d
}

// grant creates groups and grants requests that fit now, the older first. Bundles are packed greedily, so that what one of them takes can
// make another group fit: groups that wait are tried again after each success.
func (s *Scheduler) grant(d *Decisions) {
	for again := !s.paused; again; {
		created := s.createGroups(d)
		granted := s.grantRequests(d)
		again = (created || granted) && len(s.pending) > 0
	}
}

// createGroups creates the groups that fit, and reports whether there was one.
func (s *Scheduler) createGroups(d *Decisions) bool {
	before := len(d.Created)
	for _, g := range s.pending {
		for _, created := range s.createGang(g) {
			d.Created = append(d.Created, created.ID)
		}
	}
	s.pending = slices.DeleteFunc(s.pending, func(g *Group) bool { return g.State == GroupCreated })
	return len(d.Created) > before
}

// grantRequests grants the requests that fit, and reports whether there was one.
func (s *Scheduler) grantRequests(d *Decisions) bool {
	before := len(d.Granted)
	failed := map[string]bool{}
	for {
		var first *request
		for shape, queue := range s.queues {
			if !failed[shape] && (first == nil || queue[0].order < first.order) {
				first = queue[0]
			}
		}
		if first == nil {
			return len(d.Granted) > before
		}
		if !s.try(first.shape, d) {
			failed[first.shape] = true
		}
	}
}

// try grants the first request of a shape, if it fits.
func (s *Scheduler) try(shape string, d *Decisions) bool {
	r := s.queues[shape][0]
	a := s.roomFor(r.units, r.strategy)
	if a == nil {
		return false
	}
	s.dequeue(r)
	a.demand, a.shares = r.units, a.room.take(r.units)
	s.held[r.key] = a
	out := Allocation{Key: r.key, Node: a.node.name, NodeID: a.node.id, Devices: a.shares.indices(), Bundle: a.bundle}
	if a.group != nil {
		out.Group = a.group.ID
	}
	d.Granted = append(d.Granted, out)
	return true
}

// impossible is why a request with this strategy can never run; nil: it may.
func (s *Scheduler) impossible(strategy Strategy) *RefusedError {
	switch strategy.Kind {
	case KindGroup:
		if g := s.groups[strategy.Group]; g == nil || g.State == GroupRemoved {
			return &RefusedError{GroupRemoved: true, Text: fmt.Sprintf("the placement group %s was removed", strategy.Group)}
		}
	case KindNode:
		if n := s.nodes[strategy.NodeID]; !strategy.Soft && (n == nil || !n.alive) {
			return &RefusedError{Text: fmt.Sprintf("the node %s of NodeAffinitySchedulingStrategy(soft=False) does not exist or is dead", strategy.NodeID)}
		}
	}
	return nil
}

// roomFor chooses where a request runs; nil: it does not fit now.
func (s *Scheduler) roomFor(units amounts, strategy Strategy) *allocation {
	if strategy.Kind == KindGroup {
		g := s.groups[strategy.Group]
		for i, b := range g.bundles {
			if b.room != nil && (strategy.Bundle < 0 || strategy.Bundle == i) && b.room.fits(units) {
				return &allocation{node: b.node, group: g, bundle: i, room: b.room}
			}
		}
		return nil
	}
	nodes := s.alive()
	switch strategy.Kind {
	case KindNode:
		if n := s.nodes[strategy.NodeID]; n != nil && n.alive && (!strategy.Soft || n.couldFit(units)) {
			nodes = []*node{n}
		}
	case KindLabels:
		nodes = slices.DeleteFunc(nodes, func(n *node) bool { return !n.matches(strategy.Hard) })
	}
	able := slices.DeleteFunc(nodes, func(n *node) bool { return !n.fits(units) })
	if len(able) == 0 {
		return nil
	}
	var n *node
	if strategy.Kind == KindSpread {
		s.spreads++
		n = able[s.spreads%len(able)]
	} else {
		n = slices.MinFunc(able, func(a, b *node) int { return slices.Compare(a.rankFor(units), b.rankFor(units)) })
	}
	return &allocation{node: n, room: &n.room}
}

func (n *node) matches(hard map[string][]string) bool {
	for label, values := range hard {
		if value, there := n.labels[label]; !there || !slices.Contains(values, value) {
			return false
		}
	}
	return true
}

// rankFor orders nodes for a request: those without devices first where none is asked for, then the less busy beyond hybrid, then
// the first that came.
func (n *node) rankFor(units amounts) []float64 {
	wantsDevices := slices.ContainsFunc(deviceNames, func(name string) bool { return units[name] > 0 })
	return []float64{boolRank(!wantsDevices && len(n.devices) > 0), max(n.load(), hybrid), float64(n.order)}
}
