package flow

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"troupe/pipeline/spec"
)

func twoStages(ordered bool) spec.Spec {
	return spec.Spec{Name: "p", Streams: []spec.StreamSpec{{Name: "a", Items: 20}, {Name: "b", Items: 5}, {Name: "out", Sink: true, Items: 1 << 20}},
		Stages: []spec.StageSpec{
			{Name: "one", In: []string{"a"}, Out: []string{"b"}, Role: "r", Method: "m", Ordered: ordered, Failures: 1 << 20, Losses: 1 << 20},
			{Name: "two", In: []string{"b"}, Out: []string{"out"}, Role: "r", Method: "m", Ordered: ordered, Sticky: ordered, Failures: 1 << 20, Losses: 1 << 20},
		}}
}

// steps are the events of the model test; frequent ones occur more than once.
var steps = []string{
	"put", "put", "put", "put", "land", "land", "land", "reach", "read", "read", "body", "body", "body", "end", "end", "end", "end", "end", "late answer", "kill", "pause",
	"crash", "time", "abort", "scale", "take", "take", "give", "version",
}

// anySpec is a pipeline of two stages with random rules: order, groups, staleness, functions or roles, few attempts or
// many.
func anySpec(t *rapid.T) spec.Spec {
	declared := twoStages(rapid.Bool().Draw(t, "ordered"))
	if rapid.Bool().Draw(t, "functions") {
		declared.Stages[0].Func = notCalled
		declared.Stages[1].Func = notCalled
	}
	if rapid.Bool().Draw(t, "few attempts") {
		for i := range declared.Stages {
			declared.Stages[i].Failures, declared.Stages[i].Losses = 2, 3
		}
	}
	switch rapid.SampledFrom([]string{"", "", "group", "stale", "requeue"}).Draw(t, "rule") {
	case "group":
		declared.Stages[1].Ordered, declared.Stages[1].Sticky = false, false
		declared.Stages[1].Group = &spec.GroupSpec{Count: 3, Every: 5 * time.Second}
	case "stale":
		declared.Stages[1].Stale = &spec.StaleSpec{Bound: spec.VersionOf(1), Then: spec.Drop}
	case "requeue":
		declared.Stages[0].Ordered = false
		declared.Stages[0].Stale = &spec.StaleSpec{Bound: spec.VersionOf(1), Then: spec.Requeue}
	}
	return declared
}

// Whatever is killed, paused, aborted, scaled, delivered late or repeated, and whenever the engine crashes: every
// stored item has one end, in the sink, in the dead letters or dropped by a rule; nothing is left over, bounds hold,
// and keys keep their order.
func TestEveryItemHasOneEnd(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		declared := anySpec(t)
		th := newModel(t, declared)
		size := rapid.SampledFrom([]int{1, 1, 20})
		for range rapid.IntRange(0, 400).Draw(t, "steps") {
			th.step(rapid.SampledFrom(steps).Draw(t, "step"), size)
			th.schedule()
			th.checkBounds()
		}
		th.finish()
		th.checkOneEnd()
		if declared.Stages[0].Ordered && declared.Stages[1].Ordered {
			th.checkOrder()
		}
		th.checkEmpty()
	})
}

func (th *model) step(what string, size *rapid.Generator[int]) {
	t := th.t
	switch what {
	case "put":
		th.putOne(spec.Item{Key: rapid.SampledFrom([]string{"x", "y", ""}).Draw(t, "key"), Body: make([]byte, size.Draw(t, "size"))})
	case "land":
		th.storeCommit()
		th.acknowledge()
	case "reach":
		th.storeCommit()
	case "read":
		th.read()
	case "body":
		th.storeBody(th.anyBodyStream(func(all []*BodyStream) *BodyStream { return all[rapid.IntRange(0, len(all)-1).Draw(t, "shelf")] }))
	case "end":
		if len(th.tasks) > 0 {
			th.end(rapid.SampledFrom(th.tasks).Draw(t, "task"), rapid.SampledFrom([]ResultKind{Handled, Handled, Handled, Failed, WorkerLost, Revoked}).Draw(t, "how"), size.Draw(t, "size"))
		}
	case "late answer":
		if len(th.revoked) > 0 {
			th.end(rapid.SampledFrom(th.revoked).Draw(t, "task"), Handled, 1)
		}
	case "kill":
		th.removeWorker(rapid.SampledFrom(th.f.Stages).Draw(t, "stage"), rapid.Bool().Draw(t, "died"))
	case "pause":
		s := rapid.SampledFrom(th.f.Stages).Draw(t, "stage")
		s.paused = !s.paused
	case "crash":
		th.open()
	case "time":
		th.now = th.now.Add(time.Second)
	case "abort":
		th.f.Now = th.now
		th.f.Abort(fmt.Sprint(rapid.IntRange(1, max(1, th.put)).Draw(t, "item")))
	case "scale":
		th.scale(rapid.SampledFrom(th.f.Stages).Draw(t, "stage"), rapid.IntRange(1, 3).Draw(t, "workers"))
	case "take":
		th.take(rapid.IntRange(1, 3).Draw(t, "items"))
	case "give":
		th.settle(rapid.Bool().Draw(t, "done"))
	case "version":
		th.f.Version += spec.VersionOf(0.7)
	}
}

// checkBounds checks that no stream exceeds its bound, reserved outputs included. Results that were lost in a crash
// count again.
func (th *model) checkBounds() {
	requeues := th.spec.Stages[0].Stale != nil
	for _, s := range th.f.streams {
		if s.spec.Name == "a" && requeues {
			continue // requeued items are not rejected
		}
		require.LessOrEqual(th.t, s.items+s.reservedOutputs, s.spec.Items+th.undone, s.spec.Name)
	}
}

// checkOneEnd checks that each stored item has one end.
func (th *model) checkOneEnd() {
	for i := range th.put {
		id := fmt.Sprint(i + 1)
		ends := th.out[id] + th.dead[id] + th.dropped[id]
		require.LessOrEqual(th.t, ends, 1, "item %s: %d in the sink, %d dead, %d dropped", id, th.out[id], th.dead[id], th.dropped[id])
		if th.stored[id] {
			require.Equal(th.t, 1, ends, "item %s was stored", id)
		}
	}
}

func (th *model) checkOrder() {
	last := map[string]int{}
	for _, e := range th.log {
		if e.Stream != "out" || e.Key == "" {
			continue
		}
		var n int
		_, err := fmt.Sscan(e.ID, &n)
		require.NoError(th.t, err)
		require.Greater(th.t, n, last[e.Key], "key %s", e.Key)
		last[e.Key] = n
	}
}

// checkEmpty checks that only the items of the sink are left.
func (th *model) checkEmpty() {
	t, f := th.t, th.f
	require.Zero(t, f.RunningTasks())
	require.Zero(t, f.queued)
	require.Zero(t, f.queuedBytes)
	require.Zero(t, f.pendingBodyBytes)
	require.Nil(t, f.isolated)
	require.Empty(t, f.taken)
	for _, left := range th.retries {
		require.Empty(t, left, "retry states are deleted with their items")
	}
	inSink := 0
	for _, e := range th.log {
		if e.Stream == "out" {
			inSink++
		}
	}
	for _, s := range f.streams {
		require.Zero(t, s.reservedOutputs, s.spec.Name)
		if s.spec.Sink {
			require.Equal(t, inSink-th.served, s.items)
			continue
		}
		require.Zero(t, s.items, s.spec.Name)
		require.Zero(t, s.bytes, s.spec.Name)
		for _, l := range s.lanes {
			require.Equal(t, l.head, l.done.Floor, "all of %s is completed", s.spec.Name)
		}
	}
}

// A stream never exceeds its bound.
func TestBoundsHold(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		th := newModel(t, twoStages(false))
		t.Repeat(map[string]func(*rapid.T){
			"put": func(*rapid.T) { th.putOne(spec.Item{Body: []byte{1}}) },
			"land": func(*rapid.T) {
				th.storeCommit()
				th.acknowledge()
				th.read()
			},
			"end": func(t *rapid.T) {
				if len(th.tasks) > 0 {
					th.end(rapid.SampledFrom(th.tasks).Draw(t, "task"), Handled, 1)
				}
			},
			"": func(t *rapid.T) {
				th.schedule()
				for _, s := range th.f.streams {
					require.LessOrEqual(t, s.items+s.reservedOutputs, s.spec.Items, s.spec.Name)
					for _, l := range s.lanes {
						require.LessOrEqual(t, l.ready.len(), th.f.window.items+2)
					}
				}
			},
		})
	})
}

// The first K items of each group are handed over together and the others are late, in any order of arrival.
func TestGroupsAreTheFirstItems(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		declared := twoStages(false)
		declared.Streams[0].Items = 1 << 20
		declared.Stages[0].Group = &spec.GroupSpec{First: 3}
		th := newModel(t, declared)
		count := map[string]int{}
		for range rapid.IntRange(0, 60).Draw(t, "items") {
			g := rapid.SampledFrom([]string{"g", "h", "i", "j"}).Draw(t, "group")
			count[g]++
			th.put++
			th.f.Now = th.now
			th.f.Put(&Put{Stream: th.f.StreamNamed("a"), Items: []spec.Item{{ID: fmt.Sprint(th.put), Group: g, Of: 1000}}})
			if rapid.Bool().Draw(t, "go on") {
				th.schedule()
				th.storeCommit()
				th.acknowledge()
				th.read()
				for _, x := range slices.Clone(th.tasks) {
					th.end(x, Handled, 1)
				}
			}
		}
		for range 300 {
			th.schedule()
			th.storeCommit()
			th.acknowledge()
			th.read()
			for _, x := range slices.Clone(th.tasks) {
				th.end(x, Handled, 1)
			}
		}
		late := uint64(0)
		groups := 0
		for _, n := range count {
			if n >= 3 {
				groups++
				late += uint64(n - 3)
			}
		}
		require.Equal(t, late, th.f.streams[0].late)
		outs := 0
		for _, e := range th.log {
			if e.Stream == "out" {
				outs++
			}
		}
		require.Equal(t, groups, outs)
	})
}

func TestHistogram(t *testing.T) {
	var h histogram
	for i := 1; i <= 1000; i++ {
		h.add(time.Duration(i) * time.Millisecond)
	}
	require.InEpsilon(t, 500*time.Millisecond, h.quantile(0.5), 0.13)
	require.InEpsilon(t, 990*time.Millisecond, h.quantile(0.99), 0.13)
	for us := uint64(0); us < 1<<20; us = us*5/4 + 1 {
		b := bucketOf(us)
		require.LessOrEqual(t, bucketFloor(b), us)
		require.Greater(t, bucketFloor(b+1), us)
	}
}
