package actors_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/actors/actorstest"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// BenchmarkFan broadcasts 64 bytes to all ranks, which share a connection or have one each, and gathers their answers.
// The benchmarks package compares the same with plain nats.go.
func BenchmarkFan(b *testing.B) {
	for _, layout := range []string{"own", "shared"} {
		for _, world := range []int{1, 8, 64} {
			b.Run(fmt.Sprintf("%s-%d", layout, world), func(b *testing.B) { benchFan(b, layout == "own", world) })
		}
	}
}

func benchFan(b *testing.B, own bool, world int) {
	main := bustest.Open(b)
	address, err := bus.NewAddress("bench", "role", "i1")
	require.NoError(b, err)
	role := actorstest.Role{Address: address, World: world, HeartbeatEvery: time.Minute}
	var host *actors.Host
	ranks := make([]int, world)
	for rank := range world {
		ranks[rank] = rank
		if own || host == nil {
			conn := main
			if own {
				conn, err = main.Dial(context.Background(), fmt.Sprint("rank-", rank))
				require.NoError(b, err)
				b.Cleanup(func() { require.NoError(b, conn.Close()) })
			}
			host = newHost(b, conn, role, actorstest.Classes())
		}
		_, err := host.Start(context.Background(), role.Spec(rank))
		require.NoError(b, err)
	}
	driver, err := main.Dial(context.Background(), "driver")
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, driver.Close()) })
	ep, err := calls.Open(driver, "bench")
	require.NoError(b, err)
	raw, err := wire.Marshal(make([]byte, 64))
	require.NoError(b, err)
	body := wire.Args{Positional: []wire.Raw{raw}}.Append(nil, nil)
	call := func() {
		g, err := ep.Scatter(context.Background(), calls.Call{To: address, Method: "echo", World: world, Parts: []calls.Part{{Scope: calls.Everyone(), Ranks: ranks, Body: body}}})
		if err != nil {
			b.Fatal(err)
		}
		<-g.Done()
		if !g.AllGood() {
			b.Fatal(g.Answers())
		}
	}
	call()
	b.ReportAllocs()
	for b.Loop() {
		call()
	}
}
