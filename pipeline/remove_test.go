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

// A pipeline that was removed is gone, with its large bodies; one of the same name begins anew, and its neighbour stays.
func TestRemove(t *testing.T) {
	t.Parallel()
	b := newBus(t)
	pass := func(_ context.Context, items []pipeline.Item) ([]pipeline.Out, error) {
		return []pipeline.Out{{Item: pipeline.Item{Body: items[0].Body}}}, nil
	}
	open := func(name string) *pipeline.Pipeline {
		p, err := pipeline.Open(patient(t), pipeline.Config{Bus: b}, pipeline.Spec{
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
		require.NoError(t, p.Put(patient(t), "in", pipeline.Item{Body: large}))
		require.NoError(t, p.Drain(patient(t)))
		if name == "a" {
			c, err := pipeline.Connect(b, "default", name)
			require.NoError(t, err)
			require.ErrorIs(t, c.Remove(patient(t)), bus.ErrRefused, "it runs")
		}
		require.NoError(t, p.Close(patient(t)))
	}
	c, err := pipeline.Connect(b, "default", "a")
	require.NoError(t, err)
	require.NoError(t, c.Remove(patient(t)))
	names, err := pipeline.List(patient(t), b, "default")
	require.NoError(t, err)
	require.Equal(t, []string{"ab"}, names)
	require.ErrorIs(t, c.Remove(patient(t)), bus.ErrNotFound)
	p := open("a")
	st, err := p.Status(patient(t))
	require.NoError(t, err)
	require.Zero(t, st.Streams[1].Items)
	require.NoError(t, p.Close(patient(t)))
	p = open("ab")
	batch, err := p.Take(patient(t), "out", 2)
	require.NoError(t, err)
	require.Len(t, batch.Items, 1)
	require.Equal(t, wire.Raw(large), batch.Items[0].Body)
	require.NoError(t, p.Close(patient(t)))
}
