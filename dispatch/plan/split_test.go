package plan

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"troupe/bus/wire"
)

func mustPlan(t require.TestingT, mode Mode, mesh Mesh) *Plan {
	p, err := NewPlan(mode, mesh)
	require.NoError(t, err)
	return p
}

func dp(n int) Mesh { return Mesh{DP: n, TP: 1, PP: 1, CP: 1} }

// column is a Splitter and a Joiner.
type column struct{ values []int }

func (c column) Len() int           { return len(c.values) }
func (c column) Slice(i, j int) any { return column{c.values[i:j]} }
func (c column) Head() any          { return "head" }
func (c column) Join(parts []any) (any, error) {
	var out []int
	for _, p := range parts {
		out = append(out, p.(column).values...)
	}
	return column{out}, nil
}

// TestSplitSendsEveryRowToItsReplica: no row is lost, duplicated or sent to another replica.
func TestSplitSendsEveryRowToItsReplica(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		mesh := anyMesh.Draw(t, "mesh")
		mode := rapid.SampledFrom([]Mode{DPMPCompute, DPMPDispatchFirst}).Draw(t, "mode")
		n := rapid.IntRange(mesh.DP, 40).Draw(t, "rows")
		rows := make([]int, n)
		for i := range rows {
			rows[i] = i
		}
		shards, err := mustPlan(t, mode, mesh).Cut([]any{rows, "beside"}, Options{})
		require.NoError(t, err)

		byDP := make([][]int, mesh.DP)
		for _, part := range shards.Plan.Parts {
			args := shards.Args(part)
			require.Len(t, args, 2)
			require.Equal(t, "beside", args[1], "a scalar rides beside a batch")
			if part.Shard == NoData {
				require.Nil(t, args[0])
				continue
			}
			for _, rank := range part.Ranks {
				require.Equal(t, part.Shard, mesh.Coord(rank).DP)
			}
			require.Nil(t, byDP[part.Shard])
			byDP[part.Shard] = args[0].([]int)
		}
		sizes := make([]int, mesh.DP)
		for i, shard := range byDP {
			sizes[i] = len(shard)
		}
		require.Equal(t, Sizes(n, mesh.DP), sizes)
		require.LessOrEqual(t, slices.Max(sizes)-slices.Min(sizes), 1)
		joined, err := MergeRows(shards, shards.Plan.Collect, byDP)
		require.NoError(t, err)
		require.Equal(t, rows, joined)
	})
}

// TestPaddingIsTrimmed: the result has every real row and no padding.
func TestPaddingIsTrimmed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		mesh := anyMesh.Draw(t, "mesh")
		rows := rapid.SliceOfN(rapid.Int(), 1, 20).Draw(t, "rows")
		shards, err := mustPlan(t, DPMPCompute, mesh).Cut([]any{column{rows}}, Options{Pad: true})
		require.NoError(t, err)
		require.Zero(t, (shards.Rows+shards.Padding)%mesh.DP)

		var answers []any
		var sent []int
		for _, part := range shards.Plan.Parts {
			c := shards.Args(part)[0].(column)
			require.Len(t, c.values, (shards.Rows+shards.Padding)/mesh.DP)
			sent = append(sent, c.values...)
			answers = append(answers, c)
		}
		for i, v := range sent {
			require.Equal(t, rows[i%len(rows)], v, "padding cycles from the first row")
		}
		result, err := shards.Merge(answers)
		require.NoError(t, err)
		require.Equal(t, column{rows}, result)
	})
}

func TestSplitRules(t *testing.T) {
	for _, c := range []struct {
		name string
		mode Mode
		args []any
		want [][]any // by part
	}{
		{"a list is split and a scalar is not", DPMPCompute, []any{[]int{1, 2, 3}, 7}, [][]any{{[]int{1, 2}, 7}, {[]int{3}, 7}}},
		{"an array is a list", DPMPCompute, []any{[3]int{1, 2, 3}}, [][]any{{[]int{1, 2}}, {[]int{3}}}},
		{"bytes are one value", DPMPCompute, []any{[]byte("ab"), []int{1, 2}}, [][]any{{[]byte("ab"), []int{1}}, {[]byte("ab"), []int{2}}}},
		{"a splitter is split", DPMPCompute, []any{column{[]int{1, 2}}}, [][]any{{column{[]int{1}}}, {column{[]int{2}}}}},
		{"a broadcast list stays whole", DPMPCompute, []any{Broadcast([]int{1, 2}), []int{3, 4}}, [][]any{{[]int{1, 2}, []int{3}}, {[]int{1, 2}, []int{4}}}},
		{"a list is scattered if asked", DPMPCompute, []any{Scatter([]string{"a", "b"})}, [][]any{{"a"}, {"b"}}},
		{"a list as long as the world is not scattered", OneToAll, []any{[]int{1, 2}}, [][]any{{[]int{1, 2}}}},
		{"a map is broadcast if its tensors have different lengths", DPMPCompute, []any{map[string]wire.Tensor{"a": tensor(1), "b": tensor(1, 2)}}, [][]any{{map[string]wire.Tensor{"a": tensor(1), "b": tensor(1, 2)}}}},
		{"a map is broadcast if it is marked", DPMPCompute, []any{Broadcast(map[string]wire.Tensor{"a": tensor(1)})}, [][]any{{map[string]wire.Tensor{"a": tensor(1)}}}},
		{"nothing to cut is one part", DPMPCompute, []any{7, nil}, [][]any{{7, nil}}},
		{"no arguments are one part", DPMPCompute, nil, [][]any{nil}},
		{"no arguments are one part for all", AllToAll, nil, [][]any{nil}},
		{"one element a rank", AllToAll, []any{[]int{1, 2}, Broadcast(3)}, [][]any{{1, 3}, {2, 3}}},
		{"rows over all ranks", AllToAll, []any{Split([]int{1, 2, 3})}, [][]any{{[]int{1, 2}}, {[]int{3}}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			shards, err := mustPlan(t, c.mode, dp(2)).Cut(c.args, Options{})
			require.NoError(t, err)
			var got [][]any
			for _, part := range shards.Plan.Parts {
				got = append(got, shards.Args(part))
			}
			assert.Equal(t, c.want, got)
		})
	}
}

func TestSplitSendsTheHeadToRanksWithoutData(t *testing.T) {
	p := mustPlan(t, DPMPDispatchFirst, Mesh{DP: 2, TP: 2, PP: 1, CP: 1})
	shards, err := p.Cut([]any{column{[]int{1, 2}}, []int{3, 4}, 5}, Options{})
	require.NoError(t, err)
	assert.Equal(t, []any{"head", nil, 5}, shards.Args(shards.Plan.Parts[2]))
}

func TestSplitRefuses(t *testing.T) {
	for receiver, c := range map[string]struct {
		mode Mode
		args []any
		opt  Options
	}{
		"argument 1 has 3 rows for 4 data-parallel ranks; Options{Pad: true} repeats rows":           {mode: DPMPCompute, args: []any{[]int{1, 2, 3}}},
		"fewer rows than data-parallel ranks: argument 2 has 0 rows for 4 data-parallel ranks":       {mode: DPMPCompute, args: []any{1, []int{}}, opt: Options{Pad: true}},
		"split arguments must have the same number of rows: argument 1 has 4, argument 3 has 5":      {mode: DPMPCompute, args: []any{make([]int, 4), 0, make([]int, 5)}},
		"argument 1: the list must have one element a rank: it has 3, and there are 4":               {mode: AllToAll, args: []any{[]int{1, 2, 3}}},
		"argument 1: the list must have one element a rank: it is no list but of type int":           {mode: AllToAll, args: []any{1}},
		"argument 1: the list must have one element a rank: it is no list but of type plan.column":   {mode: AllToAll, args: []any{column{make([]int, 4)}}},
		"argument 1: the list must have one element a data-parallel rank: it has 5, and there are 4": {mode: DPMPCompute, args: []any{Scatter(make([]int, 5))}},
		"argument 2 is marked split, but ONE_TO_ALL gives every rank the same arguments":             {mode: OneToAll, args: []any{0, Split([]int{1})}},
		"argument 1 is marked split, but a value of type map[string]int has no rows":                 {mode: DPMPCompute, args: []any{Split(map[string]int{})}},
		"argument 1 is a map[string]wire.Tensor whose tensors all have 4 rows: Batch{Arrays: …}":     {mode: DPMPCompute, args: []any{map[string]wire.Tensor{"a": tensor(1, 2, 3, 4)}}},
		"Broadcast(value) gives every rank all of them":                                              {mode: DPMPDispatchFirst, args: []any{map[string]any{"a": tensor(1, 2), "b": tensor(3, 4), "step": 7}}},
		"argument 1 is marked twice": {mode: DPMPCompute, args: []any{Broadcast(Split(1))}},
		"DP_MP_DISPATCH_FIRST_COLLECT_ALL gives one answer a rank: padding could not be trimmed from it": {mode: DPMPDispatchFirstCollectAll, args: []any{make([]int, 5)}, opt: Options{Pad: true}},
	} {
		_, err := mustPlan(t, c.mode, dp(4)).Cut(c.args, c.opt)
		assert.ErrorContains(t, err, receiver)
		assert.ErrorIs(t, err, wire.ErrInvalid)
	}
}
