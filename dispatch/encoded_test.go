package dispatch

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/wire"
	"troupe/dispatch/plan"
)

// TestEncodedCall: a call with encoded bodies arrives like any other, and reports its answers and its end.
func TestEncodedCall(t *testing.T) {
	t.Parallel()
	mesh := Mesh{DP: 2, TP: 2, PP: 1, CP: 1}
	group := newGroup(t, mesh, methods{"sum": func(_ context.Context, rank int, args actors.Args) (any, error) {
		var n []int
		err := wire.Unmarshal(args.Positional[0], &n)
		return len(n) + 10*rank, err
	}})
	p, err := plan.NewPlan(DPMPCompute, mesh)
	require.NoError(t, err)
	body := func(v any) []byte {
		raw, err := wire.Marshal(v)
		require.NoError(t, err)
		return wire.Args{Positional: []wire.Raw{raw}}.Append(nil, nil)
	}
	var arrivals, ends atomic.Int32
	overCh := make(chan struct{})
	f, err := group.Go(patient(t), Call{
		Method: "sum", Encoded: &Encoded{Plan: p, Bodies: [][]byte{body([]int{1, 2, 3}), body([]int{4})}},
		ArrivedFunc: func(*calls.Gather) { arrivals.Add(1) },
		OverFunc: func(g *calls.Gather) {
			if ends.Add(1) == 1 {
				close(overCh)
			}
		},
	})
	require.NoError(t, err)
	values, err := AwaitEach[int](patient(t), f)
	require.NoError(t, err)
	require.Equal(t, []int{3, 21}, values, "of the collected ranks, by dp")
	<-overCh
	require.EqualValues(t, 3, arrivals.Load(), "all but the last, which ends the call")
	require.EqualValues(t, 1, ends.Load())
}

func TestInvalidEncodedCalls(t *testing.T) {
	t.Parallel()
	mesh := Mesh{DP: 2, TP: 1, PP: 1, CP: 1}
	p, err := plan.NewPlan(OneToAll, mesh)
	require.NoError(t, err)
	group := &Group{Mesh: mesh}
	for _, c := range []Call{
		{Method: "m", Encoded: &Encoded{}},
		{Method: "m", Encoded: &Encoded{Plan: p}},
		{Method: "m", Encoded: &Encoded{Plan: p, Bodies: [][]byte{nil}}, Args: []any{1}},
		{Method: "m", Encoded: &Encoded{Plan: p, Bodies: [][]byte{nil}}, Mode: OneToAll},
	} {
		_, err := group.Go(patient(t), c)
		require.ErrorIs(t, err, bus.ErrInvalid)
	}
}
