package actors

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"troupe/bus"
)

func TestLaneMistakes(t *testing.T) {
	for words, l := range map[string]Lane{
		"lane name":               {Name: "", Limit: 1},
		"at least 1, not 0":       Concurrent(0),
		"at least 1, not -3":      {Name: "slow", Limit: -3},
		`lane "work" is built in`: {Name: "work", Limit: 2},
		"with limit 64, not 1":    {Name: "control", Limit: 1},
	} {
		require.ErrorContains(t, l.check(), words)
		require.ErrorIs(t, l.check(), bus.ErrInvalid)
	}
	for _, l := range []Lane{Serial, Control, Concurrent(8), {Name: "io", Limit: 2}} {
		require.NoError(t, l.check())
	}
}

// TestLaneStartsInOrderAndWithinItsLimit: whatever comes and ends when, calls start in the order of arrival, never more
// than the limit at once, and none before its body is here.
func TestLaneStartsInOrderAndWithinItsLimit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(1, 4).Draw(t, "limit")
		q := queue{lane: Concurrent(limit)}
		var all []*call
		started := 0
		for range rapid.IntRange(1, 100).Draw(t, "steps") {
			switch rapid.IntRange(0, 3).Draw(t, "step") {
			case 0:
				c := &call{bodyHere: rapid.Bool().Draw(t, "inline")}
				all = append(all, c)
				q.waiting.push(c)
			case 1:
				if c := q.next(); c != nil {
					if c != all[started] || !c.bodyHere {
						t.Fatal("it was not its turn")
					}
					started++
				} else if q.running < limit && started < len(all) && all[started].bodyHere {
					t.Fatal("it could have started")
				}
			case 2:
				if q.running > 0 {
					q.running--
				}
			case 3:
				if len(all) > 0 {
					all[rapid.IntRange(0, len(all)-1).Draw(t, "body")].bodyHere = true
				}
			}
			if q.running > limit {
				t.Fatalf("%d run, of %d", q.running, limit)
			}
		}
	})
}
