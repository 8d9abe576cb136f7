package planner

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// genQueue draws a queue of a few requests in two namespaces.
func genQueue(t *rapid.T, hosts []string) []Queued {
	queue := make([]Queued, rapid.IntRange(1, 8).Draw(t, "queued"))
	for i := range queue {
		r := genRequest(t, fmt.Sprintf("q%d", i), hosts)
		r.Namespace = rapid.SampledFrom([]string{"", "other"}).Draw(t, "namespace")
		r.AwaitNodes = rapid.Bool().Draw(t, "await")
		since := testNow.Add(-time.Duration(rapid.IntRange(0, 3).Draw(t, "age")) * time.Minute)
		queue[i] = Queued{Request: r, Since: since, Admitted: rapid.Bool().Draw(t, "admitted"), Try: rapid.IntRange(0, 3).Draw(t, "try") == 0}
	}
	return queue
}

func genPolicy(t *rapid.T) Policy {
	p := Policy{Preempt: rapid.Bool().Draw(t, "preempt"), BackfillDepth: rapid.IntRange(0, 3).Draw(t, "depth")}
	if rapid.Bool().Draw(t, "quota") {
		p.Quotas = map[string]Share{"other": Wholes(rapid.IntRange(0, 8).Draw(t, "most"))}
	}
	return p
}

// enter grants the decision; all of it must fit together.
func enter(t require.TestingT, pl *Planner, d Decision) {
	for _, g := range d.Grants {
		require.NoError(t, pl.Grant(g.Reservation))
	}
	requireSound(t, pl)
}

// head returns the wait of the head of the queue, if there is one.
func (d Decision) head(queue []Queued) (Wait, bool) {
	for _, w := range d.Waits {
		try := slices.ContainsFunc(queue, func(q Queued) bool { return q.Try && q.Request.ID == w.ID })
		if w.Code == WaitCapacity && !try {
			return w, true
		}
	}
	return Wait{}, false
}

func requestOf(queue []Queued, id string) Request {
	for _, q := range queue {
		if q.Request.ID == id {
			return q.Request
		}
	}
	panic("no request " + id)
}

func TestNoRequestIsLostInTheQueue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pl := genPlanner(t, 4, 6)
		before := pl.Snapshot()
		queue := genQueue(t, nil)
		policy := genPolicy(t)
		d := pl.Schedule(queue, policy)
		requireSound(t, pl)
		require.Equal(t, before, pl.Snapshot())

		seen := map[string]int{}
		for _, g := range d.Grants {
			seen[g.Reservation.ID]++
		}
		for _, w := range d.Waits {
			seen[w.ID]++
		}
		for _, r := range d.Refusals {
			seen[r.ID]++
			requireImpossible(t, pl, requestOf(queue, r.ID), r.Err)
		}
		for _, q := range queue {
			require.Equal(t, 1, seen[q.Request.ID], q.Request.ID)
		}
		enter(t, pl, d)

		permuted := rapid.Permutation(queue).Draw(t, "order")
		again, err := Schedule(before, permuted, policy)
		require.NoError(t, err)
		require.Equal(t, d, again, "the order of the queue as given makes no difference")
	})
}

// requireHopeless checks that a refused request is invalid, exceeds its quota or never fits.
func requireImpossible(t require.TestingT, pl *Planner, r Request, err error) {
	plan, planErr := pl.Plan(r)
	var quota *QuotaError
	switch {
	case errors.As(err, &quota):
		require.Greater(t, quota.Asked, quota.Quota)
	case errors.Is(err, ErrNeverFits):
		require.True(t, plan.Never)
	default:
		require.Equal(t, planErr, err)
	}
}

// Backfilled requests use nothing that the head waits for: once that is gone, the head fits.
func TestBackfillNeverDelaysTheHead(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pl := genPlanner(t, 4, 6)
		queue := genQueue(t, nil)
		d := pl.Schedule(queue, Policy{})
		require.Empty(t, d.Preemptions, "preemption is off")
		head, ok := d.head(queue)
		if !ok {
			return
		}
		enter(t, pl, d)
		remove(t, pl, head.WaitsFor)
		plan, err := pl.Plan(requestOf(queue, head.ID))
		require.NoError(t, err)
		require.True(t, plan.Granted, "%v", plan.Reasons)
	})
}

func TestNoQuotaIsExceeded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pl := genPlanner(t, 4, 4)
		policy := genPolicy(t)
		held := pl.usage["other"]
		enter(t, pl, pl.Schedule(genQueue(t, nil), policy))
		if quota, limited := policy.Quotas["other"]; limited {
			require.LessOrEqual(t, pl.usage["other"], max(quota, held))
		}
	})
}

// A request that does not wait holds nothing back: no reserve, no victims and no quota are for it.
func TestRequestsThatDoNotWaitHoldNothingBack(t *testing.T) {
	pl := simPlanner(t, 1, 4)
	require.True(t, grant(t, pl, Request{ID: "a", Bundles: []Bundle{{Devices: Whole}}}, testNow))
	large := Queued{Request: Request{ID: "large", Priority: 5, Bundles: []Bundle{{Devices: Wholes(4)}}}, Since: testNow, Try: true}
	small := Queued{Request: Request{ID: "small", Bundles: []Bundle{{Devices: Wholes(3)}}}, Since: testNow.Add(time.Second)}
	for _, policy := range []Policy{{}, {Preempt: true}, {Quotas: map[string]Share{"": Wholes(4)}}} {
		for _, small.Try = range []bool{false, true} {
			d := pl.Schedule([]Queued{large, small}, policy)
			require.Len(t, d.Grants, 1)
			require.Equal(t, "small", d.Grants[0].Reservation.ID)
			require.Len(t, d.Waits, 1, "it is told that it does not fit now")
			require.Equal(t, "large", d.Waits[0].ID)
			require.Empty(t, d.Preemptions)
		}
	}
	waiting := large
	waiting.Try = false
	d := pl.Schedule([]Queued{waiting, small}, Policy{})
	require.Empty(t, d.Grants, "one that waits does")
	large.Request.Bundles[0].Devices = Wholes(5)
	require.Len(t, pl.Schedule([]Queued{large}, Policy{}).Refusals, 1, "it never fits")
}

func TestPreemptionSuffices(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pl := genPlanner(t, 4, 8)
		queue := genQueue(t, nil)
		d := pl.Schedule(queue, Policy{Preempt: true})
		enter(t, pl, d)
		require.LessOrEqual(t, len(d.Preemptions), 1)
		for _, p := range d.Preemptions {
			head := requestOf(queue, p.For)
			for _, id := range p.Victims {
				victim, ok := pl.Release(id)
				require.True(t, ok)
				require.Less(t, victim.Priority, head.Priority)
			}
			plan, err := pl.Plan(head)
			require.NoError(t, err)
			require.True(t, plan.Granted, "%v", plan.Reasons)
		}
	})
}
