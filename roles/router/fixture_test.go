package router_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/roles"
)

// childEnv holds the server's URL in a process that has a role of its own.
const childEnv = "TROUPE_ROUTER_TEST_URL"

func TestMain(m *testing.M) {
	if url := os.Getenv(childEnv); url != "" {
		runChild(url)
		return
	}
	os.Exit(m.Run())
}

// runChild has the role "victims" until its standard input ends.
func runChild(url string) {
	ctx := context.Background()
	rt, err := roles.Open(ctx, roles.Config{BusConfig: bus.Config{URLs: []string{url}}, Classes: []*actors.Class{newCalls().class()}})
	if err == nil {
		_, err = rt.Create(ctx, roles.Spec{Name: "victims", Class: "judge", World: 1})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.Stdin) // until the test ends
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// calls is what the workers of a test have in common: the calls of hold that came, and the leave to answer them.
type calls struct {
	cameCh chan string // "RANK ID"
	goCh   chan struct{}
}

func newCalls() *calls { return &calls{cameCh: make(chan string, 1000), goCh: make(chan struct{})} }

// came is the next call of hold.
func (c *calls) came(t testing.TB) string {
	t.Helper()
	select {
	case text := <-c.cameCh:
		return text
	case <-time.After(2 * time.Minute):
		require.FailNow(t, "no call came")
		return ""
	}
}

type judge struct {
	rank  int
	calls *calls

	mu   sync.Mutex
	held map[string]chan struct{} // by id; closed by abort
}

func (c *calls) class() *actors.Class {
	k := actors.NewClass("judge", func(_ context.Context, s actors.Setup) (*judge, error) {
		return &judge{rank: s.Rank, calls: c, held: map[string]chan struct{}{}}, nil
	})
	many := actors.MethodOptions{Lane: actors.Concurrent(64)}
	actors.Method(k, "score", (*judge).Score, many)
	actors.Method(k, "hold", (*judge).Hold, many)
	actors.Method(k, "abort", (*judge).Abort, actors.MethodOptions{Lane: actors.Control})
	return k.Class
}

func (j *judge) Score(_ context.Context, n int) (int, error) { return n*10 + j.rank, nil }

// Hold answers when the test lets it, or with a partial result when it is aborted.
func (j *judge) Hold(ctx context.Context, id string) (string, error) {
	abortCh := make(chan struct{})
	j.mu.Lock()
	j.held[id] = abortCh
	j.mu.Unlock()
	j.calls.cameCh <- fmt.Sprintf("%d %s", j.rank, id)
	select {
	case <-j.calls.goCh:
		return "whole", nil
	case <-abortCh:
		return "partial", nil
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

func (j *judge) Abort(_ context.Context, id string) (bool, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	close(j.held[id])
	return true, nil
}

func startRole(t testing.TB, b *bus.Bus, c *calls, name string, world int) *roles.Cluster {
	t.Helper()
	rt, err := roles.Open(t.Context(), roles.Config{Bus: b, Classes: []*actors.Class{c.class()}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, rt.Close(context.Background())) })
	cluster, err := rt.Create(t.Context(), roles.Spec{Name: name, Class: "judge", World: world, StopGrace: time.Second})
	require.NoError(t, err)
	return cluster
}

// startElsewhere starts the role "victims" in a process of its own, which kill kills.
func startElsewhere(t testing.TB, rt *roles.Runtime, url string) (victims *roles.Cluster, kill func()) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env, cmd.Stderr = append(os.Environ(), childEnv+"="+url), os.Stderr
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	kill = sync.OnceFunc(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()         // killed
		_ = stdin.Close()
	})
	t.Cleanup(kill)
	_, err = bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	victims, err = rt.Attach(testContext(t), "victims")
	require.NoError(t, err)
	return victims, kill
}
