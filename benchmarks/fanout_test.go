package benchmarks

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
)

func TestMain(m *testing.M) { bustest.Main(m) }

// A short run reports both layouts with plausible figures, and leaves no goroutine behind.
func TestFanout(t *testing.T) {
	var got []FanoutResult
	err := Fanout(t.Context(), FanoutConfig{Workers: []int{1, 2}, Bytes: []int{128}, Each: 50 * time.Millisecond}, func(r FanoutResult) error {
		got = append(got, r)
		return nil
	})
	require.NoError(t, err)
	require.Len(t, got, 4)
	for i, r := range got {
		require.Equal(t, []int{1, 1, 2, 2}[i], r.Workers)
		require.Equal(t, []string{Own, Shared}[i%2], r.Layout)
		require.Equal(t, 128, r.Bytes)
		require.Positive(t, r.Calls)
		require.Positive(t, r.P50)
		require.Positive(t, r.FloorP50)
		require.LessOrEqual(t, r.P50, r.P99)
		require.LessOrEqual(t, r.FloorP50, r.FloorP99)
		require.InDelta(t, r.P50/r.FloorP50, r.RatioP50, 1e-9)
	}
}

func TestFanoutEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := Fanout(ctx, FanoutConfig{Workers: []int{1}, Each: time.Second}, func(FanoutResult) error { return nil })
	require.ErrorIs(t, err, context.Canceled)
}

// TestFanoutAllocations bounds the allocations of one rank in a short call: about 15 and 1.2 KB, of which the floor's are 12 and
// 0.7 KB.
func TestFanoutAllocations(t *testing.T) {
	const n = 16
	server, err := bus.Open(t.Context(), bus.Config{Server: bus.ServerConfig{Listen: "127.0.0.1:0"}})
	require.NoError(t, err)
	defer server.Close()
	call, stop, err := troupeFanout(t.Context(), server.URL(), n, Own, make([]byte, 64))
	require.NoError(t, err)
	defer stop()
	for range 50 {
		require.NoError(t, call(t.Context())) // until the worker runs the calls inline
	}
	got := testing.AllocsPerRun(300, func() { require.NoError(t, call(t.Context())) })
	require.LessOrEqual(t, got, 19.0*n+40, "allocations of a call of %d ranks", n)
}

func TestQuantile(t *testing.T) {
	times := []time.Duration{5000, 1000, 3000, 2000, 4000}
	require.InDelta(t, 3.0, quantile(times, 0.5), 1e-9)
	require.InDelta(t, 1.0, quantile(times, 0), 1e-9)
	require.InDelta(t, 5.0, quantile(times, 1), 1e-9)
}

func benchOurs(b *testing.B, n int, layout string) {
	server, err := bus.Open(context.Background(), bus.Config{Server: bus.ServerConfig{Listen: "127.0.0.1:0"}})
	require.NoError(b, err)
	defer server.Close()
	call, stop, err := troupeFanout(context.Background(), server.URL(), n, layout, make([]byte, 64))
	require.NoError(b, err)
	defer stop()
	b.ReportAllocs()
	for b.Loop() {
		require.NoError(b, call(context.Background()))
	}
}

func BenchmarkShared512(b *testing.B) { benchOurs(b, 512, Shared) }
func BenchmarkOwn64(b *testing.B)     { benchOurs(b, 64, Own) }
func BenchmarkOne(b *testing.B)       { benchOurs(b, 1, Shared) }

func benchFloor(b *testing.B, n int, layout string) {
	server, err := bus.Open(context.Background(), bus.Config{Server: bus.ServerConfig{Listen: "127.0.0.1:0"}})
	require.NoError(b, err)
	defer server.Close()
	call, stop, err := floorFanout(server.URL(), n, layout, make([]byte, 64))
	require.NoError(b, err)
	defer stop()
	b.ReportAllocs()
	for b.Loop() {
		require.NoError(b, call(context.Background()))
	}
}

func BenchmarkOwn8(b *testing.B)    { benchOurs(b, 8, Own) }
func BenchmarkFloor8(b *testing.B)  { benchFloor(b, 8, Own) }
func BenchmarkFloor64(b *testing.B) { benchFloor(b, 64, Own) }

// A call that begins late, because the one before it took long, counts from when it was due.
func TestFixedRateCountsStalls(t *testing.T) {
	n := 0
	stall := func(context.Context) error {
		if n++; n%20 == 0 {
			time.Sleep(50 * time.Millisecond)
		}
		return nil
	}
	quick := func(context.Context) error { return nil }
	times, _, err := interleave(t.Context(), 300*time.Millisecond, 500, stall, quick)
	require.NoError(t, err)
	late := 0
	for _, d := range times {
		if d > 10*time.Millisecond {
			late++
		}
	}
	require.Greater(t, late, 2*(n/20), "one stall delays the calls that were due during it")
}
