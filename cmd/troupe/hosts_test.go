package main

import (
	"context"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/placement"
	"troupe/roles"
)

// hostClass is a worker class that tests connections between hosts.
func hostClass() *actors.Class {
	type worker struct{}
	k := actors.NewClass("host", func(context.Context, actors.Setup) (*worker, error) { return &worker{}, nil })
	actors.Method(k, "pid", func(*worker, context.Context, actors.None) (int, error) { return os.Getpid(), nil })
	actors.Method(k, "hold", func(_ *worker, ctx context.Context, _ actors.None) (int, error) {
		<-ctx.Done()
		return 0, ctx.Err()
	})
	actors.Method(k, "meet", func(_ *worker, ctx context.Context, _ actors.None) (string, error) { return meet(ctx) })
	return k.Class
}

// meet makes rank 0 listen at its MASTER_PORT and the others connect to it, as torch's store does.
func meet(ctx context.Context) (string, error) {
	at := net.JoinHostPort(os.Getenv("MASTER_ADDR"), os.Getenv("MASTER_PORT"))
	if os.Getenv("RANK") != "0" {
		for {
			conn, err := net.DialTimeout("tcp", at, time.Second)
			if err == nil {
				return at, conn.Close()
			}
			if ctx.Err() != nil {
				return "", err
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	reuse := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1) })
	}}
	l, err := reuse.Listen(ctx, "tcp", at)
	if err != nil {
		return "", err
	}
	defer func() { _ = l.Close() }() // nothing was written
	conn, err := l.Accept()
	if err != nil {
		return "", err
	}
	return at, conn.Close()
}

// joinFrom starts an agent on the other host.
func joinFrom(t *testing.T, h *bustest.Hosts, u *shell, head readyHead, name string, env ...string) *exec.Cmd {
	token, err := os.ReadFile(head.TokenFile)
	require.NoError(t, err)
	url := strings.Replace(head.URL, "127.0.0.1", h.Near, 1)
	cmd := h.Command(os.Args[0])
	cmd.Env = append(os.Environ(), argsEnv+"="+strings.Join([]string{"join", url, "--name", name, "--gpus", "sim:1x4"}, "\n"),
		"TROUPE_TOKEN="+strings.TrimSpace(string(token)), "TROUPE_FINGERPRINT="+head.Fingerprint, "XDG_STATE_HOME="+t.TempDir())
	cmd.Env = append(cmd.Env, env...)
	cmd.Stderr = t.Output()
	bustest.Tie(cmd, syscall.SIGTERM)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // fails if it has ended
		_ = cmd.Wait()
	})
	require.Eventually(t, func() bool { return strings.Contains(u.output("gpus"), name) }, 2*time.Minute, 50*time.Millisecond)
	return cmd
}

// onHosts is the spec of a role with one worker on each of the nodes.
func onHosts(name string, nodes ...string) roles.Spec {
	p := &roles.Process{Command: []string{os.Args[0]}}
	for _, node := range nodes {
		p.Needs.Bundles = append(p.Needs.Bundles, placement.Bundle{Node: node, Devices: placement.Wholes(1)})
	}
	return roles.Spec{Name: name, Class: "host", World: len(nodes), Process: p, StopGrace: time.Second}
}

// driveOn is a driver with its own namespace.
func driveOn(t *testing.T, head readyHead, namespace string) *roles.Runtime {
	rt, err := roles.Open(t.Context(), roles.Config{Namespace: namespace, BusConfig: head.access()})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, rt.Close(context.Background())) })
	return rt
}

// TestTwoHosts: a head and an agent on two machines, over TLS; workers that connect to each other; a killed worker on the second
// machine; two runs, of which one is destroyed; a link that is cut and restored.
func TestTwoHosts(t *testing.T) {
	t.Parallel()
	h, u := bustest.NewHosts(t), newShell(t)
	store := t.TempDir()
	_, out := u.process("up", "--json", "--listen", h.Near+":0", "--store", store, "--gpus", "sim:1x4", "--name", "near")
	u.killAfter(store)
	head := u.ready(out)
	joinFrom(t, h, u, head, "far")
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	rt, other := driveOn(t, head, "one"), driveOn(t, head, "two")

	both, err := rt.Create(ctx, onHosts("both", "near", "far"))
	require.NoError(t, err)
	met, err := roles.CallEach[string](ctx, both, "meet")
	require.NoError(t, err)
	require.Equal(t, []string{both.Record().Master, both.Record().Master}, met)
	beside, err := other.Create(ctx, onHosts("both", "near", "far"))
	require.NoError(t, err, "another run has names of its own")
	require.NoError(t, both.Destroy(ctx))
	_, err = roles.CallEach[int](ctx, beside, "pid")
	require.NoError(t, err, "it is left alone")

	over, err := rt.Create(ctx, onHosts("over", "far"))
	require.NoError(t, err)
	pid, err := roles.Call[int](ctx, over, "pid")
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL)) // PIDs are shared between the hosts
	_, err = roles.Call[int](ctx, over, "hold")
	var lost *bus.Error
	require.ErrorAs(t, err, &lost)
	require.Equal(t, []string{"far", "SIGKILL"}, []string{lost.Node, lost.Details["signal"]})
	require.NoError(t, over.Destroy(ctx))

	if h.Apart {
		cutAndHealed(ctx, t, h, rt, beside)
	}
}

// cutAndHealed: workers behind a cut link are lost to their driver and end when the link is restored; then their devices are
// granted again.
func cutAndHealed(ctx context.Context, t *testing.T, h *bustest.Hosts, rt *roles.Runtime, beside *roles.Cluster) {
	pids, err := roles.CallEach[int](ctx, beside, "pid")
	require.NoError(t, err)
	hold, err := beside.ExecuteAllAsync(ctx, "hold")
	require.NoError(t, err)
	time.Sleep(3 * time.Second) // then the driver has heard heartbeats for long enough to judge silence
	h.Cut()
	begun := time.Now()
	err = hold.Wait(ctx)
	require.ErrorIs(t, err, bus.ErrWorkerLost)
	require.ErrorContains(t, err, "far")
	t.Logf("known %v after the cut: %v", time.Since(begun).Round(time.Millisecond), err)
	require.Less(t, time.Since(begun), 40*time.Second)
	_ = beside.Destroy(ctx) // its error is that the other host did not answer
	require.False(t, gone(pids[1]), "nobody could end it")
	h.Heal()
	require.Eventually(t, func() bool { return gone(pids[1]) }, 2*time.Minute, 100*time.Millisecond, "its agent is told")
	var again *roles.Cluster
	require.Eventually(t, func() bool {
		again, err = rt.Create(ctx, onHosts("again", "far"))
		return err == nil
	}, 2*time.Minute, 100*time.Millisecond)
	_, err = roles.CallEach[int](ctx, again, "pid")
	require.NoError(t, err)
	require.NoError(t, again.Destroy(ctx))
}
