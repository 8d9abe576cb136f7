package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/bus/bustest"
	"troupe/roles"
)

// An unknown role, node or reservation is an error that names it and what there is, with exit code 1.
func TestUnknownNames(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	u.up("--gpus", "sim:1x2", "--name", "box")
	u.runs(four)
	for words, says := range map[string]string{
		"logs nope":       `no role "nope" in namespace default, and no stored output of one; there is four`,
		"logs nope/1":     `no role "nope"`,
		"logs four/4":     "role four has no rank 4; its world is 4",
		"roles nope":      `no role "nope"`,
		"destroy nope":    `no role "nope"`,
		"call nope x":     `no role "nope"`,
		"drain nope":      `troupe: no node "nope"; there is box`,
		"cordon nope":     `node "nope" is unknown`,
		"uncordon nope/0": `node "nope" is unknown`,
		"release nope":    `no reservation "nope"; there is none`,
	} {
		require.Contains(t, u.fails(1, strings.Fields(words)...), says, words)
	}
	require.Empty(t, u.output("logs", "four"), "a role that has printed nothing is no mistake")
}

// Numbers agree with their nouns, the operator has a name without $USER, and durations in JSON are seconds.
func TestOutput(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	u.up("--gpus", "sim:1x2", "--name", "box")
	require.Equal(t, "1 node with 2 devices is there\n", u.output("wait", "--gpus", "2"))
	u.output("reserve", "--bundles", "1", "--devices", "1")
	require.Contains(t, u.output("status"), "1 reservation, no request waits\n")
	require.NotContains(t, u.output("cordon", "box"), "unknown@")
	require.Contains(t, u.output("rules", "--json"), `"grace_s":30}`)

	u.runs(roles.Spec{Name: "one", World: 1})
	for _, words := range [][]string{{"roles", "one", "--json"}, {"roles", "--json"}} {
		var out map[string]any
		require.NoError(t, json.Unmarshal([]byte(u.output(words...)), &out))
		require.NotContains(t, out, "busy")
		require.NotContains(t, out, "lease")
		if lease, ok := out["lease_s"]; ok {
			require.Less(t, lease, 1000.0)
		}
	}
}

// A word that is no URL is refused at once, and a password in a URL is not printed.
func TestJoinURL(t *testing.T) {
	u := newShell(t)
	require.Contains(t, u.fails(2, "join", "nonsense"), "nats://HOST:PORT")
	require.Contains(t, u.fails(2, "join", "http://me:s3cret@x:1"), "xxxxx@x:1")
	_, stderr, code := u.run("join", "nats://me:s3cret@127.0.0.1:1", "--wait", "10ms", "--gpus", "none")
	require.Equal(t, tryLater, code)
	require.NotContains(t, stderr, "s3cret")
	require.Contains(t, stderr, "127.0.0.1:1")
}

// Files without an end are refused.
func TestEndlessFiles(t *testing.T) {
	u := newShell(t)
	require.Contains(t, u.fails(2, "up", "--gpus", "/dev/zero"), "more than 4 MiB")
	require.Contains(t, u.fails(1, "join", "nats://127.0.0.1:1", "--token-file", "/dev/zero", "--gpus", "none"), "more than 65536 bytes")
	require.Contains(t, u.fails(2, "launch", "--rank", "0", "--world", "2", "--head", "127.0.0.1:1", "--token-file", "/dev/zero", "--", "true"), "more than 65536 bytes")
	require.Contains(t, u.with("TROUPE_TOKEN_FILE", "/dev/zero").fails(1, "roles", "--url", "nats://127.0.0.1:1"), "more than 65536 bytes")
}

// A NATS server without JetStream is named as such.
func TestNoJetStream(t *testing.T) {
	u := newShell(t)
	url := bustest.StartServer(t, bustest.Options{NoJetStream: true, Listen: true}).URL()
	for _, words := range [][]string{{"up", "--nats", url, "--gpus", "none"}, {"roles", "--url", url}, {"logs", "r", "--url", url}} {
		require.Contains(t, u.fails(1, words...), "has no JetStream", words)
	}
}
