package book

import (
	"errors"
	"fmt"
	"slices"

	"troupe/bus"
	"troupe/placement"
	"troupe/placement/planner"
)

// Prefix begins the ids of the reservations of a book.
const Prefix = "ray-"

// Config is what a Book works with.
type Config struct {
	Desk      *placement.Desk
	Namespace string
	// Locked runs a function under the lock that guards the book. Its methods are called with that lock held.
	Locked func(func())
	// Decided hears of grants and refusals, with the lock held. nodeDied: what is evicted ran on a node that is gone.
	Decided func(d Decisions, nodeDied bool)
}

// Request asks for resources under a key, which is granted or refused later. Durable requests, and all for devices, are in the ledger
// of placement; the others are leases of milliseconds to minutes.
type Request struct {
	Key      string
	Holder   string // shown to requests that wait for it
	Demand   map[string]float64
	Strategy Strategy
	Durable  bool
}

// Allocation is what a request was given.
type Allocation struct {
	Key     string
	Node    string // name
	NodeID  string
	Devices map[string][]string // by resource, the indices
	Group   string              // whose bundle provides it; empty: the node itself
	Bundle  int

	Record placement.Record // of a durable request
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

// Decisions are what has become of requests.
type Decisions struct {
	Granted []Allocation
	Refused []Refusal
	Created []string // groups
	Removed []string // groups
	Evicted []string // keys whose resources are gone: what holds them must end
}

// holding is what a key holds.
type holding struct {
	at       Allocation
	request  Request
	id       string
	volatile bool
}

// waiting is a request that waits.
type waiting struct {
	Request
	order int
	id    string // at the desk; empty: its group is not there yet
}

// Book is the state of nodes, requests and groups.
type Book struct {
	cfg     Config
	nodes   map[string]*node // by id
	groups  map[string]*Group
	held    map[string]*holding
	asked   map[string]*waiting
	removed []string // ids of removed groups, the oldest first

	arrivals, requests, turns int // so far: of nodes, of requests, of those that rotate
	paused                    bool
}

// New makes an empty Book.
func New(cfg Config) *Book {
	return &Book{cfg: cfg, nodes: map[string]*node{}, groups: map[string]*Group{}, held: map[string]*holding{}, asked: map[string]*waiting{}}
}

// Request asks for resources. A key that holds or waits already is left as it is.
func (b *Book) Request(r Request) {
	if b.held[r.Key] != nil || b.asked[r.Key] != nil {
		return
	}
	if why := b.impossible(r.Strategy); why != nil {
		b.cfg.Decided(Decisions{Refused: []Refusal{{Key: r.Key, Why: why}}}, false)
		return
	}
	w := &waiting{Request: r, order: b.requests}
	b.requests++
	b.asked[r.Key] = w
	b.submit(w)
}

// impossible is why a request with this strategy can never run; nil: it may.
func (b *Book) impossible(s Strategy) *RefusedError {
	switch s.Kind {
	case KindGroup:
		if g := b.groups[s.Group]; g == nil || g.State == GroupRemoved {
			return &RefusedError{GroupRemoved: true, Text: fmt.Sprintf("the placement group %s was removed", s.Group)}
		}
	case KindNode:
		if !s.Soft && !b.Alive(s.NodeID) {
			return &RefusedError{Text: fmt.Sprintf("the node %s of NodeAffinitySchedulingStrategy(soft=False) does not exist or is dead", s.NodeID)}
		}
	}
	return nil
}

// submit brings a request to the desk, unless its group is not there yet, or nothing is granted.
func (b *Book) submit(w *waiting) {
	if b.paused {
		return
	}
	q := b.requestOf(w.Demand, w.Strategy)
	if w.Strategy.Kind == KindGroup {
		g := b.groups[w.Strategy.Group]
		parent, index, ok := g.bundleFor(w.Strategy.Bundle, &q.Bundles[0])
		if !ok {
			return // until the group is created
		}
		q.Strategy, q.Parent, q.ParentBundle = "", parent, index
	}
	if w.id = Prefix + bus.NewID(); !w.Durable && q.Bundles[0].Devices > 0 {
		w.id = deviceLease(w.Key)
	}
	q.ID, q.Namespace, q.Holder, q.Opportunistic, q.AwaitNodes = w.id, b.cfg.Namespace, w.Holder, true, true
	id := w.id
	done := func(rec placement.Record, err error) { b.cfg.Locked(func() { b.answered(w, id, rec, err) }) }
	if w.Durable || q.Bundles[0].Devices > 0 {
		b.cfg.Desk.Reserve(q, done, nil)
		return
	}
	ended := func(string) { b.cfg.Locked(func() { b.evict(w.Key, id) }) }
	if rec, now := b.cfg.Desk.Lease(q, done, ended); now {
		b.answered(w, id, rec, nil)
	}
}

// deviceLease is the id of the reservation of a lease with devices, which a later book finds by its key.
func deviceLease(key string) string { return Prefix + "lease-" + key }

// evict ends what a key holds under that id.
func (b *Book) evict(key, id string) {
	if h := b.held[key]; h != nil && h.id == id {
		b.drop(key)
		b.cfg.Decided(Decisions{Evicted: []string{key}}, false)
	}
}

// answered is the outcome of a request at the desk.
func (b *Book) answered(w *waiting, id string, rec placement.Record, err error) {
	if b.asked[w.Key] != w || w.id != id {
		if err == nil { // nothing waits for it any more
			b.cfg.Desk.Release(rec.ID, rec.Token)
		}
		return
	}
	if err != nil {
		w.id = ""
		var unfit *placement.RequestError
		if !errors.As(err, &unfit) {
			delete(b.asked, w.Key)
			b.cfg.Decided(Decisions{Refused: []Refusal{{Key: w.Key, Why: &RefusedError{Text: err.Error()}}}}, false)
		}
		return // too large for its bundle, or its group has been moved: it waits for another group
	}
	delete(b.asked, w.Key)
	b.hold(w, rec)
}

// hold records what a request was granted.
func (b *Book) hold(w *waiting, rec placement.Record) {
	worker := &rec.Workers[0]
	at := Allocation{Key: w.Key, Node: worker.Node, NodeID: NodeID(worker.Node), Record: rec}
	var inside []map[string][]string
	if w.Strategy.Kind == KindGroup {
		g := b.groups[w.Strategy.Group]
		at.Group, at.Bundle = g.ID, g.indexOf(rec.Parent, rec.ParentBundle)
		inside = []map[string][]string{g.bundles[at.Bundle].devices}
	}
	at.Devices = b.devicesOf(worker, w.Demand, inside)
	b.held[w.Key] = &holding{at: at, request: w.Request, id: rec.ID, volatile: rec.Volatile}
	b.cfg.Decided(Decisions{Granted: []Allocation{at}}, false)
}

// Withdraw takes a request back that waits; what a key holds it keeps. It reports whether the request waited.
func (b *Book) Withdraw(key string) bool {
	w := b.asked[key]
	if w != nil {
		b.withdraw(w)
	}
	return w != nil
}

func (b *Book) withdraw(w *waiting) {
	delete(b.asked, w.Key)
	if w.id != "" {
		b.cfg.Desk.Withdraw(w.id)
	}
}

// Release gives back what a key holds; one that holds nothing is left as it is.
func (b *Book) Release(key string) {
	b.Withdraw(key)
	if h := b.held[key]; h != nil {
		b.drop(key)
	}
}

// drop releases what a key holds.
func (b *Book) drop(key string) {
	h := b.held[key]
	delete(b.held, key)
	b.cfg.Desk.Release(h.id, h.at.Record.Token)
}

// Suspend frees the CPUs of a key that waits for something else.
func (b *Book) Suspend(key string) {
	if h := b.held[key]; h != nil {
		b.cfg.Desk.SetCPUs(h.id, 0)
	}
}

// Resume takes the CPUs of a suspended key back, also where others have them by now.
func (b *Book) Resume(key string) {
	if h := b.held[key]; h != nil {
		b.cfg.Desk.SetCPUs(h.id, b.bundleOf(h.request.Demand).CPUs)
	}
}

// Restore gives a key the reservation that it held of an earlier Book: at.Record has its id and token. False: the node or the bundle is
// gone.
func (b *Book) Restore(r Request, at Allocation) bool {
	if !b.canRestore(at) || b.held[r.Key] != nil {
		return false
	}
	at.Key = r.Key
	b.held[r.Key] = &holding{at: at, request: r, id: at.Record.ID}
	return true
}

// RestoreLease gives a key the volatile lease that it held of an earlier Book.
func (b *Book) RestoreLease(r Request, at Allocation) {
	if !b.canRestore(at) || b.held[r.Key] != nil {
		return
	}
	at.Key = r.Key
	bundle := b.bundleOf(r.Demand)
	if bundle.Devices > 0 {
		b.restoreDeviceLease(r, at)
		return
	}
	lease := planner.Reservation{ID: Prefix + bus.NewID(), Namespace: b.cfg.Namespace, Holder: r.Holder, Volatile: true,
		Workers: []placement.Worker{{Node: at.Node, CPUs: bundle.CPUs, Memory: bundle.Memory, Resources: bundle.Resources}}}
	if g := b.groups[at.Group]; g != nil {
		p := &g.bundles[at.Bundle]
		lease.Parent, lease.ParentBundle, lease.SharesWith = p.part, p.index, p.part
	}
	b.held[r.Key] = &holding{at: at, request: r, id: lease.ID, volatile: true}
	b.cfg.Desk.Restore(lease)
}

// restoreDeviceLease gives a key the reservation of its lease, which is in the ledger.
func (b *Book) restoreDeviceLease(r Request, at Allocation) {
	records, _ := b.cfg.Desk.Reservations(b.cfg.Namespace)
	for _, rec := range records {
		if rec.ID == deviceLease(r.Key) {
			at.Record = rec
			b.held[r.Key] = &holding{at: at, request: r, id: rec.ID}
		}
	}
}

func (b *Book) canRestore(at Allocation) bool {
	g := b.groups[at.Group]
	return b.Alive(at.NodeID) && (at.Group == "" || g != nil && at.Bundle >= 0 && at.Bundle < len(g.bundles))
}

// Waiting lists the demands of requests that wait, the oldest first.
func (b *Book) Waiting() []map[string]float64 {
	out := []map[string]float64{}
	for _, r := range b.inOrder() {
		out = append(out, r.Demand)
	}
	return out
}

// inOrder lists the requests that wait, the oldest first.
func (b *Book) inOrder() []*waiting {
	out := make([]*waiting, 0, len(b.asked))
	for _, w := range b.asked {
		out = append(out, w)
	}
	slices.SortFunc(out, func(a, b *waiting) int { return a.order - b.order })
	return out
}

// Pause asks for nothing until Continue: what others hold is not known yet.
func (b *Book) Pause() { b.paused = true }

// Continue ends a pause, after which the leases of this namespace are known.
func (b *Book) Continue() {
	b.cfg.Desk.Settle(b.cfg.Namespace)
	b.paused = false
	for _, g := range b.Groups() {
		b.ask(g)
	}
	b.submitAll()
}

// submitAll brings the requests to the desk that are not there.
func (b *Book) submitAll() {
	for _, w := range b.inOrder() {
		if w.id == "" {
			b.submit(w)
		}
	}
}

// ReleaseUnknown releases the reservations of earlier books that nothing uses.
func (b *Book) ReleaseUnknown(used map[string]bool) {
	records, _ := b.cfg.Desk.Reservations(b.cfg.Namespace)
	for _, h := range b.held {
		used[h.id] = true
	}
	for _, g := range b.groups {
		for _, p := range g.parts {
			used[p.ID] = true
		}
	}
	for _, rec := range records {
		if len(rec.ID) > len(Prefix) && rec.ID[:len(Prefix)] == Prefix && !used[rec.ID] && b.isOlder(rec) {
			b.cfg.Desk.Release(rec.ID, rec.Token)
		}
	}
}

// isOlder reports whether no request of this book made the reservation.
func (b *Book) isOlder(rec placement.Record) bool {
	return !slices.ContainsFunc(b.inOrder(), func(w *waiting) bool { return w.id == rec.ID })
}
