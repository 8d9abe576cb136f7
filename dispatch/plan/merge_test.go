package plan

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"troupe/bus/wire"
)

func TestJoin(t *testing.T) {
	castAll, err := Join([][]string{{"a"}, nil, {"b", "c"}}, FirstWins)
	require.NoError(t, err)
	assert.Equal(t, []string{"a", "b", "c"}, castAll)

	for _, c := range []struct {
		name    string
		answers []any
		want    any
	}{
		{"lists", []any{[]any{1}, []any{2, 3}}, []any{1, 2, 3}},
		{"joiners", []any{column{[]int{1}}, column{[]int{2}}}, column{[]int{1, 2}}},
		{"nil is no rows", []any{nil, []any{1}}, []any{1}},
		{"values that are not rows", []any{1, nil}, []any{1, nil}},
		{"one value is a list too", []any{1}, []any{1}},
		{"nothing", []any{nil, nil}, nil},
	} {
		got, err := Join(c.answers, FirstWins)
		require.NoError(t, err, c.name)
		assert.Equal(t, c.want, got, c.name)
	}
}

func TestJoinRefuses(t *testing.T) {
	_, err := Join([]any{[]any{1}, 2}, FirstWins)
	assert.ErrorContains(t, err, "1 answers are rows ([]interface {}) and 1 are not (int)")
	assert.ErrorIs(t, err, wire.ErrApplication)
	_, err = Join([]any{[]any{1}, []int{2}}, FirstWins)
	assert.ErrorContains(t, err, "rows of type []int cannot be joined to rows of type []interface {}")
	_, err = Join([]int{1, 2}, FirstWins)
	assert.ErrorContains(t, err, "answers of type int cannot be joined into one")
}

// TestTrimDependsOnTheRank: after a partial gather only padding is trimmed, and no real row.
func TestTrimDependsOnTheRank(t *testing.T) {
	shards, err := mustPlan(t, DPMPCompute, dp(4)).Cut([]any{[]int{1, 2, 3, 4, 5}}, Options{Pad: true})
	require.NoError(t, err)
	require.Equal(t, 3, shards.Padding)
	got, err := MergeRows(shards, []int{0, 2, 3}, [][]int{{1, 2}, {5, 1}, {2, 3}})
	require.NoError(t, err)
	assert.Equal(t, []int{1, 2, 5}, got)

	_, err = MergeRows(shards, []int{1}, [][]int{{1, 2, 3}})
	assert.ErrorContains(t, err, "rank 1 answered 3 rows for its 2")
	loss, err := shards.Merge([]any{.1, .2, .3, .4})
	require.NoError(t, err)
	assert.Equal(t, []any{.1, .2, .3, .4}, loss, "what is not rows is not trimmed")
}

func TestMergeMeta(t *testing.T) {
	a := map[string]any{"step": 3, "metrics": map[string]any{"loss": 1.5, "lens": []any{1, 2}}}
	b := map[string]any{"step": 4, "by": "b", "metrics": map[string]any{"loss": 2.5, "lens": []any{3}}}
	metrics := map[string]any{"loss": []any{1.5, 2.5}, "lens": []any{1, 2, 3}}

	got, err := MergeMeta(FirstWins, []map[string]any{a, b})
	require.NoError(t, err)
	assert.Equal(t, map[string]any{"step": 3, "by": "b", "metrics": metrics}, got)
	_, err = MergeMeta(RefuseConflict, []map[string]any{a, b})
	assert.ErrorContains(t, err, `metadata "step" differs: 3 before, 4 in answer 1`)
	b["step"] = 3
	got, err = MergeMeta(RefuseConflict, []map[string]any{a, b})
	require.NoError(t, err)
	assert.Equal(t, map[string]any{"step": 3, "by": "b", "metrics": metrics}, got)
	_, err = MergeMeta(FirstWins, []map[string]any{{"metrics": 1}})
	assert.ErrorContains(t, err, `metadata "metrics" must be a map of measurements`)
}
