package benchmarks

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestPipelines(t *testing.T) {
	t.Parallel()
	var results []PipelineResult
	err := Pipelines(t.Context(), PipelineConfig{Stages: []int{2}, Bytes: []int{20_000}, Each: time.Millisecond, Turn: 60, NoSync: true}, func(r PipelineResult) error {
		results = append(results, r)
		return nil
	})
	require.NoError(t, err)
	require.Len(t, results, 1)
	for _, r := range results {
		require.Positive(t, r.PerS)
		require.Positive(t, r.RawPerS)
		require.InDelta(t, r.PerS/r.RawPerS, r.Ratio, 0.001)
		require.Positive(t, r.Items)
		require.LessOrEqual(t, r.P50, r.P99)
		require.Equal(t, "file, synced every two minutes", r.Durability)
	}
}
