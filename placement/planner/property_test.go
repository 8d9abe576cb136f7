package planner

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// genNodes draws a few nodes of different sizes, labels and states.
func genNodes(t *rapid.T, most int) []Node {
	nodes := make([]Node, rapid.IntRange(1, most).Draw(t, "nodes"))
	for n := range nodes {
		nodes[n] = Node{
			ID:       fmt.Sprintf("n%d", n),
			Rank:     2 * n, // ranks may have gaps
			CPUs:     Wholes(rapid.IntRange(0, 16).Draw(t, "cpus")),
			Memory:   rapid.Int64Range(0, 64).Draw(t, "memory"),
			Labels:   map[string]string{"rack": fmt.Sprint(rapid.IntRange(0, 1).Draw(t, "rack"))},
			State:    rapid.SampledFrom([]NodeState{NodeReady, NodeReady, NodeReady, NodeLost, NodeUnproven}).Draw(t, "state"),
			Cordoned: rapid.SampledFrom([]string{"", "", "", "", "", "", "", "by anna"}).Draw(t, "cordoned"),
			Devices:  genDevices(t, n),
		}
	}
	return nodes
}

func genDevices(t *rapid.T, node int) []Device {
	devices := make([]Device, rapid.IntRange(0, 8).Draw(t, "devices"))
	for i := range devices {
		devices[i] = Device{
			UUID:   fmt.Sprintf("GPU-%d-%d", node, i),
			Index:  i,
			NUMA:   rapid.IntRange(0, 1).Draw(t, "numa"),
			Island: rapid.IntRange(0, 2).Draw(t, "island"),
		}
		if rapid.IntRange(0, 9).Draw(t, "unfit") == 9 {
			devices[i].Unfit = "XID 79"
		}
		if rapid.IntRange(0, 15).Draw(t, "cordoned") == 15 {
			devices[i].Cordoned = "by anna"
		}
	}
	return devices
}

func genBundle(t *rapid.T) Bundle {
	b := Bundle{
		Devices: rapid.SampledFrom([]Share{0, 250, 400, 500, 1000, 1000, 2000, 3000, 4000, 8000}).Draw(t, "devices"),
		CPUs:    rapid.SampledFrom([]Share{0, 0, 500, 1000, 4000}).Draw(t, "cpus"),
		Memory:  rapid.SampledFrom([]int64{0, 0, 1, 8}).Draw(t, "memory"),
		Spans:   rapid.IntRange(0, 5).Draw(t, "spans") == 5,
	}
	if rapid.IntRange(0, 5).Draw(t, "labelled") == 5 {
		b.Labels = map[string]string{"rack": "0"}
	}
	if rapid.IntRange(0, 9).Draw(t, "pinned") == 9 {
		b.Node = "n0"
	}
	return b
}

// genRequest draws a request, now and then colocated with one of the hosts.
func genRequest(t *rapid.T, id string, hosts []string) Request {
	r := Request{
		ID:       id,
		Strategy: rapid.SampledFrom(gangStrategies).Draw(t, "strategy"),
		Priority: rapid.IntRange(0, 2).Draw(t, "priority"),
		Topology: Topology{
			Within: rapid.SampledFrom([]Within{Anywhere, Anywhere, Island, NUMA}).Draw(t, "within"),
			Label:  rapid.SampledFrom([]string{"", "", "rack"}).Draw(t, "label"),
		},
	}
	r.Topology.Required = (r.Topology.Within != Anywhere || r.Topology.Label != "") && rapid.Bool().Draw(t, "required")
	for range rapid.IntRange(1, 3).Draw(t, "kinds") {
		r.Bundles = append(r.Bundles, Repeat(rapid.IntRange(1, 3).Draw(t, "count"), genBundle(t))...)
	}
	if len(hosts) > 0 && rapid.IntRange(0, 3).Draw(t, "colocated") == 3 {
		r.Colocate = rapid.SampledFrom(hosts).Draw(t, "host")
	}
	return r
}

// genPlanner draws nodes and grants random requests on them.
func genPlanner(t *rapid.T, nodes, requests int) *Planner {
	pl, err := New(Snapshot{Now: testNow, Nodes: genNodes(t, nodes)})
	require.NoError(t, err)
	var ids []string
	for i := range rapid.IntRange(0, requests).Draw(t, "requests") {
		r := genRequest(t, fmt.Sprintf("r%d", i), ids)
		if grant(t, pl, r, testNow.Add(time.Duration(i-100)*time.Second)) {
			ids = append(ids, r.ID)
		}
	}
	return pl
}

// grant grants r, if it fits.
func grant(t require.TestingT, pl *Planner, r Request, since time.Time) bool {
	plan, err := pl.Plan(r)
	if err != nil || !plan.Granted {
		return false
	}
	require.NoError(t, pl.Grant(plan.Reservation(r, since)))
	return true
}

// requireSound checks the invariants of a planner: no device is over-granted, and all counts are correct.
func requireSound(t require.TestingT, pl *Planner) {
	for _, s := range pl.nodes {
		fresh := newNodeState(s.info, s.layout)
		require.Zero(t, s.gangBundles, "something of a plan was left behind")
		for pos := range s.used {
			sums := map[string]map[*allocation]Share{}
			for _, alloc := range pl.allocations {
				for _, dev := range alloc.devices {
					if dev.node == s && dev.pos == pos {
						if sums[alloc.groupName()] == nil {
							sums[alloc.groupName()] = map[*allocation]Share{}
						}
						sums[alloc.groupName()][alloc] += dev.slot.Share
					}
				}
			}
			var used Share
			for _, members := range sums {
				var most Share
				for _, sum := range members {
					most = max(most, sum)
				}
				used += most
			}
			require.LessOrEqual(t, used, Whole, "device %d of %s is over-granted", pos, s.info.ID)
			require.Equal(t, used, s.used[pos])
			fresh.use(pos, used)
		}
		require.Equal(t, []int{fresh.freeCount, fresh.partlyUsed}, []int{s.freeCount, s.partlyUsed})
		require.Equal(t, fresh.free, s.free)
		require.Equal(t, fresh.grantable, s.grantable)
		require.Equal(t, fresh.open, s.open)
	}
}

func TestNoDeviceIsOverGranted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		requireSound(t, genPlanner(t, 4, 8))
	})
}

func TestOnlyGrantableDevices(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pl := genPlanner(t, 4, 5)
		plan, err := pl.Plan(genRequest(t, "new", nil))
		if err != nil {
			return
		}
		for _, w := range plan.Workers {
			require.True(t, pl.byID[w.Node].info.open(), "worker %d on %s", w.Rank, w.Node)
			for _, slot := range w.Slots {
				s := pl.byID[slot.Node]
				require.True(t, s.info.open())
				require.True(t, s.info.Devices[s.position(&slot)].grantable())
			}
		}
	})
}

func TestGangsAreGrantedWhole(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pl := genPlanner(t, 4, 5)
		r := genRequest(t, "new", nil)
		plan, err := pl.Plan(r)
		if err != nil {
			require.ErrorIs(t, err, ErrInvalid)
			return
		}
		if !plan.Granted {
			require.Empty(t, plan.Workers)
			require.NotEmpty(t, plan.Reasons)
			return
		}
		require.Len(t, plan.Workers, len(r.Bundles))
		for i, w := range plan.Workers {
			requireServed(t, pl, r.Bundles[i], w)
			require.Equal(t, i, w.Rank)
		}
		requireStrategy(t, pl, r, plan.Workers)
	})
}

// requireServed checks that a worker has what its bundle asks for.
func requireServed(t require.TestingT, pl *Planner, bundle Bundle, w Worker) {
	var sum Share
	for i, slot := range w.Slots {
		sum += slot.Share
		require.Equal(t, slot.Index, w.Devices[i])
		require.True(t, bundle.Spans || slot.Node == w.Node)
	}
	require.Equal(t, bundle.Devices, sum)
	require.Equal(t, bundle.CPUs, w.CPUs)
	require.Equal(t, bundle.Memory, w.Memory)
	require.True(t, pl.byID[w.Node].matches(&bundle))
	require.GreaterOrEqual(t, pl.byID[w.Node].cpus, w.CPUs)
}

func requireStrategy(t require.TestingT, pl *Planner, r Request, workers []Worker) {
	nodes := map[string]int{}
	for _, w := range workers {
		on := map[string]bool{w.Node: true}
		for _, slot := range w.Slots {
			on[slot.Node] = true
		}
		for node := range on {
			nodes[node]++
		}
	}
	switch r.Strategy {
	case StrictPack:
		require.Len(t, nodes, 1)
	case StrictSpread:
		for node, n := range nodes {
			require.Equal(t, 1, n, "node %s", node)
		}
	}
	if r.Topology.Required {
		requireTopology(t, pl, r, workers, nodes)
	}
}

func requireTopology(t require.TestingT, pl *Planner, r Request, workers []Worker, nodes map[string]int) {
	racks := map[string]bool{}
	for node := range nodes {
		racks[pl.byID[node].info.Labels["rack"]] = true
	}
	require.True(t, r.Topology.Label == "" || len(racks) == 1, "%v", racks)
	for _, w := range workers {
		near := map[int]bool{}
		for _, slot := range w.Slots {
			s := pl.byID[slot.Node]
			switch d := s.info.Devices[s.position(&slot)]; r.Topology.Within {
			case Island:
				near[d.Island] = true
			case NUMA:
				near[d.NUMA] = true
			}
		}
		require.LessOrEqual(t, len(near), 1)
	}
}

func TestPlanningAgainChangesNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pl := genPlanner(t, 4, 6)
		before := pl.Snapshot()
		r := genRequest(t, "new", nil)
		first, err := pl.Plan(r)
		again, errAgain := pl.Plan(r)
		require.Equal(t, first, again)
		require.Equal(t, err, errAgain)
		require.Equal(t, before, pl.Snapshot())
		requireSound(t, pl)
	})
}

func TestHistoryDoesNotMatter(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pl := genPlanner(t, 4, 6)
		for _, alloc := range slices.Clone(pl.allocations) {
			if rapid.Bool().Draw(t, "release") {
				pl.Release(alloc.ID)
			}
		}
		if len(pl.nodes) > 1 && rapid.Bool().Draw(t, "flap") {
			node := *pl.nodes[0].info
			pl.RemoveNode(node.ID)
			require.NoError(t, pl.SetNode(node))
		}
		requireSound(t, pl)
		r := genRequest(t, "new", nil)
		plan, err := pl.Plan(r)
		fresh, errFresh := Decide(pl.Snapshot(), r)
		require.Equal(t, plan, fresh)
		require.Equal(t, err, errFresh)
	})
}

func TestOrderOfInputDoesNotMatter(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := genPlanner(t, 4, 6).Snapshot()
		r := genRequest(t, "new", nil)
		plan, err := Decide(s, r)
		permuted := s
		permuted.Nodes = rapid.Permutation(s.Nodes).Draw(t, "nodes")
		permuted.Reservations = rapid.Permutation(s.Reservations).Draw(t, "reservations")
		for i := range permuted.Nodes {
			n := &permuted.Nodes[i]
			n.Devices = rapid.Permutation(n.Devices).Draw(t, "devices")
		}
		again, errAgain := Decide(permuted, r)
		require.Equal(t, plan, again)
		require.Equal(t, err, errAgain)
	})
}

func TestReleaseOfAllLeavesNothingBehind(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		nodes := genNodes(t, 4)
		pl, err := New(Snapshot{Now: testNow, Nodes: nodes})
		require.NoError(t, err)
		empty := pl.Snapshot()
		var ids []string
		for i := range rapid.IntRange(1, 8).Draw(t, "requests") {
			if r := genRequest(t, fmt.Sprintf("r%d", i), ids); grant(t, pl, r, testNow) {
				ids = append(ids, r.ID)
			}
		}
		for _, id := range rapid.Permutation(ids).Draw(t, "order") {
			_, released := pl.Release(id)
			require.True(t, released)
			_, again := pl.Release(id)
			require.False(t, again, "releasing again changes nothing")
			requireSound(t, pl)
		}
		require.Equal(t, empty, pl.Snapshot())
		require.Empty(t, pl.groups)
		require.Empty(t, pl.usage)
		for _, s := range pl.nodes {
			require.Equal(t, s.info.CPUs, s.cpus)
			require.Equal(t, s.info.Memory, s.memory)
		}
	})
}

// Once what a wait lists is gone, the request fits; and every item of the list is necessary.
func TestWaitsAreExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pl := genPlanner(t, 4, 8)
		r := genRequest(t, "new", nil)
		plan, err := pl.Plan(r)
		if err != nil || plan.Granted || plan.Never {
			return
		}
		require.NotEmpty(t, plan.WaitsFor)
		snapshot := pl.Snapshot()
		for i := range plan.WaitsFor {
			pl2, err := New(snapshot)
			require.NoError(t, err)
			remove(t, pl2, slices.Delete(slices.Clone(plan.WaitsFor), i, i+1))
			after, err := pl2.Plan(r)
			require.NoError(t, err)
			require.False(t, after.Granted, "named in vain: %v", plan.WaitsFor[i])
		}
		remove(t, pl, plan.WaitsFor)
		after, err := pl.Plan(r)
		require.NoError(t, err)
		require.True(t, after.Granted, "waited for %v, then: %v", plan.WaitsFor, after.Reasons)
	})
}

// remove removes the obstacles of a request.
func remove(t require.TestingT, pl *Planner, obstacles []Obstacle) {
	for _, o := range obstacles {
		switch o.Kind {
		case ObstacleHeld:
			_, ok := pl.Release(o.Reservation)
			require.True(t, ok)
		case ObstacleNode:
			node := *pl.byID[o.Node].info
			node.State, node.Cordoned = NodeReady, ""
			require.NoError(t, pl.SetNode(node))
		case ObstacleDevice:
			node := *pl.byID[o.Node].info
			node.Devices = slices.Clone(node.Devices)
			pos := slices.IndexFunc(node.Devices, func(d Device) bool { return d.UUID == o.Devices[0].UUID })
			node.Devices[pos].Unfit, node.Devices[pos].Cordoned = "", ""
			require.NoError(t, pl.SetNode(node))
		}
	}
}

// Every request that fits somehow is granted: an exhaustive search agrees.
func TestNothingThatFitsIsRefused(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pl := genPlanner(t, 3, 4)
		r := genRequest(t, "new", nil)
		r.Topology = Topology{}
		for i := range r.Bundles {
			r.Bundles[i].Spans = false
		}
		plan, err := pl.Plan(r)
		require.Equal(t, bruteForce(pl, r), err == nil && plan.Granted, "%v %v", err, plan.Reasons)
	})
}

// bruteForce reports whether the bundles of r fit in any assignment.
func bruteForce(pl *Planner, r Request) bool {
	type machine struct {
		left   []Share
		cpus   Share
		memory int64
		load   int
	}
	machines := make([]machine, len(pl.nodes))
	for i, s := range pl.nodes {
		machines[i] = machine{cpus: s.cpus, memory: s.memory}
		for pos := range s.used {
			machines[i].left = append(machines[i].left, s.available(pos))
		}
	}
	var from func(rank, only int) bool
	from = func(rank, only int) bool {
		if rank == len(r.Bundles) {
			return true
		}
		bundle := &r.Bundles[rank]
		for i, s := range pl.nodes {
			m := &machines[i]
			if only >= 0 && i != only || !s.open || !s.matches(bundle) || m.cpus < bundle.CPUs || m.memory < bundle.Memory {
				continue
			}
			if r.Strategy == StrictSpread && m.load > 0 {
				continue
			}
			next := only
			if r.Strategy == StrictPack {
				next = i
			}
			saved := slices.Clone(m.left)
			m.cpus, m.memory, m.load = m.cpus-bundle.CPUs, m.memory-bundle.Memory, m.load+1
			if bundle.partial() {
				for pos := range m.left {
					if m.left[pos] >= bundle.Devices {
						m.left[pos] -= bundle.Devices
						if from(rank+1, next) {
							return true
						}
						m.left[pos] += bundle.Devices
					}
				}
			} else {
				need := bundle.devices()
				for pos := range m.left {
					if need > 0 && m.left[pos] == Whole {
						m.left[pos] = 0
						need--
					}
				}
				if need == 0 && from(rank+1, next) {
					return true
				}
				copy(m.left, saved)
			}
			m.cpus, m.memory, m.load = m.cpus+bundle.CPUs, m.memory+bundle.Memory, m.load-1
		}
		return false
	}
	return from(0, -1)
}
