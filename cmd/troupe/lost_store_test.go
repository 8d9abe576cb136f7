package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/placement"
	"troupe/roles"
)

// lostStore is a head whose store is lost or replaced while a driver, its agents and its workers run on.
type lostStore struct {
	*shell
	words []string
	store string
	cmd   *exec.Cmd
	head  readyHead
}

func newLostStore(t *testing.T) *lostStore {
	s := &lostStore{shell: newShell(t), store: t.TempDir()}
	s.words = []string{"up", "--json", "--listen", "127.0.0.1:0", "--store", s.store, "--gpus", "sim:1x4", "--name", "box"}
	s.killAfter(s.store)
	s.start()
	return s
}

func (s *lostStore) start() {
	cmd, out := s.process(s.words...)
	s.cmd, s.head = cmd, s.ready(out)
}

func (s *lostStore) kill() {
	require.NoError(s.t, s.cmd.Process.Kill())
	require.Error(s.t, s.cmd.Wait())
}

// copy copies a folder with everything that an administrator's copy has, in place of another, in which the agent may write meanwhile.
func (s *lostStore) copy(from, to string) {
	require.Eventually(s.t, func() bool { // not while the agent makes a file of it
		if err := os.Rename(to, filepath.Join(s.t.TempDir(), "old")); !os.IsNotExist(err) {
			require.NoError(s.t, err)
		}
		return exec.Command("cp", "-aT", from, to).Run() == nil
	}, time.Minute, 100*time.Millisecond)
}

// A head that starts with an older or an empty store, or was away for longer than agents once waited, asks who lives before it ends
// anything: roles, reservations and devices of a driver that lives are those from before.
func TestALostStoreEndsNothing(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		lost, older bool
		away        time.Duration
	}{
		"an older store": {lost: true, older: true},
		"an empty store": {lost: true},
		"a long outage":  {away: 70 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newLostStore(t)
			rt, err := roles.Open(t.Context(), roles.Config{BusConfig: s.head.access(), Namespace: "run", Classes: []*actors.Class{calcClass()}})
			require.NoError(t, err)
			ghost, err := rt.Create(t.Context(), roles.Spec{Name: "ghost", Class: "calc", World: 1, Process: &roles.Process{}})
			require.NoError(t, err)
			backup := filepath.Join(t.TempDir(), "backup")
			s.kill()
			s.copy(s.store, backup)
			s.start()
			require.NoError(t, ghost.Destroy(t.Context()))
			device := placement.Request{Bundles: []placement.Bundle{{Devices: 1000}}}
			var made []*roles.Cluster
			for _, spec := range []roles.Spec{
				{Name: "device", Class: "calc", World: 2, Process: &roles.Process{Needs: device}},
				{Name: "plain", Class: "calc", World: 2, Process: &roles.Process{Policy: roles.RestartRank}},
			} {
				c, err := rt.Create(t.Context(), spec)
				require.NoError(t, err)
				made = append(made, c)
			}
			_, err = rt.Reserve(t.Context(), placement.Request{ID: "spare", Bundles: device.Bundles})
			require.NoError(t, err)

			s.kill()
			switch {
			case c.older:
				s.copy(backup, s.store)
			case c.lost:
				require.NoError(t, os.RemoveAll(filepath.Join(s.store, "jetstream")))
			}
			time.Sleep(c.away)
			url := s.head.URL
			s.start()
			require.Equal(t, url, s.head.URL, "the port is kept, unless another program has taken it")
			// Longer than an end without a claim took: 15 s for roles and processes, 30 s for reservations.
			for back := time.Now(); time.Since(back) < 45*time.Second; time.Sleep(500 * time.Millisecond) {
				for _, c := range made {
					ranks, err := roles.CallEach[int](t.Context(), c, "rank")
					require.NoError(t, err)
					require.Equal(t, []int{0, 1}, ranks)
				}
				_, stderr, code := s.run("reserve", "--bundles", "2", "--devices", "1", "--id", "thief", "--wait", "0")
				require.NotZero(t, code, "three of four devices are taken")
				require.NotEmpty(t, stderr)
			}
			listed := s.output("roles", "--namespace", "run")
			require.Regexp(t, `device +calc .* ready`, listed)
			require.Regexp(t, `plain +calc .* ready`, listed)
			require.NotContains(t, listed, "ghost", "its driver has destroyed it")
			require.Equal(t, 2, strings.Count(s.output("roles", "device", "--namespace", "run"), "device-"))
			require.Equal(t, 3, strings.Count(s.output("gpus"), "run"))
			held := s.output("reservations", "--namespace", "run")
			require.Contains(t, held, "spare")
			require.NotContains(t, held, "ghost")
			require.NotContains(t, held, "confirmed", "driver and agents have said what they hold")
			require.NotContains(t, s.output("status"), "not confirmed yet")
			require.Equal(t, c.lost, strings.Contains(s.output("events"), "role_claimed run/plain"), "what was lost and found is told")

			// What the store forgot is whole: a lost worker is replaced, and the end leaves nothing.
			var worker struct {
				PID int `json:"pid"`
			}
			require.NoError(t, json.NewDecoder(strings.NewReader(s.output("roles", "plain", "--namespace", "run", "--json"))).Decode(&worker))
			require.NoError(t, syscall.Kill(worker.PID, syscall.SIGKILL))
			require.Eventually(t, func() bool {
				ranks, err := roles.CallEach[int](t.Context(), made[1], "rank")
				return err == nil && len(ranks) == 2 && made[1].Record().Restarts == 1
			}, 2*time.Minute, 100*time.Millisecond)
			require.NoError(t, rt.Close(t.Context()))
			require.Contains(t, s.output("reservations"), "nothing is reserved")
			require.Contains(t, s.output("roles", "--namespace", "run"), "no roles")
			require.NoError(t, s.cmd.Process.Signal(syscall.SIGTERM))
			require.NoError(t, s.cmd.Wait())
		})
	}
}
