package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/nodes"
)

// descriptorsEnv bounds the file descriptors of the program.
const descriptorsEnv = "TROUPE_TEST_DESCRIPTORS"

func limitDescriptors(text string) {
	n, err := strconv.ParseUint(text, 10, 64)
	if err == nil {
		err = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: n, Max: n})
	}
	if text != "" && err != nil {
		panic(err)
	}
}

// Hundreds of connections that say nothing, to the server and to the page, leave a head with 256 descriptors able to work: it serves
// commands, pages and workers, and it ends the connections.
func TestStrangersLeaveDescriptors(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	store := t.TempDir()
	words := []string{"up", "--json", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--store", store, "--gpus", "sim:1x2", "--name", "box"}
	u.env[descriptorsEnv] = "256"
	up, out := u.process(words...)
	u.killAfter(store)
	head := u.ready(out)
	require.NotEmpty(t, head.Metrics)

	var strangers []net.Conn
	defer func() {
		for _, c := range strangers {
			_ = c.Close()
		}
	}()
	for range 400 {
		for _, at := range []string{nodes.HostPort(head.URL), head.Metrics} {
			if c, err := net.DialTimeout("tcp", at, 10*time.Second); err == nil {
				strangers = append(strangers, c)
			}
		}
	}
	require.Greater(t, len(strangers), 500)
	require.Eventually(t, func() bool { // the server accepts a connection over its bound before it ends it
		open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", up.Process.Pid))
		require.NoError(t, err)
		return len(open) < 256-32
	}, 2*time.Minute, 10*time.Millisecond, "descriptors are left")
	require.Contains(t, scrape(t, head.Metrics), "troupe_up 1")
	resp, err := http.Get("http://" + head.Metrics + "/healthz")
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	deadline := time.Now().Add(2 * time.Minute)
	for {
		_, stderr, code := u.run("status")
		if code == 0 {
			break
		}
		require.True(t, time.Now().Before(deadline), stderr) // until the strangers have failed to authenticate
	}
	script(t, u.on(head), "box", 0, "echo works")
	require.Eventually(t, func() bool { text, _, _ := u.run("logs", "role"); return strings.Contains(text, "works") }, 2*time.Minute, 20*time.Millisecond)
	for _, c := range strangers {
		require.NoError(t, c.SetReadDeadline(time.Now().Add(2*time.Minute)))
		_, err := io.Copy(io.Discard, c)
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "a connection that says nothing ends")
	}
}
