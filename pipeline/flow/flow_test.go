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
		md := newModel(t, declared)
		size := rapid.SampledFrom([]int{1, 1, 20})
		for range rapid.IntRange(0, 400).Draw(t, "steps") {
			md.step(rapid.SampledFrom(steps).Draw(t, "step"), size)
			md.schedule()
			md.checkBounds()
		}
		md.finish()
		md.checkOneEnd()
		if declared.Stages[0].Ordered && declared.Stages[1].Ordered {
			md.checkOrder()
		}
		md.checkEmpty()
	})
}

func (md *model) step(what string, size *rapid.Generator[int]) {
	t := md.t
	switch what {
	case "put":
		md.putOne(spec.Item{Key: rapid.SampledFrom([]string{"x", "y", ""}).Draw(t, "key"), Body: make([]byte, size.Draw(t, "size"))})
	case "land":
		md.storeCommit()
		md.acknowledge()
	case "reach":
		md.storeCommit()
	case "read":
		md.read()
	case "body":
		md.storeBody(md.anyBodyStream(func(all []*BodyStream) *BodyStream { return all[rapid.IntRange(0, len(all)-1).Draw(t, "body stream")] }))
	case "end":
		if len(md.tasks) > 0 {
			md.end(rapid.SampledFrom(md.tasks).Draw(t, "task"), rapid.SampledFrom([]ResultKind{Handled, Handled, Handled, Failed, WorkerLost, Revoked}).Draw(t, "how"), size.Draw(t, "size"))
		}
	case "late answer":
		if len(md.revoked) > 0 {
			md.end(rapid.SampledFrom(md.revoked).Draw(t, "task"), Handled, 1)
		}
	case "kill":
		md.removeWorker(rapid.SampledFrom(md.f.Stages).Draw(t, "stage"), rapid.Bool().Draw(t, "died"))
	case "pause":
		s := rapid.SampledFrom(md.f.Stages).Draw(t, "stage")
		s.paused = !s.paused
	case "crash":
		md.open()
	case "time":
		md.now = md.now.Add(time.Second)
	case "abort":
		md.f.Now = md.now
		md.f.Abort(fmt.Sprint(rapid.IntRange(1, max(1, md.put)).Draw(t, "item")))
	case "scale":
		md.scale(rapid.SampledFrom(md.f.Stages).Draw(t, "stage"), rapid.IntRange(1, 3).Draw(t, "workers"))
	case "take":
		md.take(rapid.IntRange(1, 3).Draw(t, "items"))
	case "give":
		md.settle(rapid.Bool().Draw(t, "done"))
	case "version":
		md.f.Version += spec.VersionOf(0.7)
	}
}

// checkBounds checks that no stream exceeds its bound, reserved outputs included. Results that were lost in a crash
// count again.
func (md *model) checkBounds() {
	requeues := md.spec.Stages[0].Stale != nil
	for _, s := range md.f.streams {
		if s.spec.Name == "a" && requeues {
			continue // requeued items are not rejected
		}
		require.LessOrEqual(md.t, s.items+s.reservedOutputs, s.spec.Items+md.undone, s.spec.Name)
	}
}

// checkOneEnd checks that each stored item has one end.
func (md *model) checkOneEnd() {
	for i := range md.put {
		id := fmt.Sprint(i + 1)
		ends := md.out[id] + md.dead[id] + md.dropped[id]
		require.LessOrEqual(md.t, ends, 1, "item %s: %d in the sink, %d dead, %d dropped", id, md.out[id], md.dead[id], md.dropped[id])
		if md.stored[id] {
			require.Equal(md.t, 1, ends, "item %s was stored", id)
		}
	}
}

func (md *model) checkOrder() {
	last := map[string]int{}
	for _, e := range md.log {
		if e.Stream != "out" || e.Key == "" {
			continue
		}
		var n int
		_, err := fmt.Sscan(e.ID, &n)
		require.NoError(md.t, err)
		require.Greater(md.t, n, last[e.Key], "key %s", e.Key)
		last[e.Key] = n
	}
}

// checkEmpty checks that only the items of the sink are left.
func (md *model) checkEmpty() {
	t, f := md.t, md.f
	require.Zero(t, f.RunningTasks())
	require.Zero(t, f.queued)
	require.Zero(t, f.queuedBytes)
	require.Zero(t, f.pendingBodyBytes)
	require.Nil(t, f.isolated)
	require.Empty(t, f.taken)
	for _, left := range md.retries {
		require.Empty(t, left, "retry states are deleted with their items")
	}
	inSink := 0
	for _, e := range md.log {
		if e.Stream == "out" {
			inSink++
		}
	}
	for _, s := range f.streams {
		require.Zero(t, s.reservedOutputs, s.spec.Name)
		if s.spec.Sink {
			require.Equal(t, inSink-md.served, s.items)
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
		md := newModel(t, twoStages(false))
		t.Repeat(map[string]func(*rapid.T){
			"put": func(*rapid.T) { md.putOne(spec.Item{Body: []byte{1}}) },
			"land": func(*rapid.T) {
				md.storeCommit()
				md.acknowledge()
				md.read()
			},
			"end": func(t *rapid.T) {
				if len(md.tasks) > 0 {
					md.end(rapid.SampledFrom(md.tasks).Draw(t, "task"), Handled, 1)
				}
			},
			"": func(t *rapid.T) {
				md.schedule()
				for _, s := range md.f.streams {
					require.LessOrEqual(t, s.items+s.reservedOutputs, s.spec.Items, s.spec.Name)
					for _, l := range s.lanes {
						require.LessOrEqual(t, l.ready.len(), md.f.window.items+2)
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
		md := newModel(t, declared)
		count := map[string]int{}
		for range rapid.IntRange(0, 60).Draw(t, "items") {
			g := rapid.SampledFrom([]string{"g", "h", "i", "j"}).Draw(t, "group")
			count[g]++
			md.put++
			md.f.Now = md.now
			md.f.Put(&Put{Stream: md.f.StreamNamed("a"), Items: []spec.Item{{ID: fmt.Sprint(md.put), Group: g, Of: 1000}}})
			if rapid.Bool().Draw(t, "go on") {
				md.schedule()
				md.storeCommit()
				md.acknowledge()
				md.read()
				for _, x := range slices.Clone(md.tasks) {
					md.end(x, Handled, 1)
				}
			}
		}
		for range 300 {
			md.schedule()
			md.storeCommit()
			md.acknowledge()
			md.read()
			for _, x := range slices.Clone(md.tasks) {
				md.end(x, Handled, 1)
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
		require.Equal(t, late, md.f.streams[0].late)
		outs := 0
		for _, e := range md.log {
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
