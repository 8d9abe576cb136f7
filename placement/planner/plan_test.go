package planner

import (
	"encoding/json"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestPlanInJSON(t *testing.T) {
	s := Snapshot{Nodes: simNodes(2, 4)}
	plan, err := Decide(s, Request{Mapping: &Mapping{World: 4, Devices: []int{0, 1, 2, 3, 4, 5, 6, 7}}})
	require.NoError(t, err)
	text, err := json.Marshal(plan)
	require.NoError(t, err)
	var got struct {
		Granted bool
		Reasons []any
		Workers []struct {
			Rank     int
			NodeRank int `json:"node_rank"`
			Node     string
			Devices  []int
		}
	}
	require.NoError(t, json.Unmarshal(text, &got))
	require.True(t, got.Granted)
	require.NotNil(t, got.Reasons)
	require.Len(t, got.Workers, 4)
	require.Equal(t, 1, got.Workers[2].NodeRank)
	require.Equal(t, "n1", got.Workers[2].Node)
	require.Equal(t, []int{0, 1}, got.Workers[2].Devices)

	plan, err = Decide(s, Request{Bundles: Repeat(3, Bundle{Devices: Wholes(4)}), Strategy: StrictSpread})
	require.NoError(t, err)
	text, err = json.Marshal(plan)
	require.NoError(t, err)
	require.Contains(t, string(text), `"granted":false`)
	require.Contains(t, string(text), `"workers":[]`)
	require.Contains(t, string(text), `"reasons":[{`)
}

func TestRefusalsAsErrors(t *testing.T) {
	pl := simPlanner(t, 1, 4)
	require.True(t, grant(t, pl, Request{ID: "a", Holder: "trainer", Bundles: Repeat(1, Bundle{Devices: Whole})}, testNow))

	plan, err := pl.Plan(Request{Bundles: Repeat(1, Bundle{Devices: Wholes(4)})})
	require.NoError(t, err)
	require.ErrorIs(t, plan.Err(), ErrMustWait)
	require.ErrorContains(t, plan.Err(), "trainer")

	plan, err = pl.Plan(Request{Bundles: Repeat(2, Bundle{Devices: Wholes(4)})})
	require.NoError(t, err)
	require.ErrorIs(t, plan.Err(), ErrNeverFits)
	var full *NoCapacityError
	require.ErrorAs(t, plan.Err(), &full)
	require.Len(t, full.Reasons, 2, "the gang, and its only node")

	plan, err = pl.Plan(Request{Bundles: Repeat(3, Bundle{Devices: Whole})})
	require.NoError(t, err)
	require.NoError(t, plan.Err())
}

// Each kind of invalid request has its own Problem.
func TestInvalidRequests(t *testing.T) {
	pl := simPlanner(t, 2, 4)
	one := Bundle{Devices: Whole}
	for problem, r := range map[Problem]Request{
		ErrEmptyRequest:       {},
		ErrUnknownStrategy:    {Bundles: Repeat(1, one), Strategy: "SIDEWAYS"},
		ErrBadShare:           {Bundles: Repeat(1, Bundle{Devices: -Whole})},
		ErrTooManyBundles:     {Bundles: Repeat(MaxBundles+1, one)},
		ErrBadMapping:         {Mapping: &Mapping{World: 1, Devices: []int{1, 1}}},
		ErrUnknownDevice:      {Mapping: &Mapping{World: 1, Devices: []int{8}}},
		ErrBadTopology:        {Bundles: Repeat(1, one), Topology: Topology{Required: true}},
		ErrBundleTooLarge:     {Bundles: Repeat(1, Bundle{Devices: Wholes(5)})},
		ErrUnknownReservation: {Bundles: Repeat(1, one), Colocate: "nobody"},
		ErrUnknownNode:        {Bundles: Repeat(1, Bundle{Node: "n9"})},
		ErrNoSuchLabel:        {Bundles: Repeat(1, Bundle{Labels: map[string]string{"rack": "r9"}})},
		ErrBadInstances:       {Bundles: Repeat(3, one), PerInstance: 2},
	} {
		_, err := pl.Plan(r)
		require.ErrorIs(t, err, problem)
		require.ErrorIs(t, err, ErrInvalid)
		var wrong *RequestError
		require.ErrorAs(t, err, &wrong)
		require.NotEmpty(t, wrong.Detail)
		require.NotEmpty(t, wrong.Hint, "%v: it says what there is", problem)
		requireSound(t, pl)
	}
	var kinds []Bundle
	for i := range maxKinds + 1 {
		kinds = append(kinds, Bundle{CPUs: Share(i)})
	}
	_, err := pl.Plan(Request{Bundles: kinds})
	require.ErrorIs(t, err, ErrTooManyBundles)
	for _, share := range []Share{1500, maxShare + Whole} {
		_, err := pl.Plan(Request{Bundles: Repeat(1, Bundle{Devices: share})})
		require.ErrorIs(t, err, ErrBadShare)
	}
}

func TestNamesOfWorkers(t *testing.T) {
	require.Equal(t, "actor_train-0-G0", Worker{Rank: 0, Devices: []int{0}}.Name("actor_train"))
	require.Equal(t, "actor_infer-0-G01", Worker{Rank: 0, Devices: []int{0, 1}}.Name("actor_infer"))
	require.Equal(t, "reward-7", Worker{Rank: 7}.Name("reward"))
}

// A request for instances is planned like its grants: one instance after the other.
func TestInstances(t *testing.T) {
	pl := simPlanner(t, 2, 4)
	r := Request{ID: "infer", Bundles: Repeat(4, Bundle{Devices: Wholes(2)}), Strategy: StrictPack, PerInstance: 2}
	plan, err := pl.Plan(r)
	require.NoError(t, err)
	require.True(t, plan.Granted, "two instances, each packed on a node of its own")
	require.Len(t, plan.Workers, 4)
	require.Equal(t, 3, plan.Workers[3].Rank)
	require.Equal(t, "n1", plan.Workers[3].Node)
	requireSound(t, pl)
	require.Empty(t, pl.Snapshot().Reservations)

	instances, err := r.Instances()
	require.NoError(t, err)
	require.Equal(t, "infer-1", instances[1].ID)
	require.Equal(t, 2, instances[1].FirstRank)
}

// A request that awaits nodes waits instead of failing.
func TestAwaitNodes(t *testing.T) {
	empty, err := New(Snapshot{Now: testNow})
	require.NoError(t, err)
	r := Request{ID: "r", Bundles: Repeat(2, Bundle{Devices: Wholes(4)})}
	_, err = empty.Plan(r)
	require.ErrorIs(t, err, ErrBundleTooLarge)

	r.AwaitNodes = true
	for _, nodes := range simNodes(2, 4) {
		plan, err := empty.Plan(r)
		require.NoError(t, err)
		require.ErrorIs(t, plan.Err(), ErrMustWait)
		require.NoError(t, empty.SetNode(nodes))
	}
	plan, err := empty.Plan(r)
	require.NoError(t, err)
	require.True(t, plan.Granted)

	_, err = empty.Plan(Request{Mapping: &Mapping{World: 1, Devices: []int{0, 0}}, AwaitNodes: true})
	require.ErrorIs(t, err, ErrBadMapping, "no node will make sense of it")
}

// computed returns the CPU time of a function, which other load on the machine does not affect.
func computed(t *testing.T, do func()) time.Duration {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	const thisThread = 1 // RUSAGE_THREAD
	var before, after syscall.Rusage
	require.NoError(t, syscall.Getrusage(thisThread, &before))
	do()
	require.NoError(t, syscall.Getrusage(thisThread, &after))
	return time.Duration(after.Utime.Nano() - before.Utime.Nano() + after.Stime.Nano() - before.Stime.Nano())
}

// The search ends within its budget: nodes that all differ, and one bundle of five too many for nodes of eight.
func TestSearchIsBounded(t *testing.T) {
	nodes := simNodes(40, 8)
	for i := range nodes {
		nodes[i].CPUs = Wholes(i + 1)
	}
	pl, err := New(Snapshot{Nodes: nodes})
	require.NoError(t, err)
	r := Request{Bundles: append(Repeat(41, Bundle{Devices: Wholes(5)}), Repeat(60, Bundle{Devices: Whole})...)}
	g, err := pl.prepare(&r)
	require.NoError(t, err)
	_, ok := pl.place(g)
	require.False(t, ok)
	require.Negative(t, g.searchSteps, "it went on until the budget was spent")

	var plan Plan
	took := computed(t, func() { plan, err = pl.Plan(r) })
	require.NoError(t, err)
	require.True(t, plan.Never)
	require.Less(t, took, time.Second)
	requireSound(t, pl)
}
