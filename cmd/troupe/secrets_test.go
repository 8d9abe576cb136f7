package main

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus/bustest"
	"troupe/roles"
)

// A password in the URL of an external NATS server reaches no argument, environment, assignment or log of an agent or a worker, and no
// output of a command: it is in token files that only their owner can read.
func TestPasswordInURL(t *testing.T) {
	t.Parallel()
	const password = "hunter2-is-secret"
	srv := bustest.StartServer(t, bustest.Options{Listen: true, User: "me", Password: password})
	host := strings.TrimPrefix(srv.URL(), "nats://")
	url := "nats://me:" + password + "@" + host
	u, other := newShell(t), newShell(t)
	store := t.TempDir()
	_, out := u.process("up", "--json", "--nats", url, "--store", store, "--gpus", "sim:1x2", "--name", "near", "--log-level", "debug")
	u.killAfter(store)
	head := u.ready(out)
	require.Equal(t, srv.URL(), head.URL)
	require.Equal(t, filepath.Join(store, "token"), head.TokenFile)
	_, said := other.process("join", url, "--gpus", "sim:1x2", "--name", "far", "--json", "--log-level", "debug")
	require.Contains(t, said.line(t, said.String), `"nodes":["far"]`)
	_, _, code := u.run("wait", "--gpus", "4", "--timeout", "25s")
	require.Zero(t, code)

	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	both, err := driveOn(t, head, "run").Create(ctx, onHosts("both", "near", "far"))
	require.NoError(t, err)
	pids, err := roles.CallEach[int](ctx, both, "pid")
	require.NoError(t, err)
	require.Len(t, pids, 2)
	for _, pid := range append(pids, agentOf(t, store)) {
		for _, file := range []string{"cmdline", "environ"} {
			data, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
			require.NoError(t, err)
			require.NotContains(t, string(data), password, "%s of process %d", file, pid)
		}
	}
	held := 0
	for _, dir := range []string{store, u.env["XDG_STATE_HOME"], other.env["XDG_STATE_HOME"]} {
		require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return nil // removed meanwhile
			}
			data, err := os.ReadFile(path)
			if err != nil || !bytes.Contains(data, []byte(password)) {
				return nil
			}
			info, err := d.Info()
			require.NoError(t, err)
			require.Equal(t, "token", d.Name(), path)
			require.Zero(t, info.Mode().Perm()&0o077, path)
			held++
			return nil
		}))
	}
	require.Equal(t, 2, held, "the token files of the head and of the agent that joined")
	for _, words := range [][]string{{"status", "--json"}, {"nodes"}, {"doctor"}, {"events"}, {"status", "--url", url, "--json"}} {
		stdout, stderr, _ := u.run(words...)
		require.NotContains(t, stdout+stderr, password, words)
	}
	require.NotContains(t, out.String()+said.String(), password)
	require.NoError(t, both.Destroy(ctx))

	bad := strings.Replace(url, "hunter2", "hunter%zz", 1)
	for _, words := range [][]string{{"up", "--nats", bad, "--store", t.TempDir()}, {"join", bad}, {"status", "--url", bad}, {"join", strings.Replace(url, "-is-", ",is-", 1)}} {
		require.NotContains(t, u.fails(2, words...), "hunter")
	}
}
