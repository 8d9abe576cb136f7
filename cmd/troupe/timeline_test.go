package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/actors/timeline"
	"troupe/roles"
)

func TestTimeline(t *testing.T) {
	u := newShell(t)
	u.up()
	u = u.with("TROUPE_NAMESPACE", "n"+rand.Text()) // the recorder is that of the process: it has the calls of other tests
	rt := u.runs(four)
	cluster, err := rt.Attach(context.Background(), "four")
	require.NoError(t, err)
	_, err = roles.CallEach[int](t.Context(), cluster, "rank")
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "trace.json")
	out := u.output("timeline", "four", "-o", file)
	require.Regexp(t, `(?m)^LANE +NODE +PID +EVENTS +RUNNING +CLOCK$`, out)
	require.Regexp(t, `(?m)^four\[3\] .* ± \d`, out)
	require.Contains(t, out, "events written to "+file)
	data, err := os.ReadFile(file)
	require.NoError(t, err)
	var trace struct {
		Events []struct {
			Name string `json:"name"`
			Cat  string `json:"cat"`
		} `json:"traceEvents"`
	}
	require.NoError(t, json.Unmarshal(data, &trace))
	runs := 0
	for _, e := range trace.Events {
		if e.Cat == "run" && e.Name == "rank" {
			runs++
		}
	}
	require.Equal(t, 4, runs)

	var summary struct {
		Lanes []struct {
			Process timeline.Process `json:"process"`
		} `json:"lanes"`
		Silent []timeline.Silent `json:"silent"`
		Late   []timeline.Late   `json:"late"`
	}
	require.NoError(t, json.Unmarshal([]byte(u.output("timeline", "four", "--json", "--last", "10m")), &summary))
	require.Len(t, summary.Lanes, 5, "four ranks, and the driver, whose process is theirs")
	require.Empty(t, summary.Silent)
	require.NotNil(t, summary.Late)
	require.Positive(t, summary.Lanes[4].Process.UncertaintyS)
	require.True(t, json.Valid([]byte(u.output("timeline", "four", "-o", "-"))))

	require.Contains(t, u.fails(1, "timeline", "five"), `no role "five"`)
	require.Contains(t, u.fails(1, "timeline", "four", "--failure"), "no timeline of a failure of role four")
	require.Contains(t, u.fails(2, "timeline", "four", "--last", "0s"), "--last")
	require.Contains(t, u.fails(2, "timeline", "four", "five", "--failure"), "--failure")
	require.Contains(t, u.fails(2, "timeline", "a.b"), "a.b")
	require.Contains(t, u.fails(2, "timeline"), "timeline --help")
}
