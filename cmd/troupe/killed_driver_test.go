package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/placement"
	"troupe/roles"
)

// deviceDriverEnv makes the test binary a driver with a role of processes on two devices, in this namespace.
const deviceDriverEnv = "TROUPE_TEST_DEVICE_DRIVER"

// driveDevices runs until it is killed. A child process then keeps the driver's sockets open.
func driveDevices(url, namespace string) error {
	rt, err := roles.Open(context.Background(), roles.Config{
		BusConfig: bus.Config{URLs: []string{url}, TokenFile: os.Getenv("TROUPE_TEST_TOKEN")}, Namespace: namespace,
	})
	if err != nil {
		return err
	}
	_, err = rt.Create(context.Background(), roles.Spec{
		Name: "held", Class: "calc", World: 2, Process: &roles.Process{Needs: placement.Request{Bundles: []placement.Bundle{{Devices: 1000}}}},
	})
	if err != nil {
		return err
	}
	if namespace == "near" {
		child := exec.Command("sleep", "60")
		for fd := range 64 {
			if link, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd)); err == nil && strings.HasPrefix(link, "socket:") {
				if twin, err := syscall.Dup(fd); err == nil {
					child.ExtraFiles = append(child.ExtraFiles, os.NewFile(uintptr(twin), link))
				}
			}
		}
		if err := child.Start(); err != nil {
			return err
		}
		fmt.Println("ready", child.Process.Pid)
		select {}
	}
	fmt.Println("ready")
	select {}
}

// The devices of a killed driver are free within seconds, and a suspended driver keeps its role. The driver "near" is on the
// head's host, and a child keeps its connection open; "far" runs in its own PID namespace, so that the head cannot see its
// process, as on another host.
func TestKilledDriverFreesItsDevices(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	began := time.Now()
	head, _ := u.up("--gpus", "sim:1x8", "--name", "box")
	b, err := bus.Open(t.Context(), head.access())
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	client, err := placement.NewClient(b, "")
	require.NoError(t, err)
	defer client.Close()
	holds := func(namespace string) bool {
		list, err := client.List(t.Context())
		require.NoError(t, err)
		for _, r := range list.Records {
			if r.Namespace == namespace {
				return true
			}
		}
		return false
	}
	start := func(namespace string, attr *syscall.SysProcAttr) *exec.Cmd {
		out := &screen{}
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), driverEnv+"="+head.URL, "TROUPE_TEST_TOKEN="+head.TokenFile, deviceDriverEnv+"="+namespace)
		cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = out, t.Output(), attr
		require.NoError(t, cmd.Start())
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		var word string
		var child int
		_, _ = fmt.Sscan(out.line(t, out.String), &word, &child)
		require.Equal(t, "ready", word)
		if child > 0 {
			t.Cleanup(func() { _ = syscall.Kill(child, syscall.SIGKILL) })
		}
		require.True(t, holds(namespace))
		return cmd
	}
	kill := func(cmd *exec.Cmd, namespace string, most time.Duration) {
		killed := time.Now()
		require.NoError(t, cmd.Process.Kill())
		require.Eventually(t, func() bool { return !holds(namespace) }, 2*time.Minute, 20*time.Millisecond)
		require.Less(t, time.Since(killed), most, "the devices of a driver that was killed are free")
		t.Logf("%s: free after %v", namespace, time.Since(killed))
	}
	unseen := &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Cloneflags: syscall.CLONE_NEWPID}
	if os.Getuid() != 0 {
		unseen.Cloneflags |= syscall.CLONE_NEWUSER
		unseen.UidMappings = []syscall.SysProcIDMap{{ContainerID: os.Getuid(), HostID: os.Getuid(), Size: 1}}
		unseen.GidMappings = []syscall.SysProcIDMap{{ContainerID: os.Getgid(), HostID: os.Getgid(), Size: 1}}
	}
	far, suspended := start("far", unseen), start("suspended", unseen)
	near := start("near", &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL})
	kill(near, "near", 12*time.Second) // sooner than its lease expires

	bustest.Freeze(t, suspended.Process.Pid)
	frozen := time.Now()
	require.Eventually(t, func() bool { return time.Since(frozen) > 8*time.Second }, 2*time.Minute, 100*time.Millisecond)
	require.True(t, holds("suspended"), "a driver that is only suspended keeps its role until its lease expires")
	require.NoError(t, suspended.Process.Signal(syscall.SIGCONT))

	// A missing lease counts only after the server has been there for the length of a lease.
	require.Eventually(t, func() bool { return time.Since(began) > 16*time.Second }, 2*time.Minute, 100*time.Millisecond)
	kill(far, "far", time.Minute)
	require.True(t, holds("suspended"))
}
