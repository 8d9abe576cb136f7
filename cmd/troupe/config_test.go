package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/cmd/troupe/cli"
)

func writeConfig(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "troupe.yaml")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// Mistakes in a configuration file are refused by the check and by every command, with file, line and the nearest name.
func TestConfigMistakes(t *testing.T) {
	u := newShell(t)
	for text, says := range map[string]string{
		"up:\n  lisen: 127.0.0.1:0\n":        ":2: up.lisen is unknown; did you mean listen?",
		"ups: {}\n":                          ":1: ups is unknown; did you mean up?",
		"up:\n  quux-quux-quux: 1\n":         "up.quux-quux-quux is unknown; there are audit-kept, bundle, ",
		"up:\n  grace: soon\n":               ":2: up.grace: ",
		"up:\n  grace: 1m\n  grace: 2m\n":    "grace",
		"up: yes\n":                          "up is a command",
		"up:\n  listen:\n":                   "up.listen has no value",
		"up:\n  listen: [a, b]\n":            "up.listen: give one value",
		"up:\n  replicas: many\n":            "up.replicas: ",
		"- up\n":                             "NAME: VALUE",
		"url: a\n---\nurl: b\n":              "more than one document",
		"up: {\n":                            "troupe.yaml",
		"bench:\n  fanout:\n    worker: 1\n": "did you mean workers?",
		"describe:\n  role:\n    evry: 1s\n": "did you mean every?",
		"config:\n  check:\n    jsn: true\n": "did you mean json?",
	} {
		path := writeConfig(t, text)
		require.Contains(t, u.fails(2, "config", "check", path), says, text)
		require.Contains(t, u.with("TROUPE_CONFIG", path).fails(2, "roles"), says, text)
	}
	require.Contains(t, u.fails(2, "roles", "--config", "/no/such/file.yaml"), "/no/such/file.yaml")
	require.Contains(t, u.fails(1, "config", "check"), "there is no configuration file")
	require.Contains(t, u.fails(2, "config", "check", "/dev/zero"), "more than")
}

// Settings have the names of flags. The command line goes before variables, variables before the file.
func TestConfig(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	store := t.TempDir()
	path := writeConfig(t, strings.Join([]string{
		"namespace: from-file", "up:", "  store: " + store, "  gpus: sim:1x3", "  name: filed", "  labels: {rack: r7, kind: test}", "  grace: 90s", "status:", "  json: true",
	}, "\n"))
	require.Equal(t, path+" is valid: 7 settings\n", u.output("config", "check", path))
	require.JSONEq(t, `{"path":"`+path+`","settings":7}`, u.output("config", "check", path, "--json"))
	u = u.with("TROUPE_CONFIG", path)
	head, _ := u.up()
	require.Equal(t, store, head.Store)
	require.Contains(t, u.output("gpus"), "filed")
	require.Contains(t, u.output("status"), `"labels":{"kind":"test","rack":"r7"}`)
	require.Contains(t, u.output("roles"), "no roles in namespace from-file")
	require.Contains(t, u.with("TROUPE_NAMESPACE", "from-variable").output("roles"), "namespace from-variable")
	require.Contains(t, u.with("TROUPE_NAMESPACE", "from-variable").output("roles", "-n", "from-flag"), "namespace from-flag")
	require.NotContains(t, u.output("status", "--json=false"), `"labels"`)
}

// The user's file is found without being named.
func TestConfigOfTheUser(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "troupe"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "troupe", cli.ConfigName), []byte("url: nats://127.0.0.1:2\n"), 0o600))
	u := newShell(t).with("XDG_CONFIG_HOME", dir)
	require.Contains(t, u.fails(1, "roles"), "127.0.0.1:2")
	require.Contains(t, u.fails(1, "roles", "--url", "nats://127.0.0.1:3"), "127.0.0.1:3")
}

// Head and agent log as JSON, from the level that is asked for.
func TestLogFormat(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	require.Contains(t, u.fails(2, "up", "--log-level", "loud"), "debug, info, warn or error")
	require.Contains(t, u.fails(2, "join", "nats://127.0.0.1:1", "--log-format", "xml"), "text or json")
	_, stderr, code := u.run("join", "nats://127.0.0.1:1", "--wait", "10ms", "--gpus", "none", "--log-format", "json")
	require.Equal(t, tryLater, code)
	lines := strings.Split(strings.TrimSpace(stderr), "\n")
	require.Len(t, lines, 2)
	require.Contains(t, lines[0], `"level":"WARN","msg":"no head yet; waiting: `)
	require.Contains(t, lines[1], `"level":"ERROR","msg":"connect to nats://127.0.0.1:1`)

	head, _ := u.up("--gpus", "none", "--log-level", "info", "--log-format", "json")
	log := filepath.Join(head.Store, "agent", "agent.log")
	require.Eventually(t, func() bool { data, _ := os.ReadFile(log); return strings.Contains(string(data), `"level":"INFO"`) }, 2*time.Minute, 10*time.Millisecond, "the agent of the head has its settings")
}
