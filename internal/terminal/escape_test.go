package terminal_test

import (
	"encoding/json"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"troupe/internal/terminal"
)

func TestEscape(t *testing.T) {
	for _, test := range []struct{ text, want string }{
		{"", ""},
		{"plain text, a\ttab, größe, 日本語, 🙂, C:\\x", "plain text, a\ttab, größe, 日本語, 🙂, C:\\x"},
		{"\x1b]52;c;ZXZpbA==\a", `\x1b]52;c;ZXZpbA==\x07`},
		{"\x1b]0;title\x1b\\", `\x1b]0;title\x1b\`},
		{"a\x1b[2J\x1b[Hb", `a\x1b[2J\x1b[Hb`},
		{"\u009b31m", `\u009b31m`},
		{"bad \xff\xc3", `bad \xff\xc3`},
		{"one\r\ntwo", `one\r\ntwo`},
		{"del\x7f nul\x00", `del\x7f nul\x00`},
		{"a\u202eb\u2066c", `a\u202eb\u2066c`},
	} {
		require.Equal(t, test.want, terminal.Line(test.text))
	}
	require.Equal(t, "one\\r\ntwo\\x1b", terminal.Text("one\r\ntwo\x1b"))
}

// The JSON value is the same after the escape.
func TestJSON(t *testing.T) {
	value := "\x1b[2J \u009b del\x7f \u202e größe 日本"
	data, err := json.Marshal(value)
	require.NoError(t, err)
	var back string
	require.NoError(t, json.Unmarshal(terminal.JSON(data), &back))
	require.Equal(t, value, back)
	require.Equal(t, string(terminal.JSON(data)), terminal.Text(string(terminal.JSON(data))))
	require.Equal(t, `{"a":"ä"}`, string(terminal.JSON([]byte(`{"a":"ä"}`))))
}

// No text keeps a control character.
func FuzzLine(f *testing.F) {
	f.Add("\x1b]0;x\a\u009b\xff")
	f.Fuzz(func(t *testing.T, text string) {
		out := terminal.Line(text)
		require.True(t, utf8.ValidString(out))
		require.Equal(t, out, terminal.Line(out))
		for _, r := range out {
			require.True(t, r == '\t' || r >= 0x20 && (r < 0x7f || r > 0x9f), "%q", out)
		}
	})
}
