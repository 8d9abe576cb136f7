package dispatch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
)

var errNoTokens = errors.New("no tokens left")

func init() { bus.RegisterError("dispatch_test_no_tokens", errNoTokens) }

// gates block the ranks of a role until the test releases them.
type gates struct {
	started  chan int // ranks whose method runs
	ended    chan int // ranks whose method was cancelled
	released []chan error
}

func newGates(world int) *gates {
	g := &gates{started: make(chan int, world), ended: make(chan int, world)}
	for range world {
		g.released = append(g.released, make(chan error, 1))
	}
	return g
}

// wait blocks the rank until it is released, and returns the error it is released with.
func (g *gates) wait(ctx context.Context, rank int, _ actors.Args) (any, error) {
	g.started <- rank
	select {
	case err := <-g.released[rank]:
		return rank, err
	case <-ctx.Done():
		g.ended <- rank
		return nil, ctx.Err()
	}
}

// await receives n ranks.
func await(t *testing.T, ch <-chan int, n int) []int {
	var got []int
	for range n {
		select {
		case rank := <-ch:
			got = append(got, rank)
		case <-patient(t).Done():
			t.Fatalf("only %v came, not %d", got, n)
		}
	}
	return got
}

func (g *gates) call(t *testing.T, group *Group, c Call) *Future {
	c.Method = "wait"
	f, err := group.Go(patient(t), c)
	require.NoError(t, err)
	await(t, g.started, group.Mesh.World())
	return f
}

func gatedGroup(t *testing.T, mesh Mesh) (*gates, *Group) {
	gs := newGates(mesh.World())
	return gs, newGroup(t, mesh, methods{"wait": gs.wait})
}

func TestFutureCancelReachesTheWorkers(t *testing.T) {
	gs, g := gatedGroup(t, dp(3))
	f := gs.call(t, g, Call{})
	f.Cancel()
	require.ElementsMatch(t, []int{0, 1, 2}, await(t, gs.ended, 3))
	err := f.Wait(patient(t))
	require.ErrorIs(t, err, bus.ErrCancelled)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "the caller cancelled the call")
	f.Cancel() // a second Cancel has no effect

	gs, g = gatedGroup(t, dp(2))
	ctx, giveUp := context.WithCancel(t.Context())
	f, err = g.Go(ctx, Call{Method: "wait"})
	require.NoError(t, err)
	await(t, gs.started, 2)
	giveUp()
	await(t, gs.ended, 2)
	require.ErrorIs(t, f.Wait(patient(t)), context.Canceled, "the end of the call's context is a cancel")
}

func TestWaitEndsBeforeTheCall(t *testing.T) {
	gs, g := gatedGroup(t, dp(2))
	f := gs.call(t, g, Call{})
	impatient, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	_, err := f.Value(impatient)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "waiting for wait on role ended")
	gs.released[0] <- nil
	gs.released[1] <- nil
	ranks, err := AwaitEach[int](patient(t), f)
	require.NoError(t, err)
	require.Equal(t, []int{0, 1}, ranks)
}

func TestFutureProgress(t *testing.T) {
	gs, g := gatedGroup(t, dp(3))
	f := gs.call(t, g, Call{AskAfter: time.Millisecond})
	gs.released[1] <- nil
	seen := func() string {
		var words []string
		for _, p := range f.Progress() {
			words = append(words, fmt.Sprintf("%d %t %s", p.Rank, p.Answered, p.State))
		}
		return strings.Join(words, ", ")
	}
	require.Eventually(t, func() bool {
		return strings.HasPrefix(seen(), "0 false running, 1 true") && strings.HasSuffix(seen(), "2 false running")
	}, 2*time.Minute, 5*time.Millisecond, "progress: %s", seen())
	require.Positive(t, f.Progress()[0].For)
	gs.released[0] <- nil
	gs.released[2] <- nil
	require.NoError(t, f.Wait(patient(t)))
}

func TestFutureStreamsInOrderOfArrival(t *testing.T) {
	gs, g := gatedGroup(t, dp(4))
	f := gs.call(t, g, Call{CollectAll: true})
	order := []int{2, 0, 3, 1}
	gs.released[order[0]] <- nil
	var got []int
	for a, err := range f.Stream(patient(t)) {
		var rank int
		if a.Rank == 3 {
			require.ErrorIs(t, err, errNoTokens)
		} else {
			require.NoError(t, err)
			require.NoError(t, wire.Unmarshal(a.Body, &rank))
			require.Equal(t, a.Rank, rank)
		}
		got = append(got, a.Rank)
		if len(got) < len(order) {
			next := order[len(got)]
			gs.released[next] <- map[bool]error{true: errNoTokens}[next == 3]
		}
	}
	require.Equal(t, order, got)
	require.ErrorIs(t, f.Wait(patient(t)), errNoTokens, "a stream takes nothing from the others who wait")

	gs, g = gatedGroup(t, dp(2))
	f = gs.call(t, g, Call{})
	impatient, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	for _, err := range f.Stream(impatient) {
		require.ErrorIs(t, err, context.DeadlineExceeded)
	}
	gs.released[1] <- nil
	for a := range f.Stream(patient(t)) {
		require.Equal(t, 1, a.Rank)
		break // the rest is read later
	}
	gs.released[0] <- nil
	for o := range StreamOutcomes[int](patient(t), f) {
		require.Equal(t, Outcome[int]{Rank: 0, Value: 0}, o)
	}
}

func TestFutureIsAnArgument(t *testing.T) {
	g := newGroup(t, dp(2), methods{"echo": echo, "describe": describe, "rows": rowsBack, "fail": func(context.Context, int, actors.Args) (any, error) {
		return nil, errNoTokens
	}})
	call := func(c Call) *Future {
		f, err := g.Go(patient(t), c)
		require.NoError(t, err)
		return f
	}
	rows := call(Call{Method: "rows", Args: []any{[]int{1, 2, 3}}, Mode: DPMPCompute})
	f := call(Call{Method: "describe", Mode: DPMPCompute, Args: []any{rows, Broadcast(rows)}, Named: map[string]any{"a": Broadcast(rows), "rows": rows}})
	got, err := AwaitEach[string](patient(t), f)
	require.NoError(t, err)
	require.Equal(t, []string{"[1 2] [1 2 3] a=[1 2 3] rows=[1 2]", "[3] [1 2 3] a=[1 2 3] rows=[3]"}, got)

	failed := call(Call{Method: "fail"})
	_, err = g.Go(patient(t), Call{Method: "echo", Args: []any{1, Broadcast(failed)}})
	require.ErrorContains(t, err, "role echo: argument 2 is a future that failed: role[")
	require.ErrorIs(t, err, errNoTokens)
	_, err = g.Go(patient(t), Call{Method: "echo", Named: map[string]any{"a": failed}})
	require.ErrorContains(t, err, `argument "a" is a future that failed`)
	_, err = g.Go(patient(t), Call{Method: "echo", Args: []any{[]any{rows}}})
	require.ErrorContains(t, err, "dispatch.Future cannot", "inside another value it is refused, not dropped")
}

func TestFailFastCancelsTheSiblings(t *testing.T) {
	gs, g := gatedGroup(t, dp(4))
	f := gs.call(t, g, Call{})
	gs.released[2] <- errNoTokens
	require.ElementsMatch(t, []int{0, 1, 3}, await(t, gs.ended, 3))
	err := f.Wait(patient(t))
	require.ErrorIs(t, err, errNoTokens)
	require.EqualError(t, err, "role[2] wait on node-a: no tokens left")
	var failed *CallError
	require.ErrorAs(t, err, &failed)
	require.Equal(t, 2, failed.Cause.Rank)
	require.Len(t, failed.Failed, 4)
	require.EqualError(t, failed.Failed[1], "role[1] wait: cancelled because of rank 2: no tokens left")
	require.NotErrorIs(t, err, bus.ErrCancelled, "the siblings' end is a consequence")
	_, err = f.Value(patient(t))
	require.ErrorIs(t, err, errNoTokens)
}

func TestCollectAllGivesTheErrorsByRank(t *testing.T) {
	gs, g := gatedGroup(t, dp(4))
	f := gs.call(t, g, Call{CollectAll: true})
	gs.released[3] <- errNoTokens
	for a := range f.Stream(patient(t)) {
		require.Equal(t, 3, a.Rank)
		break
	}
	gs.released[1] <- os.ErrInvalid
	gs.released[0] <- nil
	gs.released[2] <- nil
	outcomes, err := AwaitOutcomes[int](patient(t), f)
	require.NoError(t, err)
	require.Equal(t, Outcome[int]{Rank: 0, Value: 0}, outcomes[0])
	require.ErrorContains(t, outcomes[1].Err, os.ErrInvalid.Error())
	require.Equal(t, Outcome[int]{Rank: 2, Value: 2}, outcomes[2])
	require.ErrorIs(t, outcomes[3].Err, errNoTokens)

	var failed *CallError
	require.ErrorAs(t, f.Wait(patient(t)), &failed)
	require.Equal(t, 3, failed.Cause.Rank, "the first failure is the cause, whatever its rank")
	require.Equal(t, []int{1, 3}, []int{failed.Failed[0].Rank, failed.Failed[1].Rank})
	require.EqualError(t, failed, "role[3] wait on node-a: no tokens left (2 of 4 ranks failed)")
}

// TestOutcomesIncludeFailuresOfUncollectedRanks: a failure of a rank that is not collected is reported.
func TestOutcomesIncludeFailuresOfUncollectedRanks(t *testing.T) {
	gs, g := gatedGroup(t, Mesh{DP: 2, TP: 2, PP: 1, CP: 1})
	f := gs.call(t, g, Call{Mode: DPMPCompute, CollectAll: true})
	for rank := range 4 {
		gs.released[rank] <- map[bool]error{true: errNoTokens}[rank == 3]
	}
	outcomes, err := AwaitOutcomes[int](patient(t), f)
	require.NoError(t, err)
	require.Len(t, outcomes, 3)
	require.Equal(t, []Outcome[int]{{Rank: 0, Value: 0}, {Rank: 2, Value: 2}}, outcomes[:2])
	require.Equal(t, 3, outcomes[2].Rank)
	require.ErrorIs(t, outcomes[2].Err, errNoTokens)
}

func TestNeed(t *testing.T) {
	gs, g := gatedGroup(t, dp(4))
	f := gs.call(t, g, Call{Need: 2})
	gs.released[0] <- errNoTokens
	for a := range f.Stream(patient(t)) {
		require.Equal(t, 0, a.Rank)
		break
	}
	gs.released[3] <- nil
	gs.released[1] <- nil
	require.Equal(t, []int{2}, await(t, gs.ended, 1), "the rest is cancelled")
	value, err := f.Value(patient(t))
	require.NoError(t, err)
	require.Equal(t, []any{int64(1), int64(3)}, value, "the answers that came, by rank")
	outcomes, err := AwaitOutcomes[int](patient(t), f)
	require.NoError(t, err)
	require.ErrorIs(t, outcomes[0].Err, errNoTokens)
	require.ErrorContains(t, outcomes[2].Err, "2 of 4 good answers were enough")

	gs, g = gatedGroup(t, dp(3))
	f = gs.call(t, g, Call{Need: 2})
	gs.released[0] <- errNoTokens
	gs.released[2] <- errNoTokens
	require.Equal(t, []int{1}, await(t, gs.ended, 1), "two of three cannot be had any more")
	require.ErrorIs(t, f.Wait(patient(t)), errNoTokens)

	g = newGroup(t, dp(3), methods{"rows": func(ctx context.Context, rank int, args actors.Args) (any, error) {
		if rank == 1 {
			return nil, errNoTokens
		}
		return first(args)
	}})
	f, err = g.Go(patient(t), Call{Method: "rows", Mode: DPMPCompute, Args: []any{[]int{1, 2, 3, 4, 5}}, Need: 2})
	require.NoError(t, err)
	value, err = f.Value(patient(t))
	require.NoError(t, err)
	require.Equal(t, []any{int64(1), int64(2), int64(5)}, value, "rows are joined, as with all of them")
	rows, err := Await[[]int](patient(t), f)
	require.NoError(t, err)
	require.Equal(t, []int{1, 2, 5}, rows)
}

func TestDeadlineGivesPartialResults(t *testing.T) {
	gs, g := gatedGroup(t, dp(3))
	f := gs.call(t, g, Call{Timeout: 300 * time.Millisecond, CollectAll: true})
	gs.released[0] <- nil
	require.ElementsMatch(t, []int{1, 2}, await(t, gs.ended, 2), "the workers see the deadline too")
	outcomes, err := AwaitOutcomes[int](patient(t), f)
	require.NoError(t, err)
	require.Equal(t, Outcome[int]{Rank: 0, Value: 0}, outcomes[0])
	for _, o := range outcomes[1:] {
		require.ErrorIs(t, o.Err, context.DeadlineExceeded)
		require.ErrorIs(t, o.Err, bus.ErrTimedOut)
	}
	err = f.Wait(patient(t))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "(2 of 3 ranks failed)")

	gs, g = gatedGroup(t, dp(2))
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	f, err = g.Go(ctx, Call{Method: "wait"})
	require.NoError(t, err)
	err = f.Wait(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	var failed *CallError
	require.ErrorAs(t, err, &failed, "the call's own error, with role and rank, not the end of the waiting")
	await(t, gs.ended, 2)
}

func TestErrorsOverTheWire(t *testing.T) {
	g := newGroup(t, dp(2), methods{
		"sentinel": func(context.Context, int, actors.Args) (any, error) {
			return nil, fmt.Errorf("generate: %w", errNoTokens)
		},
		"panic": func(context.Context, int, actors.Args) (any, error) { panic("out of cheese") },
		"late":  func(context.Context, int, actors.Args) (any, error) { return nil, context.DeadlineExceeded },
		"busy":  func(context.Context, int, actors.Args) (any, error) { return nil, bus.Errorf(bus.CodeBusy, "later") },
		"plain": func(context.Context, int, actors.Args) (any, error) { return nil, os.ErrNotExist },
	})
	for _, c := range []struct {
		method string
		is     error
		code   bus.Code
		words  string
	}{
		{"sentinel", errNoTokens, bus.CodeApplication, "role[1] sentinel on node-a: generate: no tokens left"},
		{"panic", bus.ErrPanic, bus.CodePanic, "role[1] panic on node-a: panic: out of cheese"},
		{"late", context.DeadlineExceeded, bus.CodeTimedOut, "role[1] late on node-a: context deadline exceeded"},
		{"busy", bus.ErrBusy, bus.CodeBusy, "role[1] busy on node-a: later"},
		{"plain", bus.ErrApplication, bus.CodeApplication, "role[1] plain on node-a: file does not exist"},
	} {
		t.Run(c.method, func(t *testing.T) {
			f, err := g.Go(patient(t), Call{Method: c.method, Ranks: []int{1}})
			require.NoError(t, err)
			err = f.Wait(patient(t))
			assert.EqualError(t, err, c.words)
			assert.ErrorIs(t, err, c.is)
			assert.Equal(t, c.code, bus.CodeOf(err))
			var e *bus.Error
			require.ErrorAs(t, err, &e)
			assert.Equal(t, []any{"role", 1, "node-a", c.method}, []any{e.Role, e.Rank, e.Node, e.Method})
			if c.method == "panic" {
				assert.Contains(t, e.Stack, "future_test.go")
			}
			var call *CallError
			require.ErrorAs(t, fmt.Errorf("train: %w", err), &call)
			assert.Equal(t, e, call.Cause)
		})
	}
}

func TestAwaitIsTyped(t *testing.T) {
	type score struct {
		Rank  int
		Value float64
	}
	g := newGroup(t, dp(2), methods{
		"score":  func(_ context.Context, rank int, _ actors.Args) (any, error) { return score{rank, 0.5}, nil },
		"scores": func(_ context.Context, rank int, _ actors.Args) (any, error) { return []score{{rank, 0.5}}, nil },
	})
	call := func(c Call) *Future {
		f, err := g.Go(patient(t), c)
		require.NoError(t, err)
		return f
	}
	one, err := Await[score](patient(t), call(Call{Method: "score", Mode: RankZero}))
	require.NoError(t, err)
	require.Equal(t, score{0, 0.5}, one)
	rows, err := Await[[]score](patient(t), call(Call{Method: "scores", Mode: DPMPCompute}))
	require.NoError(t, err)
	require.Equal(t, []score{{0, 0.5}, {1, 0.5}}, rows)
	list := call(Call{Method: "score"})
	each, err := AwaitEach[score](patient(t), list)
	require.NoError(t, err)
	require.Equal(t, []score{{0, 0.5}, {1, 0.5}}, each)
	untyped, err := Await[[]any](patient(t), list)
	require.NoError(t, err)
	require.Len(t, untyped, 2)

	_, err = Await[score](patient(t), list)
	require.ErrorContains(t, err, "score on role returns one answer for each rank, not a dispatch.score; use AwaitEach")
	require.ErrorIs(t, err, bus.ErrInvalid)
	_, err = AwaitEach[int](patient(t), list)
	require.ErrorContains(t, err, "role[0] score: the answer cannot be decoded into the requested type")
	require.ErrorIs(t, err, bus.ErrMalformed)
}
