package plan

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"troupe/bus/wire"
)

func tensor(values ...byte) wire.Tensor {
	return wire.Tensor{DType: "uint8", Shape: []int{len(values)}, Data: values}
}

func TestBatchIsCutAndJoined(t *testing.T) {
	batch := Batch{
		Arrays: map[string]wire.Tensor{"ids": tensor(1, 2, 3), "mask": tensor(4, 5, 6)},
		Meta:   map[string]any{"step": 7},
	}
	plan := mustPlan(t, DPMPDispatchFirst, Mesh{DP: 2, TP: 2, PP: 1, CP: 1})
	for _, pad := range []bool{false, true} {
		shards, err := plan.Cut([]any{batch, tensor(7, 8, 9)}, Options{Pad: pad})
		require.NoError(t, err)
		first, second := shards.Args(plan.Parts[0]), shards.Args(plan.Parts[1])
		assert.Equal(t, tensor(4, 5), first[0].(Batch).Arrays["mask"])
		assert.Equal(t, batch.Meta, second[0].(Batch).Meta)
		assert.Equal(t, tensor(7, 8), first[1])
		assert.Equal(t, []any{Batch{Meta: batch.Meta}, nil}, shards.Args(plan.Parts[2]), "metadata alone")

		whole, err := shards.Merge([]any{first[0], second[0]})
		require.NoError(t, err)
		assert.Equal(t, batch, whole)
		rows, err := MergeRows(shards, plan.Collect, []wire.Tensor{first[1].(wire.Tensor), second[1].(wire.Tensor)})
		require.NoError(t, err)
		assert.Equal(t, tensor(7, 8, 9), rows)
	}
}

func TestBatchOfMetadataAloneIsBroadcast(t *testing.T) {
	batch := Batch{Meta: map[string]any{"lr": 0.1}}
	shards, err := mustPlan(t, DPMPCompute, dp(2)).Cut([]any{batch}, Options{Meta: RefuseConflict})
	require.NoError(t, err)
	require.Len(t, shards.Plan.Parts, 1)
	assert.Equal(t, []any{batch}, shards.Args(shards.Plan.Parts[0]))

	metrics := func(loss float64) Batch {
		return Batch{Meta: map[string]any{"metrics": map[string]any{"loss": loss}}}
	}
	got, err := MergeRows(shards, []int{0, 1}, []Batch{metrics(1), metrics(2)})
	require.NoError(t, err)
	assert.Equal(t, map[string]any{"loss": []any{1., 2.}}, got.Meta["metrics"])
	_, err = shards.Merge([]any{batch, Batch{Meta: map[string]any{"lr": 0.2}}})
	assert.ErrorContains(t, err, `metadata "lr" differs`)
}

func TestBatchRefuses(t *testing.T) {
	plan := mustPlan(t, DPMPCompute, dp(2))
	for receiver, arrays := range map[string]map[string]wire.Tensor{
		"argument 1: the arrays of a batch must have the same number of rows: a has 2, b has 3": {"a": tensor(1, 2), "b": tensor(1, 2, 3)},
		`argument 1: array "a": a tensor without axes has no rows`:                              {"a": {DType: "uint8", Data: []byte{1}}},
	} {
		for range 20 { // independent of map order
			_, err := plan.Cut([]any{Batch{Arrays: arrays}}, Options{})
			assert.ErrorContains(t, err, receiver)
			assert.ErrorIs(t, err, wire.ErrInvalid)
		}
	}
	a, b := Batch{Arrays: map[string]wire.Tensor{"a": tensor(1)}}, Batch{Arrays: map[string]wire.Tensor{"b": tensor(1)}}
	_, err := Join([]any{a, b}, FirstWins)
	assert.ErrorContains(t, err, "batches with different arrays cannot be joined: [a] in the first, [b] in batch 1")
}

// TestBatchOnTheWire: a batch keeps its type on the wire.
func TestBatchOnTheWire(t *testing.T) {
	x, err := wire.TensorOf([]int{2, 3}, []float32{1, 2, 3, 4, 5, 6})
	require.NoError(t, err)
	sent := Batch{Arrays: map[string]wire.Tensor{"x": x}, Meta: map[string]any{"step": int64(3)}}
	body, err := wire.Marshal(sent)
	require.NoError(t, err)
	var untyped any
	require.NoError(t, wire.Unmarshal(body, &untyped))
	require.Equal(t, sent, untyped)
	var castAll Batch
	require.NoError(t, wire.Unmarshal(body, &castAll))
	require.Equal(t, sent, castAll)
}
