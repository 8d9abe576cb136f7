package chaos

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The model itself: what was acknowledged is the only value, what was not is chosen by the first look and stays.
func TestModel(t *testing.T) {
	m := NewModel()
	check := func(seen map[string]string) []Violation { return m.Check(seen, time.Now()) }
	require.Empty(t, check(nil))
	m.Set("a", "1")
	require.Equal(t, []Violation{{Key: "a", Want: "1"}}, check(nil), "lost")
	require.Empty(t, check(map[string]string{"a": "1"}))
	m.Set("a", absent)
	require.Equal(t, []Violation{{Key: "a", Seen: "1", Want: "nothing", Ghost: true}}, check(map[string]string{"a": "1"}), "came back")
	require.Equal(t, []Violation{{Key: "b", Seen: "1", Want: "nothing"}}, check(map[string]string{"b": "1"}), "appeared")

	m.Maybe("a", "2")
	require.Empty(t, check(map[string]string{"a": "2"}))
	require.Len(t, check(nil), 1, "the first look has chosen")
	m.Maybe("a", absent)
	require.Empty(t, check(nil))
	require.Len(t, check(map[string]string{"a": "2"}), 1, "and again")

	m.MaybeAny("c", true)
	require.Empty(t, check(map[string]string{"c": "x"}))
	require.Empty(t, check(map[string]string{"c": "x"}), "it lingers")
	require.Empty(t, check(nil))
	require.Len(t, check(map[string]string{"c": "x"}), 1, "but it does not come back")

	m.Set("e", "dead")
	m.MaybeLater("e", absent)
	require.Empty(t, check(map[string]string{"e": "dead"}), "it has not happened yet")
	require.Empty(t, check(nil), "but may happen later")
	require.Len(t, check(map[string]string{"e": "dead"}), 1, "once")

	m.Set("d", "lease")
	m.SetAfter("d", absent, time.Hour)
	require.Empty(t, check(map[string]string{"d": "lease"}), "a lease ends by its clock")
	seen := map[string]string{"d": "lease"}
	require.Empty(t, m.Check(seen, time.Now().Add(59*time.Minute)), "a look that began before the end saw it rightly")
	require.Len(t, m.Check(seen, time.Now().Add(time.Hour)), 1, "one that began after it did not")
}
