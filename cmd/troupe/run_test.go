package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/cmd/troupe/cli"
	"troupe/pipeline"
)

const textRun = `name: words
roles:
  shout: {class: text, world: 2}
  count: {class: text}
streams:
  in: {items: 100}
  loud:
  out: {sink: true}
  hard: {items: 10}
stages:
  shout: {role: shout, method: upper, in: in, out: loud, in_flight: 4}
  count: {role: count, method: length, in: loud, out: out}
  hard: {role: count, method: fail, in: hard, failures: 2, backoff: 1ms}
`

func writeRun(t *testing.T, text string) string {
	path := filepath.Join(t.TempDir(), "run.yaml")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// running runs a file until it is stopped, and returns when the pipeline runs.
func (u *shell) running(path string) (out *screen, stop func() int) {
	u.t.Helper()
	out = &screen{}
	var errs screen
	ctx, cancel := context.WithCancel(context.Background())
	doneCh := make(chan int, 1)
	go func() {
		doneCh <- execute(ctx, []string{"run", path, "--grace", "1s"}, &cli.CLI{Out: out, Err: &errs, Env: u.getenv})
	}()
	u.t.Cleanup(cancel)
	require.Eventually(u.t, func() bool { return strings.Contains(out.String(), "Ctrl-C ends it") }, 2*time.Minute, 5*time.Millisecond, "%s %s", out, &errs)
	return out, func() int {
		cancel()
		select {
		case code := <-doneCh:
			return code
		case <-time.After(2 * time.Minute):
			require.Fail(u.t, "troupe run does not end")
			return -1
		}
	}
}

func TestRunAFile(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	head, _ := u.up("--no-agent", "--metrics", "127.0.0.1:0")
	path := writeRun(t, textRun)
	out, stop := u.running(path)
	metrics := scrape(t, head.Metrics)
	for _, line := range []string{
		`troupe_pipeline_dead_letters{namespace="default",pipeline="words"} 0`, `troupe_pipeline_stream_items{namespace="default",pipeline="words",stream="in"} 0`,
		`troupe_pipeline_stream_items_max{namespace="default",pipeline="words",stream="in"} 100`, `troupe_pipeline_stage_handled_total{namespace="default",pipeline="words",stage="count"} 0`,
	} {
		require.Contains(t, metrics, line)
	}
	require.Contains(t, out.String(), "role      shout            starting 2 workers in this process")
	require.Contains(t, out.String(), "3 stages, 0 items from before")

	u.output("pipeline", "put", "words", "in", "--args", `["a", "few", "words"]`)
	var got []string
	for range 100 {
		for line := range strings.Lines(u.output("pipeline", "take", "words", "out", "-k", "10")) {
			var it struct{ Body string }
			require.NoError(t, json.Unmarshal([]byte(line), &it))
			got = append(got, strings.Fields(it.Body)[0])
		}
		if len(got) == 3 {
			break
		}
	}
	require.ElementsMatch(t, []string{"A=1", "FEW=3", "WORDS=5"}, got)

	u.output("pipeline", "put", "words", "hard", "--args", `["x"]`)
	require.Eventually(t, func() bool {
		return strings.Contains(u.output("pipeline", "dead", "ls", "words"), "asked to fail: x")
	}, 2*time.Minute, 10*time.Millisecond)
	var letter pipeline.DeadLetter
	require.NoError(t, json.Unmarshal([]byte(u.output("pipeline", "dead", "ls", "words", "--json")), &letter))
	shown := u.output("pipeline", "dead", "show", "words", fmtSeq(letter.Seq))
	require.Contains(t, shown, `"attempts":2`)
	require.Contains(t, shown, `"body":"x"`)
	require.Equal(t, "1\n", u.output("pipeline", "dead", "retry", "words", fmtSeq(letter.Seq)))
	require.Eventually(t, func() bool {
		return strings.Contains(u.output("pipeline", "dead", "ls", "words"), "asked to fail: x")
	}, 2*time.Minute, 10*time.Millisecond)
	require.Equal(t, "1\n", u.output("pipeline", "dead", "drop", "words", "--all"))
	require.Equal(t, "no dead letters\n", u.output("pipeline", "dead", "ls", "words"))

	u.output("pipeline", "pause", "words", "count")
	u.output("pipeline", "put", "words", "in", "--args", `["later"]`)
	table := u.output("pipeline", "top", "--once")
	for _, want := range []string{"pipeline words", "STAGE", "IN_FLIGHT", "P99", "paused", "STREAM", "DEPTH", "OLDEST"} {
		require.Contains(t, table, want)
	}
	var st pipeline.Status
	require.Eventually(t, func() bool {
		require.NoError(t, json.Unmarshal([]byte(u.output("pipeline", "top", "words", "--once", "--json")), &st))
		return st.Streams[1].Items == 1
	}, 2*time.Minute, 10*time.Millisecond)
	require.Contains(t, u.fails(1, "pipeline", "pause", "words", "cuont"), "did you mean count?")
	require.Contains(t, u.fails(1, "run", path), "runs already")

	require.Zero(t, stop(), out.String())
	require.Contains(t, u.fails(1, "pipeline", "resume", "words", "count"), "does not run in namespace default")

	out, stop = u.running(path)
	require.Contains(t, out.String(), "1 items from before")
	u.output("pipeline", "resume", "words", "count")
	require.Eventually(t, func() bool { return strings.Contains(u.output("pipeline", "take", "words", "out"), "LATER=5") }, 2*time.Minute, 10*time.Millisecond)
	u.output("pipeline", "shutdown", "words")
	require.Zero(t, stop())
}

// The items of a killed worker go to the other rank at once, and the restarted rank works again.
func TestARunOutlivesItsWorkers(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	u.up("--gpus", "sim:1x2", "--name", "box")
	out, stop := u.running(writeRun(t, `name: tough
roles:
  slow: {class: text, world: 2, policy: restart_rank, resources: {gpus: 1}}
streams:
  in:
  out: {sink: true}
stages:
  slow: {role: slow, method: wait, in: in, out: out, in_flight: 2}
`))
	require.Contains(t, out.String(), "as processes on the nodes")
	bodies, err := json.Marshal(slices.Repeat([]string{"150ms"}, 24))
	require.NoError(t, err)
	u.output("pipeline", "put", "tough", "in", "--args", string(bodies))
	var pids []int
	require.NoError(t, json.Unmarshal([]byte(u.output("call", "slow", "pid")), &pids))
	require.Len(t, pids, 2)
	require.NoError(t, syscall.Kill(pids[1], syscall.SIGKILL))
	var st pipeline.Status
	require.Eventually(t, func() bool {
		require.NoError(t, json.Unmarshal([]byte(u.output("pipeline", "top", "tough", "--once", "--json")), &st))
		return st.Streams[1].Items == 24 && st.Stages[0].Workers == 2
	}, 2*time.Minute, 20*time.Millisecond, "%s", out)
	require.Positive(t, st.Stages[0].Lost)
	require.Zero(t, st.Dead)
	require.Zero(t, stop(), out.String())
}

func fmtSeq(seq uint64) string {
	text, _ := json.Marshal(seq)
	return string(text)
}

// Without a head, run starts a private one; --drain ends when all items are processed.
func TestRunWithoutAHead(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	text := u.output("run", writeRun(t, textRun), "--drain")
	require.Contains(t, text, "no head on this machine")
	require.Contains(t, text, "the roles are taken down")
}

func TestMistakesInARun(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	_, stderr, code := u.run("run", writeRun(t, strings.NewReplacer("items: 100", "itmes: 100", "class: text, world: 2", "class: txet", "in_flight: 4", "in_flight: 0").Replace(textRun)))
	require.Equal(t, 2, code)
	for _, want := range []string{"3 mistakes", "line 3: roles.shout.class", "did you mean text?", "line 6: streams.in.itmes", "did you mean items?", "line 11: stages.shout.in_flight: a bound of zero"} {
		require.Contains(t, stderr, want)
	}
	require.Contains(t, u.fails(2, "run", "/nowhere.yaml"), "no such file")
	require.Contains(t, u.output("run", writeRun(t, textRun), "--check"), "2 roles, 4 streams, 3 stages; no mistakes")
}
