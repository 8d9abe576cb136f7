package roles_test

import (
	"context"
	"log/slog"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/dispatch"
	"troupe/roles"
)

// This must not happen: control messages of a role of a supported size are dropped, because a buffer is too small. All ranks
// answer at the same time, on machines with few cores.
func TestManyRanksDropNothing(t *testing.T) {
	shared, own := 4096, 512
	switch {
	case os.Getenv("TROUPE_HEAVY") != "":
		own = 4096
	case testing.Short(): // the race detector takes ten times as long
		shared, own = 1024, 64
	}
	for name, size := range map[string]struct {
		world int
		own   bool
	}{"shared": {world: shared}, "own": {world: own, own: true}} {
		t.Run(name, func(t *testing.T) { manyRanks(t, size.world, size.own) })
	}
}

func manyRanks(t *testing.T, world int, own bool) {
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	var dropped atomic.Int64
	cfg := bus.Config{Logger: slog.New(slog.DiscardHandler), OnError: func(err error) {
		dropped.Add(1)
		t.Log(err)
	}}
	head := cfg
	head.Server.Listen = "127.0.0.1:0"
	server, err := bus.Open(ctx, head)
	require.NoError(t, err)
	defer func() { require.NoError(t, server.Close()) }()
	cfg.URLs = []string{server.URL()}
	hosts, err := bus.Open(ctx, cfg)
	require.NoError(t, err)
	defer func() { require.NoError(t, hosts.Close()) }()
	c := newWorkerProbe()
	local := roles.NewLocal(hosts, []*actors.Class{c.class()})
	defer func() { require.NoError(t, local.Close(ctx)) }()
	driver, err := bus.Open(ctx, cfg)
	require.NoError(t, err)
	defer func() { require.NoError(t, driver.Close()) }()
	rt, err := roles.Open(ctx, roles.Config{Bus: driver, Local: local, LostAfter: 30 * time.Second})
	require.NoError(t, err)
	defer func() { require.NoError(t, rt.Close(ctx)) }()

	step := func(what string, do func()) {
		began := time.Now()
		do()
		t.Logf("%d ranks, %s: %v", world, what, time.Since(began).Round(time.Millisecond))
		require.Zero(t, dropped.Load(), what)
	}
	var cluster *roles.Cluster
	step("create", func() {
		cluster, err = rt.Create(ctx, roles.Spec{Name: "many", Class: "actor", World: world, OwnConnections: own, StartTimeout: 3 * time.Minute})
		require.NoError(t, err)
	})
	step("20 calls", func() {
		for range 20 {
			f, err := cluster.Go(ctx, dispatch.Call{Method: "rank", Mode: dispatch.OneToAll})
			require.NoError(t, err)
			ranks, err := dispatch.AwaitEach[int](ctx, f)
			require.NoError(t, err)
			require.Len(t, ranks, world)
		}
	})
	step("health", func() {
		f, err := cluster.Go(ctx, dispatch.Call{Method: actors.VerbProbe, Mode: dispatch.OneToAll, Control: true})
		require.NoError(t, err)
		_, err = dispatch.AwaitEach[any](ctx, f)
		require.NoError(t, err)
	})
	step("destroy", func() { require.NoError(t, cluster.Destroy(ctx)) })
	require.Zero(t, server.Dropped()+hosts.Dropped()+driver.Dropped())
}
