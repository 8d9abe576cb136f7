package dispatch

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
)

// TestAFutureIsAReference passes the large answer of one rank to another by reference, before and after it is there.
func TestAFutureIsAReference(t *testing.T) {
	const size = 1 << 20
	ctx := patient(t)
	s := newBusFixture(t)
	g := s.startRoleApart(dp(2), methods{
		"make": func(context.Context, int, actors.Args) (any, error) { return make([]byte, size), nil },
		"fail": func(context.Context, int, actors.Args) (any, error) {
			return nil, bus.Errorf(bus.CodeRefused, "bad luck")
		},
		"size": func(_ context.Context, _ int, args actors.Args) (any, error) {
			v, err := first(args)
			data, _ := v.([]byte)
			return len(data), err
		},
	}.class(actors.Serial))
	refs := g.Endpoint.References()
	sizeOf := func(v any) (int, error) {
		f, err := g.Go(ctx, Call{Method: "size", Args: []any{v}, Ranks: []int{1}})
		require.NoError(t, err)
		return Await[int](ctx, f)
	}
	made, err := g.Go(ctx, Call{Method: "make", Ranks: []int{0}, Keep: true})
	require.NoError(t, err)
	n, err := sizeOf(made) // it is sent before the answer is there
	require.NoError(t, err)
	require.Equal(t, size, n)
	ref, err := made.Reference()
	require.NoError(t, err)
	n, err = sizeOf(ref)
	require.NoError(t, err)
	require.Equal(t, size, n)
	data, err := Await[[]byte](ctx, made)
	require.NoError(t, err)
	require.Len(t, data, size)
	data, err = Get[[]byte](ctx, refs, ref)
	require.NoError(t, err)
	require.Len(t, data, size)

	failed, err := g.Go(ctx, Call{Method: "fail", Ranks: []int{0}, Keep: true})
	require.NoError(t, err)
	_, err = sizeOf(failed)
	require.ErrorIs(t, err, bus.ErrRefused)
	require.ErrorContains(t, err, "bad luck")

	refs.Release(ref)
	runtime.KeepAlive(made)
	runtime.KeepAlive(failed)
	require.Eventually(t, func() bool { runtime.GC(); return refs.Owned() == 0 }, 2*time.Minute, 50*time.Millisecond)
}
