package pipeline_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/pipeline"
)

func TestItemsGoThroughThreeStages(t *testing.T) {
	t.Parallel()
	p := open(t, newBus(t), pipeline.Spec{Name: "p",
		Streams: []pipeline.StreamSpec{newStream("a"), newStream("b"), newStream("c"), newSink("d")},
		Stages: []pipeline.StageSpec{
			{Name: "one", In: []string{"a"}, Out: []string{"b"}, Func: pass},
			{Name: "two", In: []string{"b"}, Out: []string{"c"}, Func: pass},
			{Name: "three", In: []string{"c"}, Out: []string{"d"}, Func: pass, Workers: 3, InFlight: 8},
		}})
	require.NoError(t, p.Put(testContext(t), "a", items(2000)...))
	got := drainSink(t, p, "d", 2000)
	seen := map[string]int{}
	for _, it := range got {
		seen[it.ID]++
	}
	require.Len(t, seen, 2000)
	require.NoError(t, p.Drain(testContext(t)))
	st := status(t, p)
	for _, s := range st.Streams {
		require.Zero(t, s.Items, s.Name)
		require.Zero(t, s.Bytes, s.Name)
		require.EqualValues(t, 2000, s.In)
		require.EqualValues(t, 2000, s.Out)
	}
}
