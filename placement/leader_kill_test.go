package placement_test

import (
	"fmt"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/placement"
)

// child starts a service in a process of its own, and returns a function that kills it.
func (s *testCluster) child() (kill func()) {
	exe, err := os.Executable()
	require.NoError(s.t, err)
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), serviceEnv+"="+s.srv.URL())
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	require.NoError(s.t, err)
	require.NoError(s.t, cmd.Start())
	kill = sync.OnceFunc(func() {
		_ = cmd.Process.Signal(syscall.SIGKILL)
		_ = cmd.Wait() // it was killed
		_ = stdin.Close()
	})
	s.t.Cleanup(kill)
	return kill
}

// Acknowledged reservations survive the death of a leader, and none is granted twice.
func TestKilledLeader(t *testing.T) { // not parallel: it measures the time of a takeover
	const total, clients = 1000, 8
	s := &testCluster{t: t, srv: bustest.StartServer(t, bustest.Options{Listen: true}), lease: 15 * time.Second}
	s.addNodes("sim:16x8")
	kill := s.child()
	op := s.client("")
	s.ready(op, 16)
	svc, err := placement.NewService(placement.Config{Bus: s.bus(), ID: "standby"})
	require.NoError(t, err)
	s.run("standby", svc.Run)

	var done atomic.Int64
	var killed atomic.Int64 // when, in nanoseconds
	var back atomic.Int64   // the first answer after that
	var mu sync.Mutex
	records := map[string]placement.Record{}
	var group sync.WaitGroup
	for n := range clients {
		c := s.clientAt(s.busAt(bus.Config{URLs: []string{s.srv.URL()}}), "default")
		group.Go(func() {
			for i := n; i < total; i += clients {
				r, err := c.Reserve(within(t, 2*time.Minute), placement.Request{
					ID: fmt.Sprintf("r%d", i), Bundles: []placement.Bundle{{Devices: 100, CPUs: 100}},
				})
				if err != nil {
					t.Errorf("r%d: %v", i, err)
					return
				}
				if killed.Load() > 0 && r.Since.UnixNano() > killed.Load() {
					back.CompareAndSwap(0, time.Now().UnixNano())
				}
				mu.Lock()
				records[r.ID] = r
				mu.Unlock()
				if done.Add(1) == total/3 {
					kill()
					killed.Store(time.Now().UnixNano())
				}
			}
		})
	}
	group.Wait()
	require.Len(t, records, total)
	takeover := time.Duration(back.Load() - killed.Load())
	t.Logf("takeover within %v", takeover)
	require.Positive(t, takeover)
	require.Less(t, takeover, 10*time.Second, "no wait for the leases of nodes")

	list, err := op.List(t.Context())
	require.NoError(t, err)
	require.Len(t, list.Records, total)
	used := map[string]placement.Share{}
	for _, r := range list.Records {
		require.Equal(t, records[r.ID].Token, r.Token, "%s was granted twice", r.ID)
		require.Equal(t, records[r.ID].Workers, r.Workers)
		used[r.Workers[0].Slots[0].UUID] += r.Workers[0].Slots[0].Share
	}
	for uuid, share := range used {
		require.LessOrEqual(t, share, placement.Whole, uuid)
	}
	for _, r := range list.Records {
		group.Go(func() {
			if err := op.Release(within(t, 2*time.Minute), r.ID, r.Token); err != nil {
				t.Errorf("release %s: %v", r.ID, err)
			}
		})
	}
	group.Wait()
	list, err = op.List(t.Context())
	require.NoError(t, err)
	require.Empty(t, list.Records)
}
