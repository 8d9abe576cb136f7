package main

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"troupe/cmd/troupe/cli"
)

// A mistake on the command line ends with exit code 2 and one line that names it. Flags are checked before a connection is
// opened: there is no head here.
func TestMistakes(t *testing.T) {
	u := newShell(t)
	for _, test := range []struct {
		words []string
		names string
	}{
		{[]string{"nosuchcommand"}, "nosuchcommand"},
		{[]string{"rols"}, "roles"},
		{[]string{"bench", "nosuchbench"}, "nosuchbench"},
		{[]string{"completion", "tcsh"}, "tcsh"},
		{[]string{"--nosuchflag"}, "nosuchflag"},
		{[]string{"roles", "all", "more"}, "accepts at most 1 arg"},
		{[]string{"roles", "a.b"}, "a.b"},
		{[]string{"destroy", "a b"}, "a b"},
		{[]string{"bench", "faults", "--kills", "0"}, "--kills 0"},
		{[]string{"roles", "--url", "http://x:1"}, "http://x:1"},
		{[]string{"roles", "--url", "nats://"}, "nats://HOST:PORT"},
		{[]string{"roles", "--namespace", "a.b"}, "a.b"},
		{[]string{"call"}, "2"},
		{[]string{"call", "r"}, "2"},
		{[]string{"call", "bad role*", "step"}, "bad role*"},
		{[]string{"call", "reply", "step"}, "reply"},
		{[]string{"call", "r", ""}, "method"},
		{[]string{"call", "r", "m", "--mode", "SIDEWAYS"}, "SIDEWAYS"},
		{[]string{"call", "r", "m", "--timeout", "soon"}, "soon"},
		{[]string{"call", "r", "m", "--timeout", "-1s"}, "-1s"},
		{[]string{"call", "r", "m", "--rank", "first"}, "first"},
		{[]string{"call", "r", "m", "--rank", "-1"}, "-1"},
		{[]string{"call", "r", "m", "--rank", "0", "--mode", "ONE_TO_ALL"}, "--mode"},
		{[]string{"call", "r", "m", "--args", "{not json"}, "--args"},
		{[]string{"call", "r", "m", "--args", "[1] [2]"}, "more than one"},
		{[]string{"up", "--listen", "nowhere"}, "nowhere"},
		{[]string{"up", "--listen", "127.0.0.1:http"}, "http"},
		{[]string{"up", "--listen", "127.0.0.1:70000"}, "70000"},
		{[]string{"up", "--gpus", "sim:x"}, "sim:x"},
		{[]string{"up", "--name", "a b"}, "a b"},
		{[]string{"demo", "--steps", "0"}, "--steps 0"},
		{[]string{"bench", "fanout", "--workers", "0"}, "--workers 0"},
		{[]string{"bench", "fanout", "--workers", "few"}, "few"},
		{[]string{"bench", "fanout", "--bytes", "-1"}, "--bytes -1"},
		{[]string{"bench", "fanout", "--each", "0s"}, "--each 0s"},
	} {
		t.Run(strings.Join(test.words, " "), func(t *testing.T) {
			require.Contains(t, u.fails(2, test.words...), test.names)
		})
	}
	require.NoDirExists(t, u.stateFile(""), "nothing was written")
}

// Without a head, commands end with exit code 1 and say what to do.
func TestNoHead(t *testing.T) {
	u := newShell(t)
	stderr := u.fails(1, "roles")
	require.Contains(t, stderr, "troupe up")
	require.Contains(t, u.fails(1, "roles", "--url", "nats://127.0.0.1:1"), "127.0.0.1:1")
	require.Contains(t, u.with("TROUPE_URL", "127.0.0.1:1").fails(1, "call", "r", "m"), "127.0.0.1:1")
	homeless := &shell{t: t, env: map[string]string{}}
	require.Contains(t, homeless.fails(1, "roles"), "HOME")
	require.Contains(t, u.fails(1, "up", "--listen", "192.0.2.1:7422"), "192.0.2.1:7422")
}

// Every command has a description and an example.
func TestHelp(t *testing.T) {
	u := newShell(t)
	var visit func(cmd *cobra.Command, path []string)
	visit = func(cmd *cobra.Command, path []string) {
		for _, sub := range cmd.Commands() {
			if sub.Name() != "help" && sub.Name() != "completion" && !sub.Hidden {
				visit(sub, append(path[:len(path):len(path)], sub.Name()))
			}
		}
		help := u.output(append(path, "--help")...)
		require.Contains(t, help, "Examples:", "troupe %s", strings.Join(path, " "))
		require.Contains(t, help, "Usage:")
	}
	visit(newRoot(&cli.CLI{Env: u.getenv}), nil)
	require.Contains(t, u.output(), "Available Commands:")
	require.Contains(t, u.output("bench"), "fanout")
	require.Contains(t, u.output("completion", "bash"), "__start_troupe")
}
