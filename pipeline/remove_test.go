package pipeline_test

import (
	"bytes"
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/pipeline"
)

// A removed pipeline is gone with its large bodies; a new one of the same name starts empty, and other pipelines are
// not affected.
func TestRemove(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	pass := func(_ context.Context, items []pipeline.Item) ([]pipeline.Out, error) {
		return []pipeline.Out{{Item: pipeline.Item{Body: items[0].Body}}}, nil
	}
	open := func(name string) *pipeline.Pipeline {
		p, err := pipeline.Open(testContext(t), pipeline.Config{Bus: b}, pipeline.Spec{
			Name: name, Streams: []pipeline.StreamSpec{{Name: "in"}, {Name: "out", Sink: true}},
			Stages: []pipeline.StageSpec{{Name: "pass", In: []string{"in"}, Out: []string{"out"}, Func: pass}},
		})
		require.NoError(t, err)
		return p
	}
	large, err := wire.Marshal(string(bytes.Repeat([]byte("x"), 200<<10)))
	require.NoError(t, err)
	for _, name := range []string{"a", "ab"} {
		p := open(name)
		require.NoError(t, p.Put(testContext(t), "in", pipeline.Item{Body: large}))
		require.NoError(t, p.Drain(testContext(t)))
		if name == "a" {
			c, err := pipeline.Connect(b, "default", name)
			require.NoError(t, err)
			require.ErrorIs(t, c.Remove(testContext(t)), bus.ErrRefused, "it runs")
		}
		require.NoError(t, p.Close(testContext(t)))
	}
	c, err := pipeline.Connect(b, "default", "a")
	require.NoError(t, err)
	require.NoError(t, c.Remove(testContext(t)))
	names, err := pipeline.List(testContext(t), b, "default")
	require.NoError(t, err)
	require.Equal(t, []string{"ab"}, names)
	require.ErrorIs(t, c.Remove(testContext(t)), bus.ErrNotFound)
	p := open("a")
	st, err := p.Status(testContext(t))
	require.NoError(t, err)
	require.Zero(t, st.Streams[1].Items)
	require.NoError(t, p.Close(testContext(t)))
	p = open("ab")
	batch, err := p.Take(testContext(t), "out", 2)
	require.NoError(t, err)
	require.Len(t, batch.Items, 1)
	require.Equal(t, wire.Raw(large), batch.Items[0].Body)
	require.NoError(t, p.Close(testContext(t)))
}
