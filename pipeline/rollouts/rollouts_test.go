package rollouts_test

import (
	"bytes"
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/pipeline/rollouts"
)

// testContext ends long after anything a test waits for.
func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func serve(t testing.TB, b *bus.Bus, spec rollouts.Spec) *rollouts.Server {
	t.Helper()
	s, err := rollouts.Serve(testContext(t), rollouts.Config{Bus: b}, "grpo", spec)
	require.NoError(t, err)
	t.Cleanup(s.Close)
	return s
}

func connect(t testing.TB, b *bus.Bus) *rollouts.Client {
	t.Helper()
	c, err := rollouts.Connect(b, "default", "grpo")
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

func fields(name string, data []byte) []rollouts.Field {
	return []rollouts.Field{{Name: name, Data: data}}
}

// body is size bytes that differ by i.
func body(i, size int) []byte { return bytes.Repeat([]byte{byte(i + 1)}, size) }

// generate makes all turns of a sample; the sizes of its bodies alternate between small and large.
func generate(t testing.TB, c *rollouts.Client) *rollouts.Taken {
	t.Helper()
	m, err := c.Take(testContext(t))
	require.NoError(t, err)
	for turn := len(m.Turns); turn < m.Limit; turn++ {
		data := body(int(m.Lineage.Group)*7+m.Lineage.Index+turn, 100+40_000*(turn%2))
		require.NoError(t, m.Finish(testContext(t), turn, rollouts.Version(turn), false, fields("tokens", data)))
	}
	return m
}

// reward scores everything that has ended.
func reward(t testing.TB, c *rollouts.Client, n int) {
	t.Helper()
	for n > 0 {
		got, h, err := c.Scoring(testContext(t), "reward", min(n, 100))
		require.NoError(t, err)
		for _, m := range got {
			require.NoError(t, c.Set(testContext(t), m.Lineage.Group, m.Lineage.Index, m.Name, fields("reward", []byte{9})))
			n--
		}
		require.NoError(t, h.Release(testContext(t)))
	}
}

// check reads a group and compares every byte.
func check(t testing.TB, c *rollouts.Client, g rollouts.Group) {
	t.Helper()
	for _, m := range g.Samples {
		for turn, f := range m.Turns {
			got, err := c.Read(testContext(t), []*rollouts.Body{f.Body})
			require.NoError(t, err)
			require.Equal(t, body(int(g.ID)*7+m.Lineage.Index+turn, 100+40_000*(turn%2)), got[0], "group %d sample %d turn %d", g.ID, m.Lineage.Index, turn)
		}
		got, err := c.Read(testContext(t), []*rollouts.Body{m.Fields["reward"]})
		require.NoError(t, err)
		require.Equal(t, []byte{9}, got[0])
	}
}

var spec = rollouts.Spec{Siblings: 3, Turns: 2, Fields: []string{"reward"}}

// Groups go from put to trained, and a later engine knows that they have ended. Nothing of them stays.
func TestGroupsAreTrainedOnce(t *testing.T) {
	t.Parallel()
	ctx, b := testContext(t), bustest.Open(t)
	s := serve(t, b, spec)
	c := connect(t, b)
	for i := range 4 {
		require.NoError(t, c.Put(ctx, "data", uint64(i+1), fields("prompt", fmt.Appendf(nil, "p%d", i))))
	}
	require.NoError(t, c.Put(ctx, "data", 4, fields("prompt", nil)), "a repeat")
	for range 12 {
		generate(t, c)
	}
	reward(t, c, 12)
	batch, err := c.Batch(ctx, 2)
	require.NoError(t, err)
	for _, g := range batch.Groups {
		require.Len(t, g.Samples, 3)
		require.Zero(t, g.Version, "the oldest part's")
		check(t, c, g)
	}
	require.NoError(t, batch.Done(ctx))
	require.NoError(t, batch.Done(ctx), "a repeat")
	s.Close()
	serve(t, b, spec)
	st, err := c.Status(ctx)
	require.NoError(t, err)
	require.Equal(t, uint64(4), st.Put)
	require.Equal(t, uint64(2), st.Trained)
	require.Equal(t, uint64(24), st.Turns)
	require.Equal(t, 2, st.Complete)
	require.Equal(t, uint64(4), st.Numbers["data"])
	rest, err := c.Batch(ctx, 2)
	require.NoError(t, err)
	for _, g := range rest.Groups {
		require.Greater(t, g.ID, uint64(2))
		check(t, c, g)
	}
	require.NoError(t, rest.Done(ctx))
}

// What a client held that is gone goes to another; its late answer is dropped, and finished turns stay.
func TestSamplesOfADeadWorkerGoOnElsewhere(t *testing.T) {
	t.Parallel()
	ctx, b := testContext(t), bustest.Open(t)
	serve(t, b, rollouts.Spec{Siblings: 1, Turns: 3})
	dead, c := connect(t, b), connect(t, b)
	require.NoError(t, c.Put(ctx, "", 0, fields("prompt", []byte("p"))))
	m, err := dead.Take(ctx)
	require.NoError(t, err)
	require.NoError(t, m.Finish(ctx, 0, 5, false, fields("tokens", []byte("first"))))
	dead.Close()
	again, err := c.Take(ctx)
	require.NoError(t, err)
	require.Equal(t, 2, again.Lineage.Attempt)
	require.Len(t, again.Turns, 1, "the finished turn is kept")
	require.ErrorIs(t, m.Finish(ctx, 1, 5, false, fields("tokens", []byte("late"))), bus.ErrFenced)
	require.NoError(t, again.Finish(ctx, 1, 6, true, fields("tokens", []byte("second"))))
	batch, err := c.Batch(ctx, 1)
	require.NoError(t, err)
	require.Equal(t, rollouts.Version(5), batch.Groups[0].Version)
	got, err := c.Read(ctx, []*rollouts.Body{batch.Groups[0].Samples[0].Turns[0].Body, batch.Groups[0].Samples[0].Turns[1].Body})
	require.NoError(t, err)
	require.Equal(t, "firstsecond", string(got[0])+string(got[1]))
	require.NoError(t, batch.Done(ctx))
}

// Another process takes over when the engine is gone, and the server may be killed meanwhile: nothing is lost or comes back.
func TestAServerThatIsKilledLosesNothing(t *testing.T) {
	t.Parallel()
	ctx := testContext(t)
	srv := bustest.StartCrashable(t)
	first, second := bustest.Open(t, bus.Config{URLs: []string{srv.URL}}), bustest.Open(t, bus.Config{URLs: []string{srv.URL}})
	s := serve(t, first, spec)
	standby := serve(t, second, spec)
	require.True(t, s.Running())
	require.False(t, standby.Running())
	c := connect(t, second)
	trained := map[uint64]int{}
	for round := range 3 {
		require.NoError(t, c.Put(ctx, "data", uint64(round+1), fields("prompt", []byte("p"))))
		for range 3 {
			generate(t, c)
		}
		srv.Kill()
		srv.Start()
		reward(t, c, 3)
		batch, err := c.Batch(ctx, 1)
		require.NoError(t, err)
		check(t, c, batch.Groups[0])
		require.NoError(t, batch.Done(ctx))
		trained[batch.Groups[0].ID]++
		if round == 1 {
			s.Close()
			require.Eventually(t, standby.Running, time.Minute, 10*time.Millisecond)
		}
	}
	require.Equal(t, map[uint64]int{1: 1, 2: 1, 3: 1}, trained)
	st, err := c.Status(ctx)
	require.NoError(t, err)
	require.Zero(t, st.Open)
}

// Enough siblings are enough after a time; those that are late are dropped.
func TestSomeOfTheSiblingsAfterATime(t *testing.T) {
	t.Parallel()
	ctx, b := testContext(t), bustest.Open(t)
	serve(t, b, rollouts.Spec{Siblings: 3, Turns: 1, AtLeast: 2, After: 100 * time.Millisecond})
	c := connect(t, b)
	require.NoError(t, c.Put(ctx, "", 0, fields("prompt", []byte("p"))))
	slow, err := c.Take(ctx)
	require.NoError(t, err)
	for range 2 {
		m, err := c.Take(ctx)
		require.NoError(t, err)
		require.NoError(t, m.Finish(ctx, 0, 0, true, fields("tokens", []byte("x"))))
	}
	batch, err := c.Batch(ctx, 1)
	require.NoError(t, err)
	require.Len(t, batch.Groups[0].Samples, 2)
	require.ErrorIs(t, slow.Finish(ctx, 0, 0, true, fields("tokens", []byte("late"))), bus.ErrFenced)
	require.NoError(t, batch.Done(ctx))
}
