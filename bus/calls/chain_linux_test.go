package calls_test

import (
	"encoding/json"
	"io"
	"net"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus/bustest"
	"troupe/bus/direct"
	"troupe/bus/shm"
	"troupe/bus/values"
	"troupe/bus/wire"
)

// TestAValuePassesAlongAChain: four hosts need one argument. Its owner sends it once, and the hosts pass it on while it arrives. Then one in the middle is
// killed, or stopped, when a part has arrived: the others get it.
func TestAValuePassesAlongAChain(t *testing.T) {
	for name, how := range map[string]syscall.Signal{"whole": 0, "killed": syscall.SIGKILL, "stopped": syscall.SIGSTOP} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const size, world = 24 << 20, 4
			srv := bustest.StartServer(t, bustest.Options{Listen: true})
			here := shortDir(t)
			driver := newFaultyConnWith(t, srv, straight(here))
			s := newSpread(t, srv.URL(), world, time.Minute)
			s.direct = true
			for rank := range world {
				s.start(exec.Command, shortDir(t), rank) // a host each
			}
			ep, memory := endpoint(t, driver.Bus), newSharedMemory(t, here)
			s.ready(ep)
			_, _, pids := s.traffic(ep)

			regions := direct.NewRegions(shm.Config{Dir: here})
			t.Cleanup(regions.Close)
			server, err := direct.Serve(direct.Config{Listen: "127.0.0.1:0", OpenFunc: regions.Open})
			require.NoError(t, err)
			t.Cleanup(server.Close)
			goOnCh := make(chan struct{})
			goOn := sync.OnceFunc(func() { close(goOnCh) })
			defer goOn()
			server.Addresses = []string{cutRelay(t, server.Addresses[0], size/3, func(near, far net.Conn) {
				<-goOnCh
				_, _ = io.Copy(near, far)
			})}
			announce(t, server, here)

			var mu sync.Mutex
			var order []int // of the hosts in the chain
			driver.faults.SetRule(func(m bustest.Message) bustest.Verdict {
				if f, ok := m.Frame(); ok && f.Kind == wire.KindWant && f.Header.ForHost == wire.ForAll && len(f.Body) > 0 {
					mu.Lock()
					defer mu.Unlock()
					if rank := f.Header.Ranks.List()[0]; !slices.Contains(order, rank) {
						order = append(order, rank)
					}
				}
				return bustest.Pass
			})
			body := memory.Make(size)
			copy(body, pattern(size, 5))
			call := s.call("sum", body)
			call.Memory = memory
			g := scatter(t, ep, call)
			until(t, func() bool { mu.Lock(); defer mu.Unlock(); return len(order) == world })
			victim := -1
			if how != 0 {
				victim = order[1]
				require.NoError(t, syscall.Kill(pids[victim], how))
				defer func() { _ = syscall.Kill(pids[victim], syscall.SIGKILL) }() // it may be stopped
			}
			goOn()
			for sums := 0; sums < world && (how == 0 || sums < world-1); {
				a, ok, err := g.Next(t.Context())
				require.NoError(t, err)
				require.True(t, ok)
				if a.Rank != victim {
					require.NoError(t, a.Err)
					require.Equal(t, checksum(pattern(size, 5)), a.Body)
					sums++
				}
			}
			g.Cancel()
			if how != 0 {
				return
			}
			until(t, func() bool { return ep.Traffic().Sent[values.PathDirect] == size }) // to one of four
			var passed uint64
			for _, a := range good(t, scatter(t, ep, s.call("traffic", nil))) {
				var got hostedTraffic
				require.NoError(t, json.Unmarshal(a.Body, &got))
				require.EqualValues(t, size, got.Received[values.PathDirect])
				passed += got.Sent[values.PathDirect]
			}
			require.EqualValues(t, (world-1)*size, passed)
		})
	}
}
