package main

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The demo needs nothing, ends by itself, tells of every role, and fits on a screen.
func TestDemo(t *testing.T) {
	start := time.Now()
	out := newUser(t).sees("demo")
	require.Less(t, time.Since(start), 10*time.Second)
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

// The figures are those of the calls: the policy learns, what was sent is what had to be sent, and each part was
// published once.
func TestDemoFigures(t *testing.T) {
	const steps = 6
	lines := strings.Split(strings.TrimSpace(newUser(t).sees("demo", "--json", "--steps", "6")), "\n")
	require.Len(t, lines, steps)
	all := make([]demoStep, steps)
	for i, l := range lines {
		require.NoError(t, json.Unmarshal([]byte(l), &all[i]))
		require.Equal(t, i+1, all[i].Step)
		require.Less(t, all[i].Drift, 1e-4, "actor_infer has the weights of actor_train")
		require.Positive(t, all[i].Millis)
	}
	require.Less(t, all[0].Reward, 0.1)
	require.Zero(t, all[0].KL, "the reference is the policy at the start")
	require.Greater(t, all[steps-1].Reward, 0.9)
	require.Equal(t, layers*letters*letters*4, all[steps-1].Checkpoint.Bytes)

	called := map[string]int{}
	for _, c := range all[1].Calls {
		called[c.Role]++
		if len(c.Parts) > 0 && c.Parts[0].Rows > 0 {
			require.EqualValues(t, len(c.Parts), c.Messages, "%s of %s: a part is published once", c.Method, c.Role)
		}
		if c.Method == "train_step" {
			rows := demoRows * ((promptLen+answerLen)*4 + answerLen*4 + answerLen*4)
			require.InEpsilon(t, rows, c.Sent, 0.1, "each row once, for all the ranks that need it")
		}
	}
	require.Equal(t, map[string]int{"actor_train": 4, "actor_infer": 1, "reference": 1, "critic": 2, "reward": 1}, called)
}

// Interrupted, it takes everything down and says where it was.
func TestDemoInterrupted(t *testing.T) {
	ctx, interrupt := context.WithCancel(t.Context())
	var out, errs screen
	doneCh := make(chan int, 1)
	go func() {
		doneCh <- execute(ctx, []string{"demo", "--json", "--steps", "10000"}, &cli{out: &out, err: &errs, env: newUser(t).getenv})
	}()
	out.line(t, errs.String)
	interrupt()
	require.Equal(t, 1, <-doneCh)
	require.Regexp(t, `^troupe: step \d+: .*\n$`, errs.String())
}

func TestRankList(t *testing.T) {
	require.Equal(t, "0-3", rankList([]int{0, 1, 2, 3}))
	require.Equal(t, "0,1,4,5", rankList([]int{0, 1, 4, 5}))
	require.Equal(t, "2,3", rankList([]int{2, 3}))
	require.Equal(t, "7", rankList([]int{7}))
}
