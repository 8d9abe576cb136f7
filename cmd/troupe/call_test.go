package main

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/cmd/troupe/cli"
)

func TestCall(t *testing.T) {
	u := newShell(t)
	u.up()
	u.runs(four)
	for _, test := range []struct{ words, want string }{
		{`rank`, `[0,1,2,3]`},
		{`rank --rank 2`, `2`},
		{`rank --mode RANK_ZERO`, `0`},
		{`rank --mode ONE_TO_ALL_ONE --json`, `0`},
		{`double --args [[1,2,3]]`, `[2,4,6]`},
		{`own --args [[1,2,3,4]]`, `[1,102,203,304]`},
		{`add --args {"a":2,"b":3}`, `5`},
		{`same --args "word"`, `"word"`},
		{`same --args [null]`, `null`},
		{`same --args [{"<":[1.5,-3,18446744073709551615,true]}]`, `{"<":[1.5,-3,18446744073709551615,true]}`},
		{`ones --args 2`, `{"dtype":"float32","shape":[2,1],"values":[1,1]}`},
		{`ones --args 300`, `{"dtype":"float32","shape":[300,1]}`},
	} {
		t.Run(test.words, func(t *testing.T) {
			require.JSONEq(t, test.want, u.output(append([]string{"call", "four"}, strings.Fields(test.words)...)...))
		})
	}
	t.Run("@health", func(t *testing.T) {
		var health []struct{ State string }
		require.NoError(t, json.Unmarshal([]byte(u.output("call", "four", "@health")), &health))
		require.Len(t, health, 4)
		require.Equal(t, "ready", health[0].State)
	})
}

// The error of a mistake that only the head or the role can detect is one line, which names the cause and the alternatives.
func TestCallMistakes(t *testing.T) {
	u := newShell(t)
	u.up()
	u.runs(four)
	for _, test := range []struct {
		words string
		want  []string
	}{
		{`nosuchrole step`, []string{"nosuchrole", "four"}},
		{`four nosuchmethod`, []string{"nosuchmethod", "add, double"}},
		{`four add --args ["text"]`, []string{"four[0] add", "addends"}},
		{`four double --args [[1]]`, []string{"fewer rows", "2"}},
		{`four own --args [[1,2,3]]`, []string{"it has 3, and there are 4"}},
		{`four own --args [7]`, []string{"one element a rank"}},
		{`four rank --rank 4`, []string{"no rank 4", "0 to 3"}},
		{`four fail`, []string{"four[1] fail", "out of luck"}},
		{`four wait --timeout 50ms`, []string{"four", "wait", "deadline"}},
	} {
		t.Run(test.words, func(t *testing.T) {
			stderr := u.fails(1, append([]string{"call"}, strings.Fields(test.words)...)...)
			for _, word := range test.want {
				require.Contains(t, stderr, word)
			}
		})
	}
}

// An interrupted call is cancelled on the workers.
func TestCallInterrupted(t *testing.T) {
	u := newShell(t)
	u.up()
	rt := u.runs(four)
	cluster, err := rt.Attach(t.Context(), "four")
	require.NoError(t, err)
	busy := func() int {
		all, err := cluster.Info(t.Context())
		require.NoError(t, err)
		n := 0
		for _, w := range all {
			n += len(w.Calls)
		}
		return n
	}
	ctx, interrupt := context.WithCancel(t.Context())
	var out, errs screen
	doneCh := make(chan int, 1)
	go func() {
		doneCh <- execute(ctx, []string{"call", "four", "wait"}, &cli.CLI{Out: &out, Err: &errs, Env: u.getenv})
	}()
	require.Eventually(t, func() bool { return busy() == 4 }, 2*time.Minute, 5*time.Millisecond)
	interrupt()
	require.Equal(t, 1, <-doneCh)
	require.Contains(t, errs.String(), "wait")
	require.Eventually(t, func() bool { return busy() == 0 }, 2*time.Minute, 5*time.Millisecond)
}

func TestCompletion(t *testing.T) {
	u := newShell(t)
	complete := func(words ...string) []string {
		out, _, code := u.run(append([]string{"__complete", "call"}, words...)...)
		require.Zero(t, code)
		lines := strings.Split(strings.TrimSpace(out), "\n")
		var names []string
		for _, l := range lines[:len(lines)-1] { // the last line is a directive to the shell
			name, _, _ := strings.Cut(l, "\t")
			names = append(names, name)
		}
		return names
	}
	require.Empty(t, complete(""), "without a head there is nothing to complete")
	u.up()
	u.runs(four)
	require.Equal(t, []string{"four"}, complete(""))
	require.Subset(t, complete("four", ""), []string{"double", "rank", "@health"})
	require.Contains(t, complete("four", "rank", "--mode", ""), "DP_MP_DISPATCH_FIRST_COLLECT_ALL")
	require.Empty(t, complete("four", "rank", ""))
}
