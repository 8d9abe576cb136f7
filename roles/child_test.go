package roles_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
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

// A child is this program as another process, with these variables set.
const (
	childEnv    = "TROUPE_ROLES_TEST_CHILD" // what it is to do
	childURLEnv = "TROUPE_ROLES_TEST_URL"
)

// children are the programs of child processes; they print lines for the test to read.
var children = map[string]func(ctx context.Context, rt *roles.Runtime) error{
	"attach": childAttaches,
	"drive":  childDrives,
	"own":    childOwns,
	"detach": childDetaches,
}

func childIfAsked() {
	do := children[os.Getenv(childEnv)]
	if do == nil {
		return
	}
	if err := child(do); err != nil {
		fmt.Fprintln(os.Stderr, "child:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func child(do func(context.Context, *roles.Runtime) error) error {
	ctx := context.Background()
	rt, err := roles.Open(ctx, roles.Config{
		BusConfig: bus.Config{URLs: []string{os.Getenv(childURLEnv)}}, Name: "the child", Lease: time.Second,
		Classes: []*actors.Class{newWorkerProbe().class()},
	})
	if err != nil {
		return err
	}
	if err := do(ctx, rt); err != nil {
		return err
	}
	return rt.Close(ctx)
}

// childAttaches calls the role "actors" in several ways.
func childAttaches(ctx context.Context, rt *roles.Runtime) error {
	c, err := rt.Attach(ctx, "actors")
	if err != nil {
		return err
	}
	rows, err := roles.Call[[]int](ctx, c, "double", []int{1, 2, 3})
	if err != nil {
		return err
	}
	totals, err := roles.CallEach[int](ctx, c, "add", 5)
	if err != nil {
		return err
	}
	_, failure := c.Call(ctx, "fail", 1)
	return json.NewEncoder(os.Stdout).Encode(map[string]any{"rows": rows, "totals": totals, "error": failure.Error(), "by": c.Record().By})
}

// childDrives creates a role, prints its session, and waits to be killed.
func childDrives(ctx context.Context, rt *roles.Runtime) error {
	if _, err := rt.Create(ctx, roles.Spec{Name: "childs", Class: "actor", World: 2}); err != nil {
		return err
	}
	fmt.Println(rt.Session())
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

// childDetaches creates a detached role of processes, and ends in order at the end of its input.
func childDetaches(ctx context.Context, rt *roles.Runtime) error {
	kept := workerSpec("kept", 2, placement.Wholes(1))
	kept.Detached = true
	if _, err := rt.Create(ctx, kept); err != nil {
		return err
	}
	fmt.Println("there")
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

// childOwns creates roles of processes, one of them detached, and waits to be killed.
func childOwns(ctx context.Context, rt *roles.Runtime) error {
	kept := workerSpec("kept", 1, placement.Wholes(1))
	kept.Detached = true
	_, err := rt.Create(ctx, kept)
	if err == nil {
		_, err = rt.Create(ctx, workerSpec("owned", 2, placement.Wholes(1)))
	}
	if err == nil {
		_, err = rt.Reserve(ctx, placement.Request{Bundles: placement.Repeat(1, placement.Bundle{Devices: placement.Wholes(1)})})
	}
	if err != nil {
		return err
	}
	fmt.Println("there")
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// spawn starts a child and returns its output.
func spawn(t *testing.T, what, url string) (*exec.Cmd, *bufio.Reader) {
	return spawnWith(t, childEnv+"="+what, childURLEnv+"="+url)
}

// process is a child with its input and output.
type process struct {
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	stdout *bufio.Reader
}

func start(t *testing.T, what, url string) *process {
	return startWith(t, childEnv+"="+what, childURLEnv+"="+url)
}

func spawnWith(t *testing.T, env ...string) (*exec.Cmd, *bufio.Reader) {
	p := startWith(t, env...)
	return p.cmd, p.stdout
}

func startWith(t *testing.T, env ...string) *process {
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe, "-test.run=^$")
	cmd.Env = append(os.Environ(), env...)
	cmd.Stderr = os.Stderr
	bustest.Tie(cmd, syscall.SIGKILL)
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = stdin.Close()
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
	})
	return &process{cmd, stdin, bufio.NewReader(stdout)}
}

func TestAttachFromAnotherProcess(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	probe := newWorkerProbe()
	rt := open(t, roles.Config{BusConfig: bus.Config{InProcess: srv}, Classes: []*actors.Class{probe.class()}, Name: "the parent"})
	c := create(t, rt, roles.Spec{Name: "actors", Class: "actor", World: 2})
	_, stdout := spawn(t, "attach", srv.URL())
	line, err := stdout.ReadBytes('\n')
	require.NoError(t, err)
	var said struct {
		Rows, Totals []int
		Error, By    string
	}
	require.NoError(t, json.Unmarshal(line, &said))
	require.Equal(t, []int{2, 4, 6}, said.Rows)
	require.Equal(t, []int{5, 5}, said.Totals)
	require.Equal(t, "actors[1] fail on "+node(t)+": tired", said.Error)
	require.Equal(t, "the parent", said.By)
	totals, err := roles.CallEach[int](patient(t), c, "add", 1)
	require.NoError(t, err, "the role outlives the child")
	require.Equal(t, []int{6, 6}, totals)
}

// The driver's process is killed, and its workers run in another process. Its owned role ends with its lease; its
// detached role stays and can be called.
func TestADriverIsKilled(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	probe := newWorkerProbe()
	local := newLocal(t, bustest.Open(t, bus.Config{InProcess: srv}), probe.class())
	rt := open(t, roles.Config{BusConfig: bus.Config{InProcess: srv}, Local: local, Lease: time.Second})
	owned := create(t, rt, roles.Spec{Name: "owned", Class: "actor", World: 3})
	kept := create(t, rt, roles.Spec{Name: "kept", Class: "actor", World: 2, Detached: true})
	driver, stdout := spawn(t, "drive", srv.URL())
	session, err := stdout.ReadString('\n')
	require.NoError(t, err)
	for _, name := range []string{"owned", "kept"} {
		require.NoError(t, rt.Reown(patient(t), name, strings.TrimSpace(session)))
	}
	f, err := owned.ExecuteAllAsync(patient(t), "hold")
	require.NoError(t, err)
	await(t, probe.started, 3)
	require.Len(t, rolesOf(t, rt), 3)

	require.NoError(t, driver.Process.Kill())
	require.Len(t, await(t, probe.ended, 3), 3, "running calls are cancelled")
	require.Error(t, f.Wait(patient(t)))
	eventually(t, "only the detached role is left", func() bool { return probe.living() == 2 && len(rolesOf(t, rt)) == 1 })
	require.Equal(t, 0, probe.stopped()[2], "rank 0 last")
	_, err = owned.Call(patient(t), "rank")
	require.ErrorIs(t, err, bus.ErrNotFound)
	totals, err := roles.CallEach[int](patient(t), kept, "add", 1)
	require.NoError(t, err)
	require.Equal(t, []int{1, 1}, totals)
	other := open(t, roles.Config{BusConfig: bus.Config{InProcess: srv}})
	totals, err = roles.CallEach[int](patient(t), attach(t, other, "kept"), "add", 1)
	require.NoError(t, err)
	require.Equal(t, []int{2, 2}, totals)
}
