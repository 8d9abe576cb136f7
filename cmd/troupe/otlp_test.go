package main

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"troupe"
	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/recorder/otlp"
	"troupe/cmd/troupe/metrics"
	"troupe/roles"
)

// otlpSpan is a span as a collector receives it.
type otlpSpan struct {
	TraceID    string `json:"traceId"`
	SpanID     string `json:"spanId"`
	ParentID   string `json:"parentSpanId"`
	Name       string `json:"name"`
	Kind       int    `json:"kind"`
	Begin      string `json:"startTimeUnixNano"`
	End        string `json:"endTimeUnixNano"`
	Attributes []struct {
		Key   string            `json:"key"`
		Value map[string]string `json:"value"`
	} `json:"attributes"`
}

func (s otlpSpan) attribute(key string) string {
	for _, a := range s.Attributes {
		if a.Key == key {
			for _, v := range a.Value {
				return v
			}
		}
	}
	return ""
}

// collector is a receiver of OTLP over HTTP.
type collector struct {
	*httptest.Server
	mu      sync.Mutex
	spans   []otlpSpan
	metrics []string // bodies
}

func startCollector(t *testing.T) *collector {
	c := &collector{}
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil || r.Header.Get("Content-Type") != "application/json" {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if r.URL.Path == "/v1/metrics" {
			c.metrics = append(c.metrics, string(body))
			return
		}
		var request struct {
			ResourceSpans []struct {
				ScopeSpans []struct {
					Spans []otlpSpan `json:"spans"`
				} `json:"scopeSpans"`
			} `json:"resourceSpans"`
		}
		if json.Unmarshal(body, &request) != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		for _, resource := range request.ResourceSpans {
			for _, scope := range resource.ScopeSpans {
				c.spans = append(c.spans, scope.Spans...)
			}
		}
	}))
	t.Cleanup(c.Close)
	return c
}

// A call, its parts, the runs that it causes, a span inside of a run and a call from inside a method are one trace, and its parent is the
// context that the caller gave.
func TestTracesOfACallAreOneTree(t *testing.T) {
	received := startCollector(t)
	exporter := otlp.Start(otlp.Config{Traces: received.URL + "/v1/traces", Resource: map[string]string{"service.name": "test"}, Every: time.Hour}, slog.New(slog.DiscardHandler))
	defer exporter.Stop()
	b := bustest.Open(t, bus.Config{Server: bus.ServerConfig{StoreDir: t.TempDir()}})
	var inner *roles.Cluster
	class := actors.NewClass("traced", func(context.Context, actors.Setup) (*struct{}, error) { return &struct{}{}, nil })
	actors.Method(class, "leaf", func(_ *struct{}, _ context.Context, n int) (int, error) { return n, nil })
	actors.Method(class, "step", func(_ *struct{}, ctx context.Context, n int) (int, error) {
		defer troupe.Span(ctx, "load")()
		_, err := inner.Call(ctx, "leaf", n)
		return n, err
	})
	rt, err := roles.Open(t.Context(), roles.Config{Bus: b, Namespace: "run", Classes: []*actors.Class{class.Class}})
	require.NoError(t, err)
	defer func() { require.NoError(t, rt.Close(context.Background())) }()
	inner, err = rt.Create(t.Context(), roles.Spec{Name: "leaves", Class: "traced", World: 1})
	require.NoError(t, err)
	train, err := rt.Create(t.Context(), roles.Spec{Name: "train", Class: "traced", World: 2})
	require.NoError(t, err)
	_, err = train.Call(t.Context(), "step", 1)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()

	// A worker records its run after its answer was sent.
	find := func(name, kind string) (out []otlpSpan) {
		received.mu.Lock()
		defer received.mu.Unlock()
		for _, s := range received.spans {
			if s.Name == name && s.attribute("troupe.kind") == kind {
				out = append(out, s)
			}
		}
		return out
	}
	require.Eventually(t, func() bool {
		exporter.Flush(ctx)
		return len(find("train.step", "call")) == 1 && len(find("train.step", "part")) == 2 && len(find("train.step", "run")) == 2 &&
			len(find("load", "span")) == 2 && len(find("leaves.leaf", "call")) == 2 && len(find("leaves.leaf", "run")) == 2
	}, 2*time.Minute, 20*time.Millisecond)
	call := find("train.step", "call")[0]
	require.Empty(t, call.ParentID)
	require.Equal(t, 3, call.Kind)
	ids := []string{call.SpanID}
	for _, s := range append(find("train.step", "part"), find("train.step", "run")...) {
		require.Equal(t, [2]string{call.TraceID, call.SpanID}, [2]string{s.TraceID, s.ParentID}, s.Name)
		ids = append(ids, s.SpanID)
	}
	runs := find("train.step", "run")
	for _, s := range append(find("load", "span"), find("leaves.leaf", "call")...) {
		require.Equal(t, call.TraceID, s.TraceID)
		require.True(t, slices.ContainsFunc(runs, func(r otlpSpan) bool {
			return r.SpanID == s.ParentID && r.attribute("troupe.rank") == s.attribute("troupe.rank")
		}), s.Name)
		ids = append(ids, s.SpanID)
	}
	calls := find("leaves.leaf", "call")
	for _, s := range find("leaves.leaf", "run") {
		require.True(t, slices.ContainsFunc(calls, func(c otlpSpan) bool { return c.SpanID == s.ParentID && c.TraceID == s.TraceID }))
	}
	slices.Sort(ids)
	require.Len(t, slices.Compact(ids), 9, "no span id twice")
	require.Less(t, call.Begin, call.End)
}

func TestMetricsAreExported(t *testing.T) {
	received := startCollector(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.URL)
	registry := prometheus.NewRegistry()
	calls := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "troupe_calls_total", Help: "calls"}, []string{"role"})
	times := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "troupe_seconds", Buckets: []float64{1, 10}})
	nodes := prometheus.NewGauge(prometheus.GaugeOpts{Name: "troupe_nodes"})
	unknown := prometheus.NewGauge(prometheus.GaugeOpts{Name: "troupe_unknown"})
	unknown.Set(math.NaN())
	registry.MustRegister(calls, times, nodes, unknown)
	calls.WithLabelValues("train").Add(3)
	times.Observe(0.5)
	times.Observe(100)
	nodes.Set(2)
	ctx, cancel := context.WithCancel(t.Context())
	doneCh := make(chan struct{})
	go func() { defer close(doneCh); metrics.Export(ctx, registry, slog.New(slog.DiscardHandler)) }()
	require.Eventually(t, func() bool { received.mu.Lock(); defer received.mu.Unlock(); return len(received.metrics) > 0 }, 2*time.Minute, 10*time.Millisecond)
	cancel()
	<-doneCh
	body := received.metrics[0]
	for _, part := range []string{
		`"name":"troupe_calls_total","sum":{"aggregationTemporality":2`, `"asDouble":3,"attributes":[{"key":"role","value":{"stringValue":"train"}}]`,
		`"bucketCounts":["1","0","1"],"count":"2","explicitBounds":[1,10]`, `"asDouble":2`, `"asDouble":"NaN"`, `{"key":"service.name","value":{"stringValue":"troupe"}}`,
	} {
		require.Contains(t, body, part)
	}
}
