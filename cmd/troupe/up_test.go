package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/cmd/troupe/cli"
	"troupe/nodes"
)

// Only the owner can read the secrets of a head, and a restarted head has the same secrets.
func TestUpKeepsItsSecrets(t *testing.T) {
	u := newShell(t)
	first, stop := u.up("--listen", "0.0.0.0:0")
	require.Len(t, first.Fingerprint, 64)
	require.True(t, strings.HasPrefix(first.URL, "tls://127.0.0.1:"), first.URL)
	require.Equal(t, u.stateFile("store"), first.Store)
	for _, path := range []string{first.TokenFile, first.Store + "/key.pem", first.Store + "/cert.pem", u.stateFile("head.json")} {
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.Zero(t, info.Mode().Perm()&0o077, "%s has mode %v", path, info.Mode())
	}
	require.Contains(t, u.output("roles"), "no roles", "its own user is served, by TLS")
	token, err := os.ReadFile(first.TokenFile)
	require.NoError(t, err)

	stop()
	require.NoFileExists(t, u.stateFile("head.json"))
	second, _ := u.up("--listen", "0.0.0.0:"+first.URL[strings.LastIndex(first.URL, ":")+1:])
	require.Equal(t, first.HeadFile, second.HeadFile)
	again, err := os.ReadFile(second.TokenFile)
	require.NoError(t, err)
	require.Equal(t, string(token), string(again))
}

func TestUpRefusesLeakedToken(t *testing.T) {
	u := newShell(t)
	store := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(store, "token"), []byte("secret\n"), 0o644))
	require.Contains(t, u.fails(1, "up", "--listen", "127.0.0.1:0", "--store", store), "chmod 600")
}

func TestConnectionsWithoutTokenAreRefused(t *testing.T) {
	u := newShell(t)
	head, _ := u.up()
	stderr := u.with("TROUPE_TOKEN", "wrong").fails(1, "roles")
	require.Contains(t, stderr, "TROUPE_TOKEN")
	stranger := newShell(t)
	require.Contains(t, stranger.fails(1, "roles", "--url", head.URL), "credentials")
	token, err := os.ReadFile(head.TokenFile)
	require.NoError(t, err)
	friend := stranger.with("TROUPE_URL", head.URL).with("TROUPE_TOKEN", strings.TrimSpace(string(token)))
	require.Contains(t, friend.output("roles"), "no roles")
	require.Contains(t, u.output("roles", "--url", strings.Replace(head.URL, "127.0.0.1", "localhost", 1)), "no roles", "the head is known by its address")
}

func TestUnknownCertificateIsRefused(t *testing.T) {
	u := newShell(t)
	head, _ := u.up("--listen", "0.0.0.0:0")
	stderr := newShell(t).fails(1, "roles", "--url", head.URL)
	require.Contains(t, stderr, "--fingerprint or TROUPE_FINGERPRINT")
	require.NotContains(t, stderr, "TROUPE_TOKEN", "what is missing is the fingerprint")
	require.Contains(t, u.with("TROUPE_FINGERPRINT", strings.Repeat("0", 64)).fails(1, "roles"), "fingerprint")
	require.Contains(t, u.with("TROUPE_FINGERPRINT", "abc").fails(1, "roles"), "abc")
}

// A second head on the same port or store fails and does not change the first.
func TestSecondUp(t *testing.T) {
	u := newShell(t)
	head, _ := u.up()
	files := func() (all []string) {
		for _, path := range []string{u.stateFile("head.json"), head.TokenFile} {
			data, err := os.ReadFile(path)
			require.NoError(t, err)
			all = append(all, string(data))
		}
		return all
	}
	before := files()
	port := head.URL[strings.LastIndex(head.URL, ":")+1:]
	other := filepath.Join(t.TempDir(), "other")
	eager := u.with("TROUPE_TOKEN", "another")
	for _, words := range [][]string{
		{"up", "--listen", "127.0.0.1:" + port},
		{"up", "--listen", "127.0.0.1:" + port, "--store", other},
	} {
		stderr := eager.fails(1, words...)
		require.Contains(t, stderr, port)
		require.Contains(t, stderr, "--listen")
		require.Contains(t, stderr, "your own head")
	}
	require.NoDirExists(t, other)
	stderr := eager.fails(1, "up", "--listen", "127.0.0.1:0")
	require.Contains(t, stderr, head.Store)
	require.Contains(t, stderr, "--store")
	require.Equal(t, before, files())
	require.Contains(t, u.output("roles"), "no roles")
}

func TestPortTakenByAnotherProgram(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	stderr := newShell(t).fails(1, "up", "--listen", l.Addr().String())
	require.Contains(t, stderr, l.Addr().String())
	require.NotContains(t, stderr, "your own head")
}

// Commands find the latest head; when it ends, they find the head before it if that still runs.
func TestAnnounce(t *testing.T) {
	u := newShell(t)
	elder := cli.HeadFile{HeadFile: nodes.HeadFile{URL: "nats://127.0.0.1:1", PID: os.Getppid()}}
	younger := cli.HeadFile{HeadFile: nodes.HeadFile{URL: "nats://127.0.0.1:2", PID: os.Getpid()}}
	found := func() string {
		h, err := cli.ReadHead(u.getenv)
		if err != nil {
			return ""
		}
		return h.URL
	}
	withdrawElder, err := elder.Announce(u.getenv)
	require.NoError(t, err)
	withdrawYounger, err := younger.Announce(u.getenv)
	require.NoError(t, err)
	require.Equal(t, younger.URL, found())
	withdrawElder()
	require.Equal(t, younger.URL, found(), "a head that goes takes only its own file")
	withdrawYounger()
	require.Equal(t, elder.URL, found())
	withdrawElder()
	require.Empty(t, found())
}

func TestHostPort(t *testing.T) {
	for _, url := range []string{"nats://127.0.0.1:7422", "tls://localhost:7422/", "localhost:7422", "nats://token@[::1]:7422"} {
		require.Equal(t, "127.0.0.1:7422", nodes.HostPort(url), url)
	}
	require.Equal(t, "[fe80::1]:1", nodes.HostPort("nats://[fe80::1]:1"))
}

// process runs the program as a process; without arguments, the environment selects what the test binary runs.
func (u *shell) process(words ...string) (*exec.Cmd, *screen) {
	u.t.Helper()
	out := &screen{}
	cmd := exec.Command(cmp.Or(u.program, os.Args[0]))
	cmd.Dir, cmd.Env = u.dir, os.Environ()
	if len(words) > 0 {
		cmd.Env = append(cmd.Env, argsEnv+"="+strings.Join(words, "\n"))
	}
	for k, v := range u.env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	cmd.Stdout, cmd.Stderr = out, u.t.Output()
	bustest.Tie(cmd, syscall.SIGTERM)
	require.NoError(u.t, cmd.Start())
	u.t.Cleanup(func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Signal(syscall.SIGTERM) // not SIGKILL, which would leave its agent
			kill := time.AfterFunc(30*time.Second, func() { _ = cmd.Process.Kill() })
			_ = cmd.Wait()
			kill.Stop()
		}
	})
	return cmd, out
}

// The stale file of a killed head makes commands fail with an error that says so, and the next head replaces it.
func TestKilledHead(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	store := t.TempDir()
	cmd, out := u.process("up", "--json", "--listen", "127.0.0.1:0", "--store", store)
	var head readyHead
	require.NoError(t, json.Unmarshal([]byte(out.line(t, out.String)), &head))
	require.Contains(t, u.output("roles"), "no roles")

	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	stderr := u.fails(1, "roles")
	for _, word := range []string{head.URL, "does not answer", "is gone", "troupe up"} {
		require.Contains(t, stderr, word)
	}
	next, _ := u.up("--listen", strings.TrimPrefix(head.URL, "nats://"), "--store", store)
	require.Equal(t, head.URL, next.URL)
	require.Contains(t, u.output("roles"), "no roles")
}

// The errors of a hanging head and of an ended head differ.
func TestSilentHead(t *testing.T) {
	h := cli.HeadFile{HeadFile: nodes.HeadFile{URL: "nats://127.0.0.1:1", PID: os.Getpid()}}
	err := h.Silent(errors.New("i/o timeout"))
	require.ErrorIs(t, err, bus.ErrUnavailable)
	require.ErrorContains(t, err, "may still be there: i/o timeout")
	h.PID = 1 << 30
	require.ErrorContains(t, h.Silent(err), "is gone")
}

// The first signal ends a head in order, with exit code 0.
func TestSignalEndsHead(t *testing.T) {
	u := newShell(t)
	cmd, out := u.process("up", "--listen", "127.0.0.1:0")
	require.Contains(t, out.line(t, out.String), "ready at nats://127.0.0.1:")
	require.FileExists(t, u.stateFile("head.json"))
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	start := time.Now()
	require.NoError(t, cmd.Wait(), "exit code 0")
	require.Less(t, time.Since(start), time.Minute)
	require.Contains(t, out.String(), "closing")
	require.NoFileExists(t, u.stateFile("head.json"))
}

// The head's server is usable by any NATS client with the token.
func TestHeadIsNATS(t *testing.T) {
	u := newShell(t)
	head, _ := u.up()
	b, err := bus.Open(t.Context(), head.access())
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	_, err = b.JetStream().AccountInfo(context.Background())
	require.NoError(t, err)
}
