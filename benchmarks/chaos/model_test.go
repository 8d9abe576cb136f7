package chaos

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The model itself: what was acknowledged is the only value, what was not is chosen by the first look and stays.
func TestModel(t *testing.T) {
	m := NewModel()
	require.Empty(t, m.Check(nil))
	m.Set("a", "1")
	require.Equal(t, []Violation{{Key: "a", Want: "1"}}, m.Check(nil), "lost")
	require.Empty(t, m.Check(map[string]string{"a": "1"}))
	m.Set("a", absent)
	require.Equal(t, []Violation{{Key: "a", Seen: "1", Want: "nothing", Ghost: true}}, m.Check(map[string]string{"a": "1"}), "came back")
	require.Equal(t, []Violation{{Key: "b", Seen: "1", Want: "nothing"}}, m.Check(map[string]string{"b": "1"}), "appeared")

	m.Maybe("a", "2")
	require.Empty(t, m.Check(map[string]string{"a": "2"}))
	require.Len(t, m.Check(nil), 1, "the first look has chosen")
	m.Maybe("a", absent)
	require.Empty(t, m.Check(nil))
	require.Len(t, m.Check(map[string]string{"a": "2"}), 1, "and again")

	m.MaybeAny("c", true)
	require.Empty(t, m.Check(map[string]string{"c": "x"}))
	require.Empty(t, m.Check(map[string]string{"c": "x"}), "it lingers")
	require.Empty(t, m.Check(nil))
	require.Len(t, m.Check(map[string]string{"c": "x"}), 1, "but it does not come back")

	m.Set("d", "lease")
	m.SetAfter("d", absent, time.Hour)
	require.Empty(t, m.Check(map[string]string{"d": "lease"}), "a lease ends by its clock")
}
