package main

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus/bustest"
	"troupe/bus/wire"
	"troupe/nodes/folders"
	"troupe/pipeline"
	"troupe/roles"
)

// A head with its agent, an agent that joins, and workers of both, on a NATS server whose users have credentials files. The
// paths are relative to the folder of the commands.
func TestExternalNATSWithCredentials(t *testing.T) {
	op := bustest.StartOperator(t, bustest.Options{Listen: true})
	file, second := op.Creds(bustest.Grant{}), op.Creds(bustest.Grant{})
	u, other := newShell(t), newShell(t).with("TROUPE_CREDS", filepath.Base(second))
	u.dir, other.dir = filepath.Dir(file), filepath.Dir(second)
	store := t.TempDir()

	up, out := u.process("up", "--json", "--nats", op.URL(), "--creds", filepath.Base(file), "--store", store, "--gpus", "sim:1x2", "--name", "near")
	u.killAfter(store)
	head := u.ready(out)
	require.Equal(t, file, head.CredsFile)
	joined, said := other.process("join", op.URL(), "--gpus", "sim:1x2", "--name", "far", "--json")
	require.Contains(t, said.line(t, said.String), `"nodes":["far"]`)
	there, _, code := u.run("wait", "--gpus", "4") // it may print that it waits
	require.Zero(t, code)
	require.Equal(t, "2 nodes with 4 devices are there\n", there)

	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	rt := driveOn(t, head, "run")
	both, err := rt.Create(ctx, onHosts("both", "near", "far"))
	require.NoError(t, err)
	pids, err := roles.CallEach[int](ctx, both, "pid")
	require.NoError(t, err)
	require.Len(t, pids, 2)
	require.Contains(t, u.with("TROUPE_NAMESPACE", "run").output("roles"), "both")
	require.Contains(t, other.with("TROUPE_CREDS", second).output("roles", "--url", op.URL(), "-n", "run"), "both")

	for _, pid := range append(pids, up.Process.Pid, joined.Process.Pid, agentOf(t, store)) {
		noSecret(t, file, fmt.Sprintf("/proc/%d/cmdline", pid), fmt.Sprintf("/proc/%d/environ", pid))
		noSecret(t, second, fmt.Sprintf("/proc/%d/cmdline", pid), fmt.Sprintf("/proc/%d/environ", pid))
	}
	require.NoError(t, both.Destroy(ctx))
	require.NoError(t, joined.Process.Signal(syscall.SIGTERM))
	require.NoError(t, joined.Wait(), "exit code 0")
	require.NoError(t, up.Process.Signal(syscall.SIGTERM))
	require.NoError(t, up.Wait(), "exit code 0")
	noSecret(t, file, filesIn(t, store)...)
	noSecret(t, second, filesIn(t, other.env["XDG_STATE_HOME"])...)
}

// least are the permissions that docs/nodes.md asks for.
var least = bustest.Grant{
	Publish:   []string{"troupe.>", "$JS.API.>", "$JS.ACK.>", "$KV.>", "$O.>", "_INBOX.>"},
	Subscribe: []string{"troupe.>", "_INBOX.>"},
}

// The permissions of docs/nodes.md suffice for roles in processes, shipped folders, pipelines and the operator's commands.
func TestLeastPermissions(t *testing.T) {
	docs, err := os.ReadFile("../../docs/nodes.md")
	require.NoError(t, err)
	for _, subject := range slices.Concat(least.Publish, least.Subscribe) {
		require.Contains(t, string(docs), "`"+subject+"`")
	}
	op := bustest.StartOperator(t, bustest.Options{Listen: true})
	file := op.Creds(least)
	u := newShell(t).with("TROUPE_CREDS", file)
	store := t.TempDir()
	_, out := u.process("up", "--json", "--nats", op.URL(), "--store", store, "--gpus", "sim:1x2", "--name", "near")
	u.killAfter(store)
	head := u.ready(out)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	rt := driveOn(t, head, "run")
	c, err := rt.Create(ctx, onHosts("one", "near"))
	require.NoError(t, err)
	_, err = roles.CallEach[int](ctx, c, "pid")
	require.NoError(t, err)
	folder := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(folder, "code.py"), []byte("x = 1"), 0o600))
	_, err = folders.Ship(ctx, rt.Bus(), folder)
	require.NoError(t, err)

	p, err := pipeline.Open(ctx, pipeline.Config{Bus: rt.Bus(), Namespace: "run"}, pipeline.Spec{
		Name:    "p",
		Streams: []pipeline.StreamSpec{{Name: "in", Bytes: 16 << 20}, {Name: "out", Bytes: 16 << 20, Sink: true}},
		Stages: []pipeline.StageSpec{{Name: "work", In: []string{"in"}, Out: []string{"out"}, Func: func(_ context.Context, in []pipeline.Item) ([]pipeline.Out, error) {
			return []pipeline.Out{{To: "out", Item: in[0]}}, nil
		}}},
	})
	require.NoError(t, err)
	large := pipeline.Item{Body: append(wire.Raw{0xc6, 0, 0x20, 0, 0}, make([]byte, 2<<20)...)} // is stored in its own stream
	require.NoError(t, p.Put(ctx, "in", large, pipeline.Item{Body: wire.Raw{1}}))
	got, err := p.Take(ctx, "out", 2)
	require.NoError(t, err)
	require.NoError(t, got.Ack(ctx))
	require.Contains(t, u.with("TROUPE_NAMESPACE", "run").output("pipeline", "top", "--once"), "work")
	require.NoError(t, p.Close(ctx))
	for _, words := range [][]string{{"status"}, {"events"}, {"logs", "one"}, {"gpus"}, {"reservations"}, {"explain", "--bundles", "1", "--devices", "1"}} {
		u.with("TROUPE_NAMESPACE", "run").output(words...)
	}
	require.NoError(t, c.Destroy(ctx))
}

// noSecret fails if one of the files contains the seed of a credentials file.
func noSecret(t *testing.T, creds string, files ...string) {
	t.Helper()
	text, err := os.ReadFile(creds)
	require.NoError(t, err)
	seed := regexp.MustCompile(`(?m)^SU[A-Z2-7]{50,}$`).Find(text)
	require.NotEmpty(t, seed)
	for _, file := range files {
		data, err := os.ReadFile(file)
		require.NoError(t, err)
		require.NotContains(t, string(data), string(seed), file)
	}
}

func filesIn(t *testing.T, dir string) (files []string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			files = append(files, path)
		}
		return err
	}))
	require.NotEmpty(t, files)
	return files
}

// A refused connection fails at once, with the reason and the remedy.
func TestExternalNATSRefuses(t *testing.T) {
	op := bustest.StartOperator(t, bustest.Options{Listen: true})
	expired := op.Creds(bustest.Grant{Expires: time.Now().Add(-time.Minute)})
	strange := bustest.StartOperator(t, bustest.Options{}).Creds(bustest.Grant{})
	for _, test := range []struct {
		words []string
		none  string // the remedy in the error
	}{
		{[]string{"up", "--nats", op.URL(), "--no-agent"}, "--creds FILE"},
		{[]string{"join", op.URL(), "--gpus", "none"}, "--creds FILE"},
		{[]string{"roles", "--url", op.URL()}, "TROUPE_CREDS"},
	} {
		t.Run(test.words[0], func(t *testing.T) {
			u := newShell(t)
			require.Contains(t, u.fails(1, test.words...), test.none)
			for file, why := range map[string]string{expired: "expired", strange: "does not know the user", expired + "x": "no such file"} {
				said := u.with("TROUPE_CREDS", file).fails(1, test.words...)
				require.Contains(t, said, file)
				require.Contains(t, said, why)
				require.False(t, strings.Contains(said, "waited"))
			}
		})
	}
}
