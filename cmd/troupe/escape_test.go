package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/nodes"
)

// Control characters that workers print do not reach the terminal, except with --raw.
func TestControlCharacters(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	head, _ := u.up("--gpus", "none", "--name", "box")
	script(t, u.on(head), "box", 0, `printf '\033]52;c;ZXZpbA==\a\033]0;title\a\033[2Jtext\302\233\n'; exit 3`)
	var out string
	require.Eventually(t, func() bool { out, _, _ = u.run("logs", "role"); return out != "" }, 2*time.Minute, 20*time.Millisecond)
	require.Contains(t, out, `\x1b]52;c;ZXZpbA==\x07\x1b]0;title\x07\x1b[2Jtext\u009b`)
	require.Contains(t, u.output("logs", "role", "--raw"), "\x1b]52;c;ZXZpbA==\a")
	var line nodes.Line
	text := u.output("logs", "role", "--json")
	require.False(t, strings.ContainsFunc(text, func(r rune) bool { return r < ' ' && r != '\n' || r >= 0x7f && r < 0xa0 }), "%q", text)
	require.NoError(t, json.Unmarshal([]byte(text), &line))
	require.Contains(t, line.Text, "\x1b]52;", "the value is unchanged")

	u.output("cordon", "box", "--why", "a\nb\x1b[2Jc\x1b]0;x\a")
	for _, words := range [][]string{{"status"}, {"gpus"}, {"events"}} {
		stdout, stderr, _ := u.run(words...)
		require.NotContains(t, stdout+stderr, "\x1b", words)
	}
	_, stderr, code := u.run("roles", "\x1b[2J")
	require.Equal(t, 2, code)
	require.NotContains(t, stderr, "\x1b")
}
