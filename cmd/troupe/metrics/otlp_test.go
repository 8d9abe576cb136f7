package metrics

import (
	"math"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
)

// Prometheus counts the observations up to a bound, OTLP those between two bounds; the last bucket has no bound there.
func TestHistogramsInOTLP(t *testing.T) {
	h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "wait_seconds", Buckets: []float64{1, 2}})
	c := prometheus.NewCounter(prometheus.CounterOpts{Name: "calls_total"})
	registry := prometheus.NewRegistry()
	registry.MustRegister(h, c)
	for _, v := range []float64{0.5, 1.5, 1.7, 9} {
		h.Observe(v)
	}
	c.Add(3)
	families, err := registry.Gather()
	require.NoError(t, err)
	points := map[string]map[string]any{}
	for _, f := range families {
		points[f.GetName()] = otlpPoint(f.GetType(), f.Metric[0], "1", "2")
	}
	require.Equal(t, []string{"1", "2", "1"}, points["wait_seconds"]["bucketCounts"])
	require.Equal(t, []float64{1, 2}, points["wait_seconds"]["explicitBounds"])
	require.Equal(t, "4", points["wait_seconds"]["count"])
	require.Equal(t, 3.0, points["calls_total"]["asDouble"])
	require.Contains(t, otlpMetrics(nil, families, time.Unix(1, 0), time.Unix(2, 0)), "resourceMetrics")
	require.Equal(t, []any{"NaN", "Infinity", "-Infinity", 1.5}, []any{jsonNumber(math.NaN()), jsonNumber(math.Inf(1)), jsonNumber(math.Inf(-1)), jsonNumber(1.5)})
}
