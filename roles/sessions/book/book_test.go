package book_test

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/gpu"
	"troupe/nodes"
	"troupe/placement"
	"troupe/placement/planner"
	"troupe/roles/sessions/book"
)

func TestMain(m *testing.M) { bustest.Main(m) }

// head is a placement service and two nodes, each of two GPUs, two CPUs and three NPUs.
type head struct {
	t    *testing.T
	bus  *bus.Bus
	desk *placement.Desk
	stop map[string]func() // ends the reports of a node
}

func startHead(t *testing.T) *head {
	h := &head{t: t, bus: bustest.Open(t), stop: map[string]func(){}}
	service, err := placement.NewService(placement.Config{Bus: h.bus})
	require.NoError(t, err)
	h.desk = service.Desk()
	h.run(service.Run)
	require.NoError(t, h.desk.AwaitLead(t.Context()))
	inventories, err := gpu.Open(gpu.Config{Spec: "sim:2x2", Name: "n"})
	require.NoError(t, err)
	for i, inventory := range inventories {
		name := fmt.Sprintf("n-%d", i)
		reporter, err := nodes.NewReporter(nodes.Config{Bus: h.bus, Name: name, Inventory: inventory, CPUs: 2, Resources: map[string]int64{"NPU": 3000}})
		require.NoError(t, err)
		h.stop[name] = h.run(reporter.Run)
	}
	client, err := placement.NewClient(h.bus, "")
	require.NoError(t, err)
	defer client.Close()
	require.Eventually(t, func() bool {
		all, err := client.Nodes(t.Context())
		return err == nil && len(all) == 2 && all[0].State == placement.NodeReady && all[1].State == placement.NodeReady
	}, time.Minute, 5*time.Millisecond, "devices of both nodes can be granted")
	return h
}

func (h *head) run(run func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	doneCh := make(chan error, 1)
	go func() { doneCh <- run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(h.t, <-doneCh)
	})
	h.t.Cleanup(stop)
	return stop
}

// testBook is a book with what it has decided so far.
type testBook struct {
	t  *testing.T
	mu sync.Mutex // guards what follows, and the book
	*book.Book
	granted map[string]book.Allocation
	refused map[string]string // why
	evicted []string
	created []string
}

func (h *head) open() *testBook {
	d := &testBook{t: h.t, granted: map[string]book.Allocation{}, refused: map[string]string{}}
	d.Book = book.New(book.Config{Desk: h.desk, Namespace: "default", Locked: d.locked, Decided: func(found book.Decisions, _ bool) {
		for _, g := range found.Granted {
			d.granted[g.Key] = g
		}
		for _, r := range found.Refused {
			d.refused[r.Key] = r.Why.Text
		}
		d.evicted, d.created = append(d.evicted, found.Evicted...), append(d.created, found.Created...)
	}})
	d.until("both nodes are known", func() bool { return d.SetNodes("10.0.0.1", true) && len(d.Known()) == 2 })
	return d
}

func (d *testBook) locked(do func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	do()
}

func (d *testBook) until(what string, is func() bool) {
	d.t.Helper()
	require.Eventually(d.t, func() (yes bool) { d.locked(func() { yes = is() }); return yes }, time.Minute, 5*time.Millisecond, what)
}

func (d *testBook) ask(r book.Request) { d.locked(func() { d.Request(r) }) }

// gets waits until a key has what it asked for.
func (d *testBook) gets(r book.Request) (got book.Allocation) {
	d.t.Helper()
	d.ask(r)
	return d.has(r.Key)
}

func (d *testBook) has(key string) (got book.Allocation) {
	d.t.Helper()
	d.until(key+" is granted", func() (ok bool) { got, ok = d.granted[key]; return ok })
	return got
}

func gpus(key string, n float64) book.Request {
	return book.Request{Key: key, Holder: key, Demand: map[string]float64{"GPU": n}, Durable: true}
}

func cpus(key string, n float64) book.Request {
	return book.Request{Key: key, Holder: key, Demand: map[string]float64{"CPU": n}}
}

// A device has one holder at a time; who waits gets it when it is released, and a request that no node could hold says so.
func TestDevicesHaveOneHolder(t *testing.T) {
	h := startHead(t)
	d := h.open()
	seen := map[string]string{}
	for i := range 4 {
		key := fmt.Sprintf("actor-%d", i)
		got := d.gets(gpus(key, 1))
		require.Len(t, got.Devices["GPU"], 1)
		device := deviceOf(got)
		require.Empty(t, seen[device], device)
		seen[device] = key
		require.Equal(t, book.NodeID(got.Node), got.NodeID)
	}
	d.ask(gpus("late", 1))
	d.ask(gpus("wide", 3))
	d.ask(gpus("late", 2)) // a key that waits is left as it is
	d.until("two wait", func() bool {
		needs := d.Needs()
		return len(needs) == 2 && needs[0].Key == "late" && needs[0].Feasible && !needs[1].Feasible && len(d.Waiting()) == 2
	})
	d.locked(func() { d.Release("actor-2") })
	require.Equal(t, seenBy(seen, "actor-2"), deviceOf(d.has("late")))
	d.locked(func() {
		require.True(t, d.Withdraw("wide"))
		require.False(t, d.Withdraw("wide"))
		require.Empty(t, d.Waiting())
	})
}

func deviceOf(a book.Allocation) string { return a.Node + "/" + a.Devices["GPU"][0] }

func seenBy(seen map[string]string, key string) string {
	for device, by := range seen {
		if by == key {
			return device
		}
	}
	return ""
}

// Who waits for something else lends its CPUs, and has them back at once.
func TestCPUsOfWhoWaitsAreLent(t *testing.T) {
	h := startHead(t)
	d := h.open()
	for _, key := range []string{"a", "b"} {
		d.gets(cpus(key, 2))
	}
	d.ask(cpus("c", 2))
	d.locked(func() {
		require.Len(t, d.Waiting(), 1)
		d.Suspend("a")
		d.Suspend("stranger")
	})
	require.Equal(t, d.has("a").Node, d.has("c").Node)
	d.locked(func() { d.Resume("a"); d.Release("c") })
	d.ask(cpus("d", 1))
	require.Never(t, func() (yes bool) { d.locked(func() { _, yes = d.granted["d"] }); return yes }, 300*time.Millisecond, 20*time.Millisecond, "a has its CPUs again")
	d.locked(func() { d.Release("b") })
	require.Equal(t, d.has("b").Node, d.has("d").Node)
}

// Units of other kinds of devices are named by the lowest free indices.
func TestIndicesOfOtherDevices(t *testing.T) {
	h := startHead(t)
	d := h.open()
	npus := func(key string, n float64) book.Request {
		return book.Request{Key: key, Demand: map[string]float64{"NPU": n}, Durable: true, Strategy: book.Strategy{Kind: book.KindNode, NodeID: book.NodeID("n-1")}}
	}
	require.Equal(t, []string{"0"}, d.gets(npus("a", 1)).Devices["NPU"])
	require.Equal(t, []string{"1", "2"}, d.gets(npus("b", 2)).Devices["NPU"])
	d.ask(npus("c", 1))
	d.locked(func() { d.Release("a") })
	c := d.has("c")
	require.Equal(t, []string{"0"}, c.Devices["NPU"])
	require.Equal(t, "n-1", c.Node)
}

func TestNodesOfRequests(t *testing.T) {
	h := startHead(t)
	d := h.open()
	on := func(key string, s book.Strategy) book.Request {
		return book.Request{Key: key, Demand: map[string]float64{"CPU": 0.5}, Strategy: s}
	}
	require.Equal(t, "n-1", d.gets(on("hard", book.Strategy{Kind: book.KindNode, NodeID: book.NodeID("n-1")})).Node)
	require.NotEmpty(t, d.gets(on("soft", book.Strategy{Kind: book.KindNode, NodeID: "no such node", Soft: true})).Node)
	d.ask(on("gone", book.Strategy{Kind: book.KindNode, NodeID: "no such node"}))
	d.locked(func() { require.Contains(t, d.refused["gone"], "does not exist or is dead") })
	spread := map[string]bool{}
	for i := range 2 {
		spread[d.gets(on(fmt.Sprintf("spread-%d", i), book.Strategy{Kind: book.KindSpread})).Node] = true
	}
	require.Len(t, spread, 2)
	labelled := []planner.Selector{{{Key: book.NodeIDLabel, Values: []string{book.NodeID("n-0")}}}}
	require.Equal(t, "n-0", d.gets(on("label", book.Strategy{Where: labelled})).Node)
	d.locked(func() {
		rows := d.Nodes()
		require.Len(t, rows, 2)
		require.InDelta(t, 2, rows[0].Total["GPU"], 0)
		require.Contains(t, rows[0].Total, "node:10.0.0.1")
		require.Contains(t, rows[0].Total, "node:__internal_head__")
		require.NotContains(t, rows[1].Total, "node:__internal_head__")
	})
}

// group is a placement group of bundles of one GPU.
func group(id string, bundles int, strategy planner.Strategy) book.GroupInfo {
	g := book.GroupInfo{ID: id, Name: id, Namespace: "default", Owner: "owner", Strategy: string(strategy), Holder: id}
	for range bundles {
		g.Bundles = append(g.Bundles, map[string]float64{"GPU": 1})
	}
	return g
}

func (d *testBook) hasGroup(id string) (g *book.Group) {
	d.t.Helper()
	d.until(id+" is created", func() bool { g = d.Group(id); return g.State == book.GroupCreated && slices.Contains(d.created, id) })
	return g
}

// What asks for a bundle of a group waits for the group and has the bundle's device; a group that is removed takes it along.
func TestGroups(t *testing.T) {
	h := startHead(t)
	d := h.open()
	inside := func(key string, bundle int) book.Request {
		r := gpus(key, 1)
		r.Strategy = book.Strategy{Kind: book.KindGroup, Group: "pair", Bundle: bundle}
		return r
	}
	d.ask(inside("early", 0))
	d.locked(func() {
		require.Equal(t, "the placement group pair was removed", d.refused["early"], "it is not known")
		d.CreateGroup(group("pair", 2, planner.StrictSpread))
		d.CreateGroup(group("pair", 7, planner.Pack)) // one that is known is left as it is
		d.Request(inside("first", 0))
		require.Equal(t, d.Group("pair"), d.GroupNamed("default", "pair"))
		require.True(t, d.HasGroups())
	})
	g := d.hasGroup("pair")
	require.Len(t, slices.Compact(slices.Sorted(slices.Values(g.Placed()))), 2, "each bundle on a node of its own")
	first := d.has("first")
	require.Equal(t, g.Placed()[0], first.NodeID)
	require.Equal(t, "pair", first.Group)
	second := d.gets(inside("second", -1))
	require.NotEqual(t, first.NodeID, second.NodeID)
	require.Equal(t, 1, second.Bundle)
	d.ask(inside("third", -1))
	d.locked(func() {
		d.EndOwner("another")
		d.EndOwner("owner")
		require.Equal(t, []string{"first", "second"}, d.evicted)
		require.Contains(t, d.refused["third"], "the creator of the placement group pair has ended")
		require.Equal(t, book.GroupRemoved, d.Group("pair").State)
		require.Nil(t, d.GroupNamed("default", "pair"))
		require.False(t, d.HasGroups())
	})
	for i := range 4 { // everything is free again
		d.gets(gpus(fmt.Sprintf("after-%d", i), 1))
	}
}

// The groups of a gang are created together, or none is; without one that is removed the others are complete.
func TestGangs(t *testing.T) {
	h := startHead(t)
	d := h.open()
	member := func(id string, size int) book.GroupInfo {
		g := group(id, 2, planner.Pack)
		g.Gang = planner.Gang{Name: "gang", Size: size}
		return g
	}
	d.locked(func() { d.CreateGroup(member("a", 3)) })
	d.locked(func() { d.CreateGroup(member("b", 3)) })
	d.locked(func() { d.CreateGroup(member("c", 3)) })
	require.Never(t, func() (any bool) { d.locked(func() { any = len(d.created) > 0 }); return any }, 300*time.Millisecond, 20*time.Millisecond, "six devices are not there")
	d.locked(func() { d.RemoveGroup("b", "it is not needed") })
	d.hasGroup("a")
	d.hasGroup("c")
	d.locked(func() { require.Len(t, d.RemovedGangs(), 1) })
}

// What ran on a node that is gone is evicted, and bundles of a group that were there are placed again when there is room.
func TestANodeIsGone(t *testing.T) {
	h := startHead(t)
	d := h.open()
	d.locked(func() { d.CreateGroup(group("pair", 2, planner.Spread)) })
	g := d.hasGroup("pair")
	lost := "n-1"
	on := gpus("on it", 1)
	on.Strategy = book.Strategy{Kind: book.KindNode, NodeID: book.NodeID(lost)}
	d.gets(on)
	full := gpus("beside it", 1)
	full.Strategy = book.Strategy{Kind: book.KindNode, NodeID: book.NodeID("n-0")}
	d.gets(full)
	waits := gpus("waits", 1)
	waits.Strategy = on.Strategy
	d.ask(waits)
	h.stop[lost]()
	d.until("it is gone", func() bool { d.SetNodes("", false); return !d.Alive(book.NodeID(lost)) })
	d.locked(func() {
		require.Contains(t, d.evicted, "on it")
		require.Contains(t, d.refused["waits"], "does not exist or is dead")
		require.Equal(t, book.GroupRescheduling, g.State)
		require.Contains(t, g.Placed(), "")
		d.created = nil
		d.Release("beside it")
	})
	require.Equal(t, []string{book.NodeID("n-0"), book.NodeID("n-0")}, d.hasGroup("pair").Placed())
}

// A new book takes over what the earlier one has granted, and releases what nothing uses.
func TestABookIsRestored(t *testing.T) {
	h := startHead(t)
	d := h.open()
	kept, dropped := d.gets(gpus("kept", 1)), d.gets(gpus("dropped", 1))
	lease := book.Request{Key: "lease", Demand: map[string]float64{"GPU": 1, "CPU": 1}}
	held := d.gets(lease)
	d.locked(func() { d.CreateGroup(group("one", 1, planner.Pack)) })
	g := d.hasGroup("one")

	again := h.open()
	again.locked(func() {
		again.Pause()
		again.RestoreGroup(g.GroupInfo, book.GroupCreated, g.Parts())
		require.True(t, again.Restore(gpus("kept", 1), kept))
		require.False(t, again.Restore(gpus("kept", 1), kept), "it is there")
		again.RestoreLease(lease, held)
		elsewhere := kept
		elsewhere.NodeID = book.NodeID("gone")
		require.False(t, again.Restore(gpus("lost", 1), elsewhere))
		again.Request(gpus("next", 1))
		require.Len(t, again.Waiting(), 1, "nothing is granted before all is known")
		again.ReleaseUnknown(map[string]bool{})
		again.Continue()
	})
	next := again.has("next")
	require.Equal(t, deviceOf(dropped), deviceOf(next))
	again.locked(func() {
		require.Equal(t, book.GroupCreated, again.Group("one").State)
		for _, key := range []string{"kept", "lease"} {
			again.Release(key)
		}
	})
	for i := range 2 {
		again.gets(gpus(fmt.Sprintf("after-%d", i), 1))
	}
}

func TestAmountsAreChecked(t *testing.T) {
	for _, amount := range []float64{-1, math.NaN(), math.Inf(1), 1e15} {
		require.Error(t, book.CheckAmounts(map[string]float64{"memory": amount}), amount)
	}
	require.Error(t, book.CheckAmounts(map[string]float64{"GPU": 70_000}))
	require.NoError(t, book.CheckAmounts(map[string]float64{"GPU": 8, "memory": 1e12, "mine": 0.5}))
	standby := book.StandbyOf(map[string]float64{"CPU": 1.0 / 3, "memory": 1024, "mine": 1e-9})
	require.Equal(t, placement.Share(333), standby.CPUs)
	require.Equal(t, int64(1024), standby.Memory)
	require.Equal(t, []string{"mine"}, slices.Collect(maps.Keys(standby.Resources)))
	require.Equal(t, placement.Share(1), standby.Resources["mine"], "what is asked for is never nothing")
}
