package text

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestJoin(t *testing.T) {
	require.Equal(t, "", Join(", ", nil))
	eight := strings.Split("a b c d e f g h", " ")
	require.Equal(t, "a, b, c, d, e, f, g, h", Join(", ", eight))
	require.Equal(t, "a, b, c, d, e, f, g, h, and 2 more", Join(", ", append(eight, "i", "j")))
}

func TestTruncate(t *testing.T) {
	require.Equal(t, "äöü", Truncate("äöü", 6))
	require.Equal(t, "äö…", Truncate("äöü", 5), "half a character is left out")
	require.Equal(t, "…", Truncate("äöü", 1))
	require.Len(t, Clip(strings.Repeat("x", 1000)), ClipLimit+len("…"))
}
