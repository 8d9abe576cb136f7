package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// runDemo returns the output of a run that succeeds.
func runDemo(t *testing.T, args ...string) string {
	var out, errs bytes.Buffer
	require.Zero(t, run(t.Context(), args, &out, &errs), errs.String())
	return out.String()
}

// The output names every role and mode, fits on a screen, and comes soon.
func TestOutput(t *testing.T) {
	start := time.Now()
	out := runDemo(t)
	require.Less(t, time.Since(start), time.Minute)
	for _, word := range []string{
		"actor_train", "actor_infer", "reference", "critic", "reward",
		"ALL_TO_ALL", "ONE_TO_ALL", "ONE_TO_ALL_ONE", "DP_MP_COMPUTE", "DP_MP_DISPATCH_FIRST", "RANK_ZERO", "control lane",
		"rows 0-255 → 0,1,4,5; 256-511 → 2,3,6,7", "rows 0-255 → 0; 256-511 → 1; none → 2,3",
	} {
		require.Contains(t, out, word)
	}
	lines := strings.Split(out, "\n")
	require.LessOrEqual(t, len(lines), 45)
	for _, l := range lines {
		require.LessOrEqual(t, len([]rune(l)), 130, l)
	}
}

// The policy learns, and the driver publishes each part of a call once.
func TestFigures(t *testing.T) {
	const steps = 6
	lines := strings.Split(strings.TrimSpace(runDemo(t, "-json", "-steps", "6")), "\n")
	require.Len(t, lines, steps)
	all := make([]stepRecord, steps)
	for i, l := range lines {
		require.NoError(t, json.Unmarshal([]byte(l), &all[i]))
		require.Equal(t, i+1, all[i].Step)
		require.Less(t, all[i].Drift, 1e-4, "actor_infer has the weights of actor_train")
		require.Positive(t, all[i].Millis)
	}
	require.Less(t, all[0].Reward, 0.1)
	require.Zero(t, all[0].KL, "the reference is the policy before training")
	require.Greater(t, all[steps-1].Reward, 0.9)
	require.Equal(t, layers*letters*letters*4, all[steps-1].Checkpoint.Bytes)

	called := map[string]int{}
	for _, c := range all[1].Calls {
		called[c.Role]++
		if len(c.Parts) > 0 && c.Parts[0].Rows > 0 {
			require.EqualValues(t, len(c.Parts), c.Messages, "%s of %s: a part is published once", c.Method, c.Role)
		}
		if c.Method == "train_step" {
			bytes := rows * ((promptLen+answerLen)*4 + answerLen*4 + answerLen*4)
			require.InEpsilon(t, bytes, c.Sent, 0.1, "each row is sent once, for all the ranks that need it")
		}
	}
	require.Equal(t, map[string]int{"actor_train": 4, "actor_infer": 1, "reference": 1, "critic": 2, "reward": 1}, called)
}

// A cancelled run ends everything and reports the step.
func TestInterrupted(t *testing.T) {
	ctx, interrupt := context.WithCancel(t.Context())
	out, in := io.Pipe()
	var errs bytes.Buffer
	doneCh := make(chan int, 1)
	go func() {
		doneCh <- run(ctx, []string{"-json", "-steps", "10000"}, in, &errs)
		_ = in.Close()
	}()
	lines := bufio.NewScanner(out)
	require.True(t, lines.Scan())
	interrupt()
	_, err := io.Copy(io.Discard, out)
	require.NoError(t, err)
	require.Equal(t, 1, <-doneCh)
	require.Regexp(t, `^demo: step \d+: .*\n$`, errs.String())
}

func TestCommandLineMistakes(t *testing.T) {
	for _, args := range [][]string{{"-steps", "0"}, {"-nothing"}, {"more"}} {
		var errs bytes.Buffer
		require.Equal(t, 2, run(t.Context(), args, io.Discard, &errs))
		require.NotEmpty(t, errs.String())
	}
}

func TestRankList(t *testing.T) {
	require.Equal(t, "0-3", rankList([]int{0, 1, 2, 3}))
	require.Equal(t, "0,1,4,5", rankList([]int{0, 1, 4, 5}))
	require.Equal(t, "2,3", rankList([]int{2, 3}))
	require.Equal(t, "7", rankList([]int{7}))
}
