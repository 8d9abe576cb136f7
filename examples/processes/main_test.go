package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus/bustest"
)

func TestMain(m *testing.M) { bustest.Main(m) }

// TestProgram runs the commands of the package comment: a head with simulated devices, then the program.
func TestProgram(t *testing.T) {
	bin, state := t.TempDir(), t.TempDir()
	out, err := exec.Command("go", "build", "-ldflags=-s -w", "-o", bin, "troupe/cmd/troupe", "troupe/examples/processes").CombinedOutput()
	require.NoError(t, err, "%s", out)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	program := func(name string, words ...string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, filepath.Join(bin, name), words...)
		cmd.Env = append(os.Environ(), "XDG_STATE_HOME="+state)
		cmd.Stderr = t.Output()
		bustest.Tie(cmd, syscall.SIGTERM)
		return cmd
	}

	alone, err := program("processes").Output()
	require.Error(t, err, "without a head")
	require.Empty(t, alone)

	head := program("troupe", "up", "--listen", "127.0.0.1:0", "--gpus", "sim:2x4", "--name", "box", "--with-stdin")
	stdin, err := head.StdinPipe()
	require.NoError(t, err)
	stdout, err := head.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, head.Start())
	line := make([]byte, 256)
	n, err := stdout.Read(line)
	require.NoError(t, err)
	require.Contains(t, string(line[:n]), "the head is ready")

	var text bytes.Buffer
	cmd := program("processes")
	cmd.Stdout = &text
	require.NoError(t, cmd.Run(), "%s", &text)
	for _, want := range []string{
		"rank 0: trainer-0-G0 on node box-0\n", "rank 3: trainer-3-G3 on node box-0\n",
		"rank 0 of 4 on device 0: 6.0\n", "rank 2 of 4 on device 2: 9.0\n", // three rows to one replica, two to the other
		"step 1 on 3 rows", "rank 1 has been replaced and answers",
	} {
		require.Contains(t, text.String(), want)
	}
	roles, err := program("troupe", "roles").Output()
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(string(roles), "no roles"), "the program has ended its roles: %s", roles)

	require.NoError(t, stdin.Close())
	_, err = io.Copy(io.Discard, stdout)
	require.NoError(t, err)
	require.NoError(t, head.Wait(), "exit code 0")
}
