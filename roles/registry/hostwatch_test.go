package registry_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/kv"
	"troupe/nodes"
	"troupe/roles/registry"
)

// driverEnv has a process of this test be a driver, on the server of that address.
const driverEnv = "TROUPE_TEST_DRIVER"

// beDriver holds a lease until the process is killed.
func beDriver(url string) error {
	ctx := context.Background()
	b, err := bus.Open(ctx, bus.Config{URLs: []string{url}})
	if err != nil {
		return err
	}
	reg, err := registry.Open(ctx, b, "default")
	if err != nil {
		return err
	}
	if _, err := reg.AcquireLease(ctx, "killed", "me", time.Hour, nil); err != nil {
		return err
	}
	registry.Announce(b, "default", "killed", "me", nil)
	if err := b.Flush(ctx); err != nil {
		return err
	}
	fmt.Println("ready")
	select {}
}

// startDriver starts a process with the lease of the session "killed".
func startDriver(t *testing.T, url string) *exec.Cmd {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), driverEnv+"="+url)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
	_, err = fmt.Fscanln(out, new(string))
	require.NoError(t, err)
	return cmd
}

// watchHost starts the watch of an agent.
func watchHost(t *testing.T, w registry.HostWatch) {
	stop, err := w.Start(t.Context())
	require.NoError(t, err)
	t.Cleanup(stop)
}

// An agent sees that a driver's process on its host has exited, and reads nothing of the leases before.
func TestAgentsSeeDriversOfTheirHostExit(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	b := bustest.Open(t, bus.Config{URLs: []string{srv.URL()}})
	reg, err := registry.Open(t.Context(), b, "default")
	require.NoError(t, err)
	watchHost(t, registry.HostWatch{Bus: b})
	require.NoError(t, b.Flush(t.Context()))
	cmd := startDriver(t, srv.URL())
	require.True(t, reg.DriverAlive(t.Context(), "killed"))
	leases, err := b.JetStream().Stream(t.Context(), "KV_troupe_leases")
	require.NoError(t, err)
	require.Zero(t, leases.CachedInfo().State.Consumers)
	require.NoError(t, cmd.Process.Kill())
	require.Eventually(t, func() bool { return !reg.DriverAlive(t.Context(), "killed") }, 30*time.Second, 10*time.Millisecond)
	v := reg.JudgeDriver(t.Context(), registry.Owned{Driver: "killed", Since: time.Now()}, 0)
	require.True(t, v.Dead)
	require.Equal(t, "its process has exited", v.Why)
}

// An announcement ends no lease of a process that lives, and none of another namespace. That the watch has looked is known by the leases of a
// process that is gone: when the second has ended, each driver that was announced before the first has been checked.
func TestAnnouncementsAloneEndNothing(t *testing.T) {
	b, reg := open(t)
	release := func(lease *kv.Lease, err error) {
		require.NoError(t, err)
		t.Cleanup(func() { _ = lease.Release(context.Background()) })
	}
	for _, session := range []string{"lives", "elsewhere"} {
		release(reg.AcquireLease(t.Context(), session, "me", time.Hour, nil))
	}
	cmd := exec.Command("sleep", "1000")
	require.NoError(t, cmd.Start())
	said := func(namespace, session string) []byte {
		_, data, err := registry.Announcement(namespace, session, cmd.Process.Pid)
		require.NoError(t, err)
		return data
	}
	subject := map[string]string{}
	for _, namespace := range []string{"default", "other", "third"} {
		subject[namespace], _, _ = registry.Announcement(namespace, "x", cmd.Process.Pid)
	}
	lies := map[string][]byte{"default": said("default", "lives"), "other": said("other", "elsewhere"), "third": said("third", "unknown")}
	var gone [][]byte
	for _, session := range []string{"gone-1", "gone-2"} {
		release(reg.LeaseOf(t.Context(), session, cmd.Process.Pid))
		gone = append(gone, said("default", session))
	}
	watchHost(t, registry.HostWatch{Bus: b})
	for namespace, lie := range lies {
		for _, data := range [][]byte{lie, nil, []byte("{"), []byte(`{"session":"a.*"}`), []byte(`{"session":"lives","process":{"pid":-1}}`)} {
			require.NoError(t, b.Publish(subject[namespace], data))
		}
	}
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait() // its error is the signal
	for i, session := range []string{"gone-1", "gone-2"} {
		require.NoError(t, b.Publish(subject["default"], gone[i]))
		require.Eventually(t, func() bool { return !reg.DriverAlive(t.Context(), session) }, 30*time.Second, 10*time.Millisecond)
	}
	for _, session := range []string{"lives", "elsewhere"} {
		require.True(t, reg.DriverAlive(t.Context(), session), session)
	}
}

// The lease of a worker that created roles ends when its agent has seen its process exit.
func TestAWorkersLeaseEndsWithItsProcess(t *testing.T) {
	b, reg := open(t)
	id := nodes.WorkerID{Namespace: "default", Role: "train", Incarnation: "one", Rank: 3}
	other := id
	other.Rank = 4
	for session, worker := range map[string]nodes.WorkerID{"three": id, "four": other} {
		lease, err := reg.AcquireLease(t.Context(), session, "me", time.Hour, &worker)
		require.NoError(t, err)
		t.Cleanup(func() { _ = lease.Release(context.Background()) })
	}
	exitedCh := make(chan nodes.WorkerID)
	watchHost(t, registry.HostWatch{Bus: b, ExitedCh: exitedCh})
	registry.Announce(b, "default", "three", "me", &id)
	registry.Announce(b, "default", "four", "me", &other)
	require.NoError(t, b.Flush(t.Context()))
	require.Eventually(t, func() bool {
		exitedCh <- id // the announcement may come later
		return !reg.DriverAlive(t.Context(), "three")
	}, 30*time.Second, 10*time.Millisecond)
	require.True(t, reg.JudgeDriver(t.Context(), registry.Owned{Driver: "three", Since: time.Now()}, 0).Dead)
	require.True(t, reg.DriverAlive(t.Context(), "four"))
}
