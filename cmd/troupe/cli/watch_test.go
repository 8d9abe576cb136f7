package cli

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCut(t *testing.T) {
	require.Equal(t, "abc\nde\n", cut("abc\nde\n", 0, 0))
	require.Equal(t, "ab…\näöü\n", cut("abcd\näöü\n", 3, 0))
	require.Equal(t, "1\n2\n… 3 more lines\n", cut("1\n2\n3\n4\n5\n", 80, 4))
	require.Equal(t, "1\n2\n3\n", cut("1\n2\n3\n", 80, 4))
}

// A live view is drawn over its last frame on a terminal, and below it elsewhere.
func TestLive(t *testing.T) {
	variables := map[string]string{}
	c := &CLI{Out: &bytes.Buffer{}, Env: func(name string) string { return variables[name] }}
	require.Equal(t, "a\nb\n", c.live("a\nb\n", false))
	require.Equal(t, "\na\nb\n", c.live("a\nb\n", true))
	variables["COLUMNS"] = "80"
	require.Equal(t, "\x1b[Ha\x1b[K\nb\x1b[K\n\x1b[J", c.live("a\nb\n", true))
	c.JSON = true
	require.Equal(t, "{}\n", c.live("{}\n", true))
}
