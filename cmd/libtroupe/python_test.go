package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/actors/actorstest"
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/nodes"
	"troupe/roles"
)

// python is the interpreter of `make python`, which has the package.
func python(t *testing.T) string {
	path, err := filepath.Abs("../../.venv/bin/python")
	require.NoError(t, err)
	_, noLibrary := os.Stat("../../python/troupe/bin/libtroupe.so")
	if _, err := os.Stat(cmp.Or(os.Getenv("TROUPE_TEST_PYTHON"), path)); err != nil || noLibrary != nil {
		if os.Getenv("CI") != "" {
			t.Fatal("there is no .venv with the package in it; `make python` makes it")
		}
		t.Skip("there is no .venv with the package in it; `make python` makes it, and `make test` does that first")
	}
	return cmp.Or(os.Getenv("TROUPE_TEST_PYTHON"), path)
}

// TestConformance runs the suite against Python workers, each in its own process.
func TestConformance(t *testing.T) {
	if testing.Short() {
		t.Skip("many processes")
	}
	exe := python(t)
	actorstest.Exercise(t, func(t *testing.T, b *bus.Bus, role actorstest.Role) {
		life, err := b.Conn().SubscribeSync(role.Address.Life())
		require.NoError(t, err)
		defer func() { _ = life.Unsubscribe() }()
		for rank := range role.World {
			startPython(t, exe, b, role, rank)
		}
		for ready := map[int]bool{}; len(ready) < role.World; {
			m, err := life.NextMsg(2 * time.Minute)
			require.NoError(t, err, "not all workers came up")
			f, err := wire.ParseFrame(m.Data)
			require.NoError(t, err)
			var beats []actors.Heartbeat
			require.NoError(t, wire.Unmarshal(f.Body, &beats))
			for _, beat := range beats {
				require.NotEqual(t, actors.Failed, beat.State, "%v", beat.Err)
				if beat.State == actors.Ready {
					ready[beat.Rank] = true
				}
			}
		}
	})
}

func startPython(t *testing.T, exe string, b *bus.Bus, role actorstest.Role, rank int) {
	a := roles.Assignment{
		Namespace: role.Address.Namespace, Role: role.Address.Role, Incarnation: role.Address.Incarnation, Class: actorstest.ClassName,
		Rank: rank, World: role.World, Gen: role.Gen, Mesh: dispatch.Mesh{TP: 1, CP: 1, DP: role.World, PP: 1}, Config: role.Config,
		Ordered: role.Ordered, QueueLimit: role.QueueLimit, BeatEvery: role.HeartbeatEvery, Slices: []actors.Slice{},
	}
	if len(role.Slices) > 0 {
		a.Slices = role.Slices[rank]
	}
	body, err := wire.Marshal(a)
	require.NoError(t, err)
	file, err := json.Marshal(nodes.AssignmentFile{Node: "here", Name: fmt.Sprintf("%s-%d", a.Role, rank), URLs: []string{b.URL()}, Assignment: body})
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "assignment")
	require.NoError(t, os.WriteFile(path, file, 0o600))
	tests, err := filepath.Abs("../../python/tests")
	require.NoError(t, err)
	cmd := exec.Command(exe, "-m", "troupe.worker")
	cmd.Stderr = os.Stderr
	cmd.Env = append(os.Environ(), nodes.AssignmentEnv+"="+path, "PYTHONPATH="+tests+":"+os.Getenv("PYTHONPATH"), "RANK="+strconv.Itoa(rank),
		"TROUPE_CLASSES="+actorstest.ClassName+"=exercise:Exercise,"+actorstest.SecondClassName+"=exercise:Second")
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGKILL) // some have ended, some block
		_ = cmd.Wait()
	})
}
