package metrics

import (
	"cmp"
	"context"
	"encoding/json"
	"log/slog"
	"math"
	"os"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"troupe/bus/recorder/otlp"
)

const maxPoints = 20_000 // data points of one export

// Export sends the metrics of a registry to an OpenTelemetry collector, now and then, until ctx ends. It returns at once if the
// environment names none.
func Export(ctx context.Context, registry prometheus.Gatherer, log *slog.Logger) {
	cfg, err := otlp.FromEnvironment(os.Getenv, "troupe")
	if err != nil || cfg.Metrics == "" { // the error is logged with that of the traces
		return
	}
	cfg.Timeout = cmp.Or(cfg.Timeout, 10*time.Second)
	tick := time.NewTicker(cmp.Or(cfg.MetricTime, time.Minute))
	defer tick.Stop()
	begun := time.Now()
	for broken := false; ; {
		families, err := registry.Gather()
		if len(families) > 0 { // some may be missing
			var data []byte
			if data, err = json.Marshal(otlpMetrics(cfg.Resource, families, begun, time.Now())); err == nil {
				_, err = otlp.Post(ctx, cfg, cfg.Metrics, data)
			}
		}
		if err != nil && !broken && ctx.Err() == nil {
			log.Warn("metrics are not exported; further failures are not logged until it works again", "endpoint", cfg.Metrics, "error", err)
		}
		broken = err != nil
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// otlpMetrics are the metrics in OTLP's JSON: counters as cumulative sums, gauges, and histograms.
func otlpMetrics(resource map[string]string, families []*dto.MetricFamily, begun, now time.Time) map[string]any {
	start, at := strconv.FormatInt(begun.UnixNano(), 10), strconv.FormatInt(now.UnixNano(), 10)
	metrics, left := []any{}, maxPoints
	for _, f := range families {
		points := []any{}
		for _, m := range f.Metric {
			if left == 0 {
				break
			}
			left--
			points = append(points, otlpPoint(f.GetType(), m, start, at))
		}
		metric := map[string]any{"name": f.GetName(), "description": f.GetHelp()}
		switch f.GetType() {
		case dto.MetricType_COUNTER:
			metric["sum"] = map[string]any{"dataPoints": points, "aggregationTemporality": 2, "isMonotonic": true}
		case dto.MetricType_HISTOGRAM:
			metric["histogram"] = map[string]any{"dataPoints": points, "aggregationTemporality": 2}
		default:
			metric["gauge"] = map[string]any{"dataPoints": points}
		}
		metrics = append(metrics, metric)
	}
	return map[string]any{"resourceMetrics": []any{map[string]any{
		"resource":     map[string]any{"attributes": otlp.Attributes(resource)},
		"scopeMetrics": []any{map[string]any{"scope": map[string]any{"name": "troupe"}, "metrics": metrics}},
	}}}
}

// jsonNumber is a number as protobuf's JSON has it, where some are texts.
func jsonNumber(v float64) any {
	switch {
	case math.IsNaN(v):
		return "NaN"
	case math.IsInf(v, 1):
		return "Infinity"
	case math.IsInf(v, -1):
		return "-Infinity"
	}
	return v
}

func otlpPoint(kind dto.MetricType, m *dto.Metric, start, at string) map[string]any {
	labels := map[string]string{}
	for _, l := range m.Label {
		labels[l.GetName()] = l.GetValue()
	}
	p := map[string]any{"attributes": otlp.Attributes(labels), "timeUnixNano": at}
	switch kind {
	case dto.MetricType_COUNTER:
		p["startTimeUnixNano"], p["asDouble"] = start, jsonNumber(m.GetCounter().GetValue())
	case dto.MetricType_HISTOGRAM:
		h := m.GetHistogram()
		counts, bounds, before := []string{}, []float64{}, uint64(0)
		for _, b := range h.Bucket { // they are cumulative
			if math.IsInf(b.GetUpperBound(), 1) {
				continue // the last bucket has no bound in OTLP
			}
			counts, bounds = append(counts, strconv.FormatUint(b.GetCumulativeCount()-before, 10)), append(bounds, b.GetUpperBound())
			before = b.GetCumulativeCount()
		}
		p["startTimeUnixNano"], p["count"], p["sum"] = start, strconv.FormatUint(h.GetSampleCount(), 10), jsonNumber(h.GetSampleSum())
		p["bucketCounts"], p["explicitBounds"] = append(counts, strconv.FormatUint(h.GetSampleCount()-before, 10)), bounds
	case dto.MetricType_GAUGE:
		p["asDouble"] = jsonNumber(m.GetGauge().GetValue())
	default:
		p["asDouble"] = jsonNumber(m.GetUntyped().GetValue())
	}
	return p
}
