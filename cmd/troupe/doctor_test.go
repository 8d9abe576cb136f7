package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/cmd/troupe/cli"
	"troupe/cmd/troupe/doctor"
	"troupe/dispatch"
	"troupe/roles"
)

// problemsFound is the exit code of doctor with failures.
const problemsFound = 3

// doctorOutput is what tests read of the JSON output of doctor.
type doctorOutput struct {
	Findings []doctor.Finding `json:"findings"`
}

// barrier lets callers go on when all have come.
type barrier struct {
	mu     sync.Mutex
	count  int
	openCh chan struct{}
}

func (b *barrier) await(ctx context.Context, all int) error {
	b.mu.Lock()
	if b.count++; b.count == all {
		close(b.openCh)
	}
	b.mu.Unlock()
	select {
	case <-b.openCh:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// trainer has a collective, all_reduce, and load, which takes until the test lets it go on.
type trainer struct{ world int }

// Of eight ranks, one is slow to arrive at a collective. Doctor names it, with its peers as evidence, and is content afterwards.
func TestDoctorFindsTheRankThatHoldsUpACollective(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	u.up("--gpus", "none", "--name", "box")
	all, loadedCh := &barrier{openCh: make(chan struct{})}, make(chan struct{})
	class := actors.NewClass("trainer", func(_ context.Context, s actors.Setup) (*trainer, error) { return &trainer{s.World}, nil })
	actors.Method(class, "all_reduce", func(w *trainer, ctx context.Context, _ actors.None) (actors.None, error) {
		return actors.None{}, all.await(ctx, w.world)
	})
	actors.Method(class, "load", func(_ *trainer, ctx context.Context, _ actors.None) (actors.None, error) {
		select {
		case <-loadedCh:
			return actors.None{}, nil
		case <-ctx.Done():
			return actors.None{}, ctx.Err()
		}
	})
	s, err := (&cli.CLI{Err: t.Output(), Env: u.getenv}).Server()
	require.NoError(t, err)
	rt, err := roles.Open(t.Context(), roles.Config{BusConfig: s.Bus, Namespace: s.Namespace, Name: "a test", Classes: []*actors.Class{class.Class}})
	require.NoError(t, err)
	defer func() { require.NoError(t, rt.Close(context.Background())) }()
	cluster, err := rt.Create(t.Context(), roles.Spec{Name: "train", Class: "trainer", World: 8})
	require.NoError(t, err)

	slow, err := cluster.Go(t.Context(), dispatch.Call{Method: "load", Ranks: []int{5}})
	require.NoError(t, err)
	step, err := cluster.Go(t.Context(), dispatch.Call{Method: "all_reduce", Mode: dispatch.OneToAll})
	require.NoError(t, err)
	var d doctorOutput
	require.Eventually(t, func() bool {
		text, _, code := u.run("doctor", "--json", "--listen", "1500ms")
		require.NoError(t, json.Unmarshal([]byte(text), &d), text)
		return code == problemsFound && len(lagging(d)) > 0
	}, 2*time.Minute, 10*time.Millisecond)
	found := lagging(d)
	require.Len(t, found, 1, "%v", found)
	require.Equal(t, "role default/train, rank 5", found[0].Subject)
	require.Contains(t, found[0].Text, "it has been running load for")
	require.Contains(t, found[0].Evidence[0], "7 of 8 ranks have been running all_reduce for")
	require.Equal(t, "troupe logs train/5 -n default --tail 20", found[0].Next)
	text, stderr, code := u.run("doctor", "--listen", "1500ms")
	require.Equal(t, problemsFound, code)
	require.Empty(t, stderr)
	require.Contains(t, text, "FAILURE  role default/train, rank 5: the other ranks wait for it")

	close(loadedCh)
	for _, f := range []*dispatch.Future{slow, step} {
		_, err := f.Value(t.Context())
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool {
		text, _, _ := u.run("doctor", "--listen", "1500ms")
		return !strings.Contains(text, "rank 5")
	}, 2*time.Minute, 10*time.Millisecond)
}

// All ranks run the same method for the same time and have no spans. Doctor takes their stacks, and names the rank that is elsewhere.
func TestDoctorFindsAHungRankByItsStack(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	u.up("--gpus", "none", "--name", "box")
	rt := u.runs(roles.Spec{Name: "train", World: 4, Process: &roles.Process{Command: roles.Self()}})
	cluster, err := rt.Attach(t.Context(), "train")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	step, err := cluster.Go(ctx, dispatch.Call{Method: "step", Mode: dispatch.OneToAll})
	require.NoError(t, err)
	var d doctorOutput
	require.Eventually(t, func() bool {
		text, _, _ := u.run("doctor", "--json", "--listen", "1500ms")
		require.NoError(t, json.Unmarshal([]byte(text), &d), text)
		return len(lagging(d)) > 0
	}, 90*time.Second, 10*time.Millisecond)
	found := lagging(d)
	require.Len(t, found, 1, "%v", found)
	require.Equal(t, "role default/train, rank 2", found[0].Subject)
	require.Contains(t, found[0].Text, "the other ranks wait for it: it is in ")
	require.Contains(t, found[0].Text, "calc).load")
	require.Contains(t, found[0].Evidence[0], "3 of 4 ranks are at ")
	require.Equal(t, "troupe stacks train/2 -n default", found[0].Next)
	cancel()
	_, err = step.Value(context.Background())
	require.Error(t, err)
}

func lagging(d doctorOutput) (out []doctor.Finding) {
	for _, f := range d.Findings {
		if f.Code == "rank_lags" {
			out = append(out, f)
		}
	}
	return out
}

func codesOf(t *testing.T, u *shell, words ...string) (codes []string, code int) {
	t.Helper()
	text, stderr, code := u.run(append([]string{"doctor", "--json"}, words...)...)
	var d doctorOutput
	require.NoError(t, json.Unmarshal([]byte(text), &d), stderr)
	for _, f := range d.Findings {
		codes = append(codes, f.Code)
	}
	return codes, code
}

// Without a server doctor says so. A suspended agent and a suspended worker are found by their silence.
func TestDoctorFindsSilence(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	codes, code := codesOf(t, u, "--url", "nats://127.0.0.1:1")
	require.Equal(t, []string{"nats_unreachable"}, codes)
	require.Equal(t, problemsFound, code)
	require.Contains(t, u.fails(2, "doctor", "--listen", "-1s"), "--listen")

	head, _ := u.up("--gpus", "sim:1x2", "--name", "box")
	rt := u.runs(roles.Spec{Name: "still", World: 2, Process: &roles.Process{Command: roles.Self()}})
	codes, _ = codesOf(t, u, "--listen", "4s")
	require.NotContains(t, codes, "rank_silent")
	require.NotContains(t, codes, "agent_silent")
	require.NotContains(t, codes, "version_differs")
	require.NotContains(t, codes, "unreadable")
	cluster, err := rt.Attach(t.Context(), "still")
	require.NoError(t, err)
	info, err := roles.CallEach[actors.Info](t.Context(), cluster, actors.VerbInfo)
	require.NoError(t, err)
	agent := agentOf(t, head.Store)
	for _, pid := range []int{info[1].PID, agent} {
		bustest.Freeze(t, pid)
		defer func() { _ = syscall.Kill(pid, syscall.SIGCONT) }()
	}
	codes, code = codesOf(t, u, "--listen", "4500ms")
	require.Equal(t, problemsFound, code)
	require.Contains(t, codes, "rank_silent")
	require.True(t, strings.Contains(strings.Join(codes, " "), "agent_silent") || strings.Contains(strings.Join(codes, " "), "node_"), "%v", codes)
}

// An agent tells its version, which status and doctor compare with the head's.
func TestVersionOfAgents(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	head, _ := u.up("--gpus", "none", "--name", "box")
	b, err := bus.Open(t.Context(), head.access())
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	var view statusOutput
	require.NoError(t, json.Unmarshal([]byte(u.output("status", "--json")), &view))
	require.Equal(t, view.Head.Version, view.Nodes[0].Version)
	require.FileExists(t, filepath.Join(head.Store, "agent", "agent.log"))
	_, err = os.Stat(head.Store)
	require.NoError(t, err)
}
