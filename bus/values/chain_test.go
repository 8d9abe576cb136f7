package values

import (
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// TestAChainPassesABodyOn: members join at its end, and one that gets nothing goes to the next one before.
func TestAChainPassesABodyOn(t *testing.T) {
	var c chain
	for _, step := range []struct{ session, from string }{
		{"a", ""}, {"b", "a"}, {"c", "b"},
		{"c", "a"}, // b is silent
		{"d", "c"}, {"b", ""} /* a has died */, {"c", ""}, {"e", "d"},
	} {
		require.Equal(t, step.from, c.next(step.session), step)
	}
	c.leave("e")
	c.leave("d")
	require.Equal(t, "c", c.next("f"))
	require.Equal(t, "f", c.next("d"), "a member that joins again is the last one")
}

// TestNoMemberPullsFromItself, through any number of others, whatever is asked and lost.
func TestNoMemberPullsFromItself(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var c chain
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			session := strconv.Itoa(rapid.IntRange(0, 8).Draw(t, "session"))
			if rapid.IntRange(0, 4).Draw(t, "leaves") == 0 {
				c.leave(session)
			} else {
				c.next(session)
			}
			for _, m := range c.members {
				var seen []*member
				for at := m; at != nil && slices.Contains(c.members, at); at = at.upstream {
					if slices.Contains(seen, at) {
						t.Fatalf("%s pulls from itself", m.session)
					}
					seen = append(seen, at)
				}
			}
		}
	})
}
