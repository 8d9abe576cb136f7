package actors_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
)

type echo struct{ rank int }

func (e *echo) Echo(ctx context.Context, b []byte) ([]byte, error) { return b, nil }
func (e *echo) Big(ctx context.Context, n int) ([]byte, error)     { return make([]byte, n), nil }
func (e *echo) Len(ctx context.Context, b []byte) (int, error)     { return len(b), nil }

func echoClass() *actors.ClassOf[echo] {
	c := actors.NewClass("echo", func(ctx context.Context, s actors.Setup) (*echo, error) { return &echo{s.Rank}, nil })
	actors.Method(c, "echo", (*echo).Echo)
	actors.Method(c, "big", (*echo).Big)
	actors.Method(c, "len", (*echo).Len)
	return c
}

func start(t testing.TB, b *bus.Bus, n int, own bool) bus.Address {
	a, err := bus.NewAddress("test", "echo", "i1")
	require.NoError(t, err)
	var h *actors.Host
	for r := range n {
		if h == nil || own {
			hb := b
			if own {
				hb, err = b.Dial(context.Background(), fmt.Sprint("w", r))
				require.NoError(t, err)
				t.Cleanup(func() { hb.Close() })
			}
			ep, err := hb.Endpoint("test")
			require.NoError(t, err)
			h, err = actors.NewHost(ep, actors.HostConfig{Classes: []*actors.Class{echoClass().Class}})
			require.NoError(t, err)
			hh := h
			t.Cleanup(func() { hh.Close(context.Background()) })
		}
		_, err := h.Start(context.Background(), actors.WorkerSpec{Address: a, Class: "echo", Rank: r, World: n})
		require.NoError(t, err)
	}
	return a
}

func call(t testing.TB, ep *bus.Endpoint, a bus.Address, n int, method string, arg any) []bus.Answer {
	raw, err := bus.Marshal(arg)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	ranks := make([]int, n)
	for i := range ranks {
		ranks[i] = i
	}
	g, err := ep.Scatter(ctx, bus.Call{To: a, Method: method, World: n, Parts: []bus.Part{{Scope: bus.Everyone(), Ranks: ranks, Body: bus.Args{Positional: []bus.Raw{raw}}.Append(nil, nil)}}})
	require.NoError(t, err)
	<-g.Done()
	as := g.Answers()
	for _, x := range as {
		require.NoError(t, x.Err)
	}
	return as
}

func TestSmoke(t *testing.T) {
	b, err := bus.Open(context.Background(), bus.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { b.Close() })
	for _, own := range []bool{false, true} {
		t.Run(fmt.Sprint(own), func(t *testing.T) {
			const n = 8
			a := start(t, b, n, own)
			drv, err := b.Dial(context.Background(), "driver")
			require.NoError(t, err)
			defer drv.Close()
			ep, err := drv.Endpoint("test")
			require.NoError(t, err)
			call(t, ep, a, n, "echo", make([]byte, 64))
			t0 := time.Now()
			as := call(t, ep, a, n, "big", 16<<20)
			for _, x := range as {
				require.Greater(t, len(x.Body), 16<<20)
			}
			t.Log("8x16MiB answers", time.Since(t0))
			t0 = time.Now()
			as = call(t, ep, a, n, "len", make([]byte, 64<<20))
			t.Log("64MiB broadcast", time.Since(t0), as[0].Body)
			require.Zero(t, ep.Holding())
		})
	}
}

func benchFan(b *testing.B, n int, own bool) {
	bb, err := bus.Open(context.Background(), bus.Config{})
	require.NoError(b, err)
	b.Cleanup(func() { bb.Close() })
	a := start(b, bb, n, own)
	drv, err := bb.Dial(context.Background(), "driver")
	require.NoError(b, err)
	defer drv.Close()
	ep, err := drv.Endpoint("test")
	require.NoError(b, err)
	arg := make([]byte, 64)
	b.ResetTimer()
	for b.Loop() {
		call(b, ep, a, n, "echo", arg)
	}
}

func BenchmarkFan1(b *testing.B)      { benchFan(b, 1, true) }
func BenchmarkFan8own(b *testing.B)   { benchFan(b, 8, true) }
func BenchmarkFan64own(b *testing.B)  { benchFan(b, 64, true) }
func BenchmarkFan64sh(b *testing.B)   { benchFan(b, 64, false) }
func BenchmarkFan512own(b *testing.B) { benchFan(b, 512, true) }
func BenchmarkFan512sh(b *testing.B)  { benchFan(b, 512, false) }
