package dashboard_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/cmd/troupe/dashboard"
)

func TestLagging(t *testing.T) {
	for name, test := range map[string]struct {
		change func([]dashboard.Rank)
		why    string // empty: none
	}{
		"equal":          {func([]dashboard.Rank) {}, ""},
		"idle":           {func(r []dashboard.Rank) { r[3] = dashboard.Rank{Rank: 3, State: "ready", Done: 7} }, "it is idle"},
		"another method": {func(r []dashboard.Rank) { r[3].Method = "load" }, "it has been running load for 30s"},
		"began later":    {func(r []dashboard.Rank) { r[3].Busy = 2 }, "it began step 28s later"},
		"fewer calls":    {func(r []dashboard.Rank) { r[3].Done = 5 }, "it has finished 2 calls fewer"},
		"half differ": {func(r []dashboard.Rank) {
			for i := range 4 {
				r[i].Busy = 1
			}
		}, ""},
		"short": {func(r []dashboard.Rank) {
			for i := range r {
				r[i].Busy = 1
			}
			r[3].Method = "load"
		}, ""},
		"all idle": {func(r []dashboard.Rank) {
			for i := range r {
				r[i].Method, r[i].Busy = "", 0
			}
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			ranks := make([]dashboard.Rank, 8)
			for i := range ranks {
				ranks[i] = dashboard.Rank{Rank: i, State: "ready", Method: "step", Busy: 30, Running: 1, Done: 7}
			}
			test.change(ranks)
			found := dashboard.Lagging(ranks)
			if test.why == "" {
				require.Empty(t, found)
				return
			}
			require.Len(t, found, 1)
			require.Equal(t, 3, found[0].Rank.Rank)
			require.Equal(t, test.why, found[0].Why)
		})
	}
	require.Empty(t, dashboard.Lagging(nil))
}
