package scheduler_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"troupe/roles/sessions/scheduler"
)

// history is what a scheduler was asked for and has decided.
type history struct {
	t       *rapid.T
	s       *scheduler.Scheduler
	nodes   []scheduler.NodeInfo
	next    int
	demands map[string]demand // by key: requested and neither withdrawn, refused, evicted nor released
	where   map[string]scheduler.Allocation
	groups  []string // that are not removed
}

func (h *history) take(d scheduler.Decisions) {
	for _, a := range d.Granted {
		require.Contains(h.t, h.demands, a.Key, "nothing is granted that was not asked for")
		require.NotContains(h.t, h.where, a.Key, "nothing is granted twice")
		h.where[a.Key] = a
	}
	for _, r := range d.Refused {
		require.NotContains(h.t, h.where, r.Key)
		delete(h.demands, r.Key)
	}
	for _, key := range d.Evicted {
		delete(h.demands, key)
		delete(h.where, key)
	}
}

func (h *history) key() string {
	h.next++
	return fmt.Sprintf("k%03d", h.next)
}

func (h *history) amounts(label string) demand {
	return demand{
		"CPU": rapid.SampledFrom([]float64{0, 0.5, 1, 2}).Draw(h.t, label+" CPU"), "GPU": rapid.SampledFrom([]float64{0, 0, 0.3, 0.5, 1, 2}).Draw(h.t, label+" GPU"),
	}
}

func (h *history) strategy() scheduler.Strategy {
	switch kind := rapid.SampledFrom([]string{"", "", scheduler.KindSpread, scheduler.KindNode, scheduler.KindGroup}).Draw(h.t, "kind"); {
	case kind == scheduler.KindNode:
		n := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(h.t, "node")
		return scheduler.Strategy{Kind: kind, NodeID: scheduler.NodeID(n), Soft: rapid.Bool().Draw(h.t, "soft")}
	case kind == scheduler.KindGroup && len(h.groups) > 0:
		return scheduler.Strategy{Kind: kind, Group: rapid.SampledFrom(h.groups).Draw(h.t, "group"), Bundle: rapid.IntRange(-1, 1).Draw(h.t, "bundle")}
	case kind == scheduler.KindSpread:
		return scheduler.Strategy{Kind: kind}
	}
	return scheduler.Strategy{}
}

// grantedAtMost checks that nothing is given away that is not there: of the nodes, of each device, and of the bundles of groups.
func (h *history) grantedAtMost() {
	for _, n := range h.s.Nodes() {
		for name, free := range n.Free {
			require.GreaterOrEqual(h.t, free, 0.0, "%s of node %s is granted beyond what there is", name, n.Name)
			require.LessOrEqual(h.t, free, n.Total[name], "%s of node %s: more is free than there is", name, n.Name)
		}
	}
	devices := map[string]float64{} // used part of each device outside of groups
	bundles := map[string]float64{}
	for key, a := range h.where {
		for _, i := range a.Devices["GPU"] {
			if a.Group == "" {
				devices[a.Node+i] += min(h.demands[key]["GPU"], 1)
			}
		}
		if a.Group != "" {
			bundles[fmt.Sprintf("%s %d CPU", a.Group, a.Bundle)] += h.demands[key]["CPU"]
		}
	}
	for device, used := range devices {
		require.LessOrEqual(h.t, used, 1.0001, "device %s is granted beyond what there is", device)
	}
	for _, id := range h.groups {
		for i, b := range h.s.Group(id).Bundles {
			require.LessOrEqual(h.t, bundles[fmt.Sprintf("%s %d CPU", id, i)], b["CPU"]+0.0001, "bundle %d of %s is granted beyond what it has", i, id)
		}
	}
}

// nothingWaitsThatFits checks that a request that waits would not be granted now: another scheduler with the same holdings does not
// grant it either.
func (h *history) nothingWaitsThatFits() {
	d := h.s.SetNodes(h.nodes) // changes nothing, and tries everything that waits
	require.Empty(h.t, d.Granted, "a request waited that fits")
	require.Empty(h.t, d.Created, "a group waited that fits")
}

// gangsTogether checks that no group holds anything while another of its gang has not been created.
func (h *history) gangsTogether() {
	for _, id := range h.groups {
		g := h.s.Group(id)
		for _, other := range h.s.GangOf(g) {
			if g.Gang.Name != "" && other.State == scheduler.GroupPending {
				require.Equal(h.t, scheduler.GroupPending, g.State, "%s was created without %s of its gang", id, other.ID)
				require.Equal(h.t, make([]string, len(g.Bundles)), g.Placed())
			}
		}
	}
}

func TestRandomHistories(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		all := []scheduler.NodeInfo{node("a", demand{"CPU": 4}), node("b", demand{"CPU": 2, "GPU": 2}), node("c", demand{"CPU": 2, "GPU": 1})}
		h := &history{t: t, s: scheduler.New(), nodes: all, demands: map[string]demand{}, where: map[string]scheduler.Allocation{}}
		h.take(h.s.SetNodes(all))
		held := func() []string {
			var keys []string
			for i := range h.next + 1 {
				if key := fmt.Sprintf("k%03d", i); h.demands[key] != nil {
					keys = append(keys, key)
				}
			}
			return keys
		}
		t.Repeat(map[string]func(*rapid.T){
			"request": func(t *rapid.T) {
				key, d := h.key(), h.amounts("demand")
				h.demands[key] = d
				h.take(h.s.Request(key, d, h.strategy()))
			},
			"release": func(t *rapid.T) {
				keys := held()
				if len(keys) == 0 {
					t.Skip("nothing is requested")
				}
				key := rapid.SampledFrom(keys).Draw(t, "key")
				d := h.s.Release(key)
				delete(h.demands, key)
				delete(h.where, key)
				h.take(d)
			},
			"create group": func(t *rapid.T) {
				id := h.key()
				strategy := rapid.SampledFrom([]string{scheduler.Pack, scheduler.Spread, scheduler.StrictPack, scheduler.StrictSpread}).Draw(t, "strategy")
				h.groups = append(h.groups, id)
				h.take(h.s.CreateGroup(group(id, strategy, h.amounts("first"), h.amounts("second"))))
			},
			"create gang": func(t *rapid.T) {
				gang := scheduler.Gang{Name: h.key(), Size: rapid.IntRange(2, 3).Draw(t, "size")}
				for range gang.Size {
					g := group(h.key(), rapid.SampledFrom([]string{scheduler.Pack, scheduler.StrictSpread}).Draw(t, "strategy"), h.amounts("first"), h.amounts("second"))
					g.Gang = gang
					h.groups = append(h.groups, g.ID)
					h.take(h.s.CreateGroup(g))
				}
			},
			"remove group": func(t *rapid.T) {
				if len(h.groups) == 0 {
					t.Skip("there is no group")
				}
				i := rapid.IntRange(0, len(h.groups)-1).Draw(t, "group")
				id := h.groups[i]
				h.groups = append(h.groups[:i:i], h.groups[i+1:]...)
				h.take(h.s.RemoveGroup(id, "removed"))
			},
			"nodes": func(t *rapid.T) {
				h.nodes = nil
				for i, n := range all {
					if i == 0 || rapid.Bool().Draw(t, n.Name) {
						h.nodes = append(h.nodes, n)
					}
				}
				h.take(h.s.SetNodes(h.nodes))
			},
			"": func(*rapid.T) {
				h.grantedAtMost()
				h.gangsTogether()
				h.nothingWaitsThatFits()
			},
		})
		for _, key := range held() {
			d := h.s.Release(key)
			delete(h.demands, key)
			delete(h.where, key)
			h.take(d)
		}
		for _, id := range h.groups {
			h.take(h.s.RemoveGroup(id, "the end"))
		}
		for _, n := range h.s.Nodes() {
			if n.Alive {
				require.Equal(t, n.Total, n.Free, "everything that was released is free again")
			}
		}
	})
}
