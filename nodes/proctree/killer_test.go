package proctree_test

import (
	"bufio"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/nodes/proctree"
)

// start starts a process in a session of its own, whose only child outlives it and has left its parent. It returns the session and the
// child.
func start(t *testing.T, env ...string) (session, child int) {
	t.Helper()
	cmd := exec.Command("sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!")
	cmd.Env = append([]string{"PATH=/usr/bin:/bin"}, env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.NoError(t, cmd.Wait())
	child, err = strconv.Atoi(strings.TrimSpace(line))
	require.NoError(t, err)
	t.Cleanup(func() { _ = syscall.Kill(child, syscall.SIGKILL) }) // most have ended
	return cmd.Process.Pid, child
}

// hasEnded reports whether a process is gone, or a zombie that nobody has waited for yet.
func hasEnded(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err != nil || strings.Contains(string(stat), ") Z ")
}

func TestKillerKillsByMarkerAndBySession(t *testing.T) {
	k := proctree.NewKiller()
	t.Cleanup(k.Close)
	_, marked := start(t, proctree.MarkerEnv+"=here.one")
	session, unmarked := start(t)
	_, other := start(t, proctree.MarkerEnv+"=here.two")
	require.Eventually(t, func() bool { return proctree.MarkerOf(marked) == "here.one" }, 10*time.Second, time.Millisecond, "while it executes sleep it has none")
	require.Empty(t, proctree.MarkerOf(unmarked))

	require.Empty(t, k.Kill("here.one", session, ""), "survivors")
	require.True(t, hasEnded(marked), "found by its marker")
	require.True(t, hasEnded(unmarked), "found by its session")
	require.False(t, hasEnded(other), "a process of another worker")
}

// A process that executes another program has no environment for a moment, and is found nevertheless.
func TestKillerFindsProcessesThatExecute(t *testing.T) {
	k := proctree.NewKiller()
	t.Cleanup(k.Close)
	for range 50 {
		session, child := start(t, proctree.MarkerEnv+"=here.moment")
		require.Empty(t, k.Kill("here.moment", session+1<<22, ""), "survivors") // a session that nobody has
		require.True(t, hasEnded(child))
	}
}

// Many requests at once are served by few scans.
func TestKillerServesRequestsTogether(t *testing.T) {
	k := proctree.NewKiller()
	t.Cleanup(k.Close)
	var children []int
	var sessions []int
	for i := range 20 {
		session, child := start(t, proctree.MarkerEnv+"=many."+strconv.Itoa(i))
		children, sessions = append(children, child), append(sessions, session)
	}
	var group sync.WaitGroup
	for i := range sessions {
		group.Go(func() { k.Kill("many."+strconv.Itoa(i), sessions[i], "") })
	}
	group.Wait()
	for _, child := range children {
		require.True(t, hasEnded(child))
	}
}

func TestKillMarked(t *testing.T) {
	_, one := start(t, proctree.MarkerEnv+"=gone.one")
	_, two := start(t, proctree.MarkerEnv+"=gone.two")
	_, other := start(t, proctree.MarkerEnv+"=alive.one")
	require.Empty(t, proctree.KillMarked(func(marker string) bool { return strings.HasPrefix(marker, "gone.") }, 10*time.Second))
	require.True(t, hasEnded(one))
	require.True(t, hasEnded(two))
	require.False(t, hasEnded(other))
}
