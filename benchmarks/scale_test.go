package benchmarks

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestScaleSlopes(t *testing.T) {
	ms := func(v float64) *float64 { return &v }
	got := ScaleSlopes([]ScaleResult{
		{Nodes: 1, Join: ms(100)},
		{Nodes: 1, Ranks: 8, Create: ms(1000)}, // fewer nodes than the most: not of the slope of ranks
		{Nodes: 11, Join: ms(150)},
		{Nodes: 11, Ranks: 8, Create: ms(20)},
		{Nodes: 11, Ranks: 16, Create: ms(36)},
		{Nodes: 11, Ranks: 24, Create: ms(52)},
	})
	require.Equal(t, []ScaleSlope{{"create_ms", 2, "rank"}, {"join_ms", 5, "node"}}, got)
	require.Empty(t, ScaleSlopes([]ScaleResult{{Nodes: 1, Join: ms(100)}}), "one point has no slope")
}
