package scheduler_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/roles/sessions/scheduler"
)

type demand = map[string]float64

func node(name string, total demand) scheduler.NodeInfo {
	return scheduler.NodeInfo{Name: name, Address: name, Total: total}
}

// with makes a scheduler of these nodes.
func with(nodes ...scheduler.NodeInfo) *scheduler.Scheduler {
	s := scheduler.New()
	s.SetNodes(nodes)
	return s
}

func keys(d scheduler.Decisions) []string {
	out := []string{}
	for _, a := range d.Granted {
		out = append(out, a.Key)
	}
	return out
}

func TestRequestsWaitAndAreGrantedInOrder(t *testing.T) {
	s := with(node("a", demand{"CPU": 2}))
	require.Equal(t, []string{"one"}, keys(s.Request("one", demand{"CPU": 1.5}, scheduler.Strategy{})))
	require.Empty(t, keys(s.Request("two", demand{"CPU": 1}, scheduler.Strategy{})))
	require.Empty(t, keys(s.Request("three", demand{"CPU": 1}, scheduler.Strategy{})))
	require.Equal(t, []string{"small"}, keys(s.Request("small", demand{"CPU": 0.5}, scheduler.Strategy{})), "one that fits is not held up")
	require.Equal(t, []demand{{"CPU": 1}, {"CPU": 1}}, s.Waiting())
	require.Equal(t, []string{"two"}, keys(s.Release("one")), "the older first")
	require.True(t, s.Withdraw("three"))
	require.False(t, s.Withdraw("three"))
	require.Empty(t, keys(s.Release("small")))
	require.Empty(t, keys(s.Release("never seen")))
	require.Empty(t, keys(s.Request("two", demand{"CPU": 1}, scheduler.Strategy{})), "a key that holds is left as it is")
}

func TestChoiceOfANode(t *testing.T) {
	cpu, gpu := demand{"CPU": 4}, demand{"CPU": 4, "GPU": 2}
	b := scheduler.NodeID("b")
	for name, c := range map[string]struct {
		strategy scheduler.Strategy
		demand   demand
		want     []string
	}{
		"beyond half of a node, then the next": {scheduler.Strategy{}, demand{"CPU": 1}, []string{"b", "b", "b", "c", "c", "c", "b"}},
		"devices":                              {scheduler.Strategy{}, demand{"GPU": 1}, []string{"a", "a", ""}},
		"spread":                               {scheduler.Strategy{Kind: scheduler.KindSpread}, demand{"CPU": 1}, []string{"b", "c", "a"}},
		"a node":                               {scheduler.Strategy{Kind: scheduler.KindNode, NodeID: b}, demand{"CPU": 4}, []string{"b", ""}},
		"a node if it can":                     {scheduler.Strategy{Kind: scheduler.KindNode, NodeID: b, Soft: true}, demand{"GPU": 1}, []string{"a"}},
		"a label":                              {scheduler.Strategy{Kind: scheduler.KindLabels, Hard: map[string][]string{"zone": {"x"}}}, demand{"CPU": 3}, []string{"c", ""}},
		"nothing is needed":                    {scheduler.Strategy{}, nil, []string{"b", "b", "b"}},
		"more than any node has":               {scheduler.Strategy{}, demand{"CPU": 5}, []string{""}},
		"parts of a device fill one up":        {scheduler.Strategy{}, demand{"GPU": 0.5}, []string{"a", "a", "a", "a", ""}},
		"a resource that no node has by name":  {scheduler.Strategy{}, demand{"licence": 1}, []string{""}},
	} {
		t.Run(name, func(t *testing.T) {
			third := node("c", cpu)
			third.Labels = map[string]string{"zone": "x"}
			s := with(node("a", gpu), node("b", cpu), third)
			for i, want := range c.want {
				d := s.Request(string(rune('0'+i)), c.demand, c.strategy)
				got := ""
				if len(d.Granted) > 0 {
					got = d.Granted[0].Node
				}
				require.Equal(t, want, got, "request %d", i)
			}
		})
	}
}

func TestDevicesHaveIndices(t *testing.T) {
	s := with(node("a", demand{"GPU": 3}))
	devices := func(key string, amount float64) []string {
		return s.Request(key, demand{"GPU": amount}, scheduler.Strategy{}).Granted[0].Devices["GPU"]
	}
	require.Equal(t, []string{"0"}, devices("part", 0.4))
	require.Equal(t, []string{"1"}, devices("whole", 1))
	require.Equal(t, []string{"0"}, devices("rest", 0.6), "the part that leaves the smallest remainder")
	require.Equal(t, []string{"2"}, devices("last", 1))
	s.Release("part")
	s.Release("whole")
	require.Empty(t, s.Request("two", demand{"GPU": 2}, scheduler.Strategy{}).Granted, "1.4 are free, and one whole device")
	d := s.Release("rest")
	require.Equal(t, []string{"0", "1"}, d.Granted[0].Devices["GPU"])
}

func TestTotalsOfANodeChange(t *testing.T) {
	s := with(node("a", demand{"CPU": 1}))
	require.Empty(t, s.Request("one", demand{"GPU": 1}, scheduler.Strategy{}).Granted)
	d := s.SetNodes([]scheduler.NodeInfo{node("a", demand{"CPU": 1, "GPU": 2})})
	require.Equal(t, []string{"0"}, d.Granted[0].Devices["GPU"])
	require.Equal(t, []string{"1"}, s.Request("two", demand{"GPU": 1}, scheduler.Strategy{}).Granted[0].Devices["GPU"])
	s.Release("two")
	s.SetNodes([]scheduler.NodeInfo{node("a", demand{"CPU": 1, "GPU": 1})})
	require.Empty(t, s.Request("three", demand{"GPU": 1}, scheduler.Strategy{}).Granted, "a device that is gone is not granted")
}

func TestSuspendedRequestsLendTheirCPUs(t *testing.T) {
	s := with(node("a", demand{"CPU": 1}))
	s.Request("parent", demand{"CPU": 1}, scheduler.Strategy{})
	require.Empty(t, keys(s.Request("child", demand{"CPU": 1}, scheduler.Strategy{})))
	require.Equal(t, []string{"child"}, keys(s.Suspend("parent")))
	s.Resume("parent")
	require.InDelta(t, -1, s.Nodes()[0].Free["CPU"], 0, "it takes them back, also where another has them")
	s.Suspend("parent")
	s.Release("parent")
	s.Release("child")
	require.InDelta(t, 1, s.Nodes()[0].Free["CPU"], 0)
}

func group(id, strategy string, bundles ...demand) scheduler.GroupInfo {
	return scheduler.GroupInfo{ID: id, Namespace: "n", Owner: "driver", Bundles: bundles, Strategy: strategy}
}

func TestGroupsHoldAllBundlesOrNone(t *testing.T) {
	one := demand{"CPU": 1}
	for name, c := range map[string]struct {
		strategy string
		bundles  []demand
		want     []string // nodes of the bundles; nil: it waits
	}{
		"packed on one":              {scheduler.Pack, []demand{one, one}, []string{"a", "a"}},
		"packed on as few as needed": {scheduler.Pack, []demand{one, one, one}, []string{"a", "a", "b"}},
		"too many":                   {scheduler.Pack, []demand{one, one, one, one, one}, nil},
		"strictly packed":            {scheduler.StrictPack, []demand{one, one}, []string{"a", "a"}},
		"too many for one":           {scheduler.StrictPack, []demand{one, one, one}, nil},
		"spread":                     {scheduler.Spread, []demand{one, one, one}, []string{"a", "b", "a"}},
		"strictly spread":            {scheduler.StrictSpread, []demand{one, one}, []string{"a", "b"}},
		"too many to spread":         {scheduler.StrictSpread, []demand{one, one, one}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			s := with(node("a", demand{"CPU": 2}), node("b", demand{"CPU": 2}))
			d := s.CreateGroup(group("g", c.strategy, c.bundles...))
			if c.want == nil {
				require.Empty(t, d.Created)
				require.Equal(t, scheduler.GroupPending, s.Group("g").State)
				for _, n := range s.Nodes() {
					require.Equal(t, n.Total, n.Free, "it holds nothing while it waits")
				}
				return
			}
			require.Equal(t, []string{"g"}, d.Created)
			for i, name := range c.want {
				require.Equal(t, scheduler.NodeID(name), s.Group("g").Placed()[i], "bundle %d", i)
			}
		})
	}
}

func TestGroupsOfAGangAreHeldTogether(t *testing.T) {
	s := with(node("a", demand{"CPU": 2}))
	ofGang := func(id, name string) scheduler.GroupInfo {
		g := group(id, scheduler.Pack, demand{"CPU": 1})
		g.Gang = scheduler.Gang{Name: name, Size: 2}
		return g
	}
	require.Empty(t, s.CreateGroup(ofGang("a1", "a")).Created, "the other has not been requested")
	require.InDelta(t, 2, s.Nodes()[0].Free["CPU"], 0)
	require.Equal(t, []string{"alone"}, s.CreateGroup(group("alone", scheduler.Pack, demand{"CPU": 1})).Created)
	require.Empty(t, s.CreateGroup(ofGang("a2", "a")).Created, "only one fits")
	require.InDelta(t, 1, s.Nodes()[0].Free["CPU"], 0, "it holds nothing while it waits")
	require.Equal(t, []string{"a1", "a2"}, s.RemoveGroup("alone", "removed").Created)
	s.CreateGroup(ofGang("b1", "b"))
	s.CreateGroup(ofGang("b2", "b"))
	require.Empty(t, s.RemoveGroup("a1", "removed").Created, "only one fits")
	require.Equal(t, []string{"b2"}, s.RemoveGroup("b1", "removed").Created, "it does not wait for one that was removed")
}

func TestRequestsInsideAGroup(t *testing.T) {
	s := with(node("a", demand{"CPU": 2, "GPU": 2}))
	s.CreateGroup(group("g", scheduler.Pack, demand{"CPU": 1, "GPU": 1}, demand{"CPU": 1, "GPU": 1}))
	in := func(bundle int) scheduler.Strategy {
		return scheduler.Strategy{Kind: scheduler.KindGroup, Group: "g", Bundle: bundle}
	}
	require.Empty(t, keys(s.Request("outside", demand{"CPU": 1}, scheduler.Strategy{})), "the group holds all")
	got := s.Request("second", demand{"GPU": 1}, in(1)).Granted[0]
	require.Equal(t, []string{"1"}, got.Devices["GPU"])
	require.Equal(t, "g", got.Group)
	require.Equal(t, 1, got.Bundle)
	require.Empty(t, keys(s.Request("again", demand{"GPU": 1}, in(1))))
	require.Equal(t, []string{"any"}, keys(s.Request("any", demand{"GPU": 1}, in(-1))))
	d := s.RemoveGroup("g", "it was removed")
	require.Equal(t, []string{"any", "second"}, d.Evicted)
	require.Equal(t, "again", d.Refused[0].Key)
	require.True(t, d.Refused[0].Why.GroupRemoved)
	require.Equal(t, []string{"outside"}, keys(d), "what it held is free")
	require.True(t, s.Request("late", demand{"CPU": 1}, in(-1)).Refused[0].Why.GroupRemoved)
}

func TestGroupsEndWithTheirOwner(t *testing.T) {
	s := with(node("a", demand{"CPU": 2}))
	kept := group("kept", scheduler.Pack, demand{"CPU": 1})
	kept.Detached, kept.Name = true, "name"
	s.CreateGroup(group("own", scheduler.Pack, demand{"CPU": 1}))
	s.CreateGroup(kept)
	require.Equal(t, []string{"own"}, s.EndOwner("driver").Removed)
	require.Equal(t, "kept", s.GroupNamed("n", "name").ID)
	require.Nil(t, s.GroupNamed("other", "name"))
}

func TestANodeThatIsGone(t *testing.T) {
	a, b := node("a", demand{"CPU": 2}), node("b", demand{"CPU": 2})
	s := with(a, b)
	s.CreateGroup(group("g", scheduler.StrictSpread, demand{"CPU": 1}, demand{"CPU": 1}))
	s.Request("there", demand{"CPU": 1}, scheduler.Strategy{Kind: scheduler.KindNode, NodeID: scheduler.NodeID("b")})
	s.Request("waits", demand{"CPU": 1}, scheduler.Strategy{Kind: scheduler.KindNode, NodeID: scheduler.NodeID("b")})
	d := s.SetNodes([]scheduler.NodeInfo{a})
	require.Equal(t, []string{"there"}, d.Evicted)
	require.Equal(t, "waits", d.Refused[0].Key)
	require.False(t, d.Refused[0].Why.GroupRemoved)
	require.Equal(t, scheduler.GroupRescheduling, s.Group("g").State)
	require.Equal(t, []string{"g"}, s.SetNodes([]scheduler.NodeInfo{a, node("c", demand{"CPU": 1})}).Created, "its lost bundle finds another node")
	require.Equal(t, []string{scheduler.NodeID("a"), scheduler.NodeID("c")}, s.Group("g").Placed())
	alive := []bool{}
	for _, n := range s.Nodes() {
		alive = append(alive, n.Alive)
	}
	require.Equal(t, []bool{true, false, true}, alive)
}

func TestRestoredStateIsThatOfBefore(t *testing.T) {
	nodes := []scheduler.NodeInfo{node("a", demand{"CPU": 4, "GPU": 4})}
	info := group("g", scheduler.Pack, demand{"GPU": 1}, demand{"GPU": 1})
	s := with(nodes...)
	s.Request("first", demand{"GPU": 1}, scheduler.Strategy{})
	s.CreateGroup(info)
	inside := s.Request("inside", demand{"GPU": 1}, scheduler.Strategy{Kind: scheduler.KindGroup, Group: "g", Bundle: 1}).Granted[0]
	outside := s.Request("outside", demand{"GPU": 0.5, "CPU": 1}, scheduler.Strategy{}).Granted[0]
	s.Release("first")

	again := with(nodes...)
	again.RestoreGroup(info, s.Group("g").State, s.Group("g").Placed(), s.Group("g").Devices())
	require.True(t, again.Restore("inside", demand{"GPU": 1}, inside.NodeID, inside.Group, inside.Bundle, inside.Devices))
	require.True(t, again.Restore("outside", demand{"GPU": 0.5, "CPU": 1}, outside.NodeID, "", 0, outside.Devices))
	require.False(t, again.Restore("lost", demand{"CPU": 1}, scheduler.NodeID("gone"), "", 0, nil))
	require.Equal(t, s.Nodes(), again.Nodes())
	require.Equal(t, s.Group("g").Devices(), again.Group("g").Devices())
	for _, one := range []*scheduler.Scheduler{s, again} {
		require.Equal(t, []string{"0"}, one.Request("next", demand{"GPU": 1}, scheduler.Strategy{}).Granted[0].Devices["GPU"])
		one.Release("inside")
		require.Equal(t, inside.Devices, one.Request("next inside", demand{"GPU": 1}, scheduler.Strategy{Kind: scheduler.KindGroup, Group: "g", Bundle: 1}).Granted[0].Devices)
	}
}

func TestNodesThatAreGoneAreForgotten(t *testing.T) {
	s := scheduler.New()
	for i := range 1100 {
		s.SetNodes([]scheduler.NodeInfo{node(fmt.Sprint("n", i), demand{"CPU": 1})})
	}
	rows := s.Nodes()
	require.Len(t, rows, 1001)
	require.Equal(t, "n1099", rows[len(rows)-1].Name)
	require.Equal(t, "n99", rows[0].Name)
}
