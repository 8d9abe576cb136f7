package benchmarks

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/bus"
)

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
