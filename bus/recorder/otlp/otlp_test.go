package otlp

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"troupe/bus/recorder"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("net/http.(*persistConn).readLoop"), goleak.IgnoreAnyFunction("net/http.(*persistConn).writeLoop"))
}

func environment(values map[string]string) func(string) string {
	return func(name string) string { return values[name] }
}

func TestEnvironment(t *testing.T) {
	c, err := FromEnvironment(environment(nil), "head")
	require.NoError(t, err)
	require.Empty(t, c.Traces+c.Metrics)
	c, err = FromEnvironment(environment(map[string]string{
		"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/", "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20x, tenant=a",
		"OTEL_RESOURCE_ATTRIBUTES": "service.name=other,deployment.environment=test", "OTEL_SERVICE_NAME": "train", "OTEL_EXPORTER_OTLP_TIMEOUT": "1500",
	}), "head")
	require.NoError(t, err)
	require.Equal(t, Config{
		Traces: "http://collector:4318/v1/traces", Metrics: "http://collector:4318/v1/metrics", Timeout: 1500 * time.Millisecond,
		Headers:  map[string]string{"authorization": "Bearer x", "tenant": "a"},
		Resource: map[string]string{"service.name": "train", "deployment.environment": "test"},
	}, c)
	c, err = FromEnvironment(environment(map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://t/x", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_METRICS_EXPORTER": "none"}), "head")
	require.NoError(t, err)
	require.Equal(t, "https://t/x", c.Traces)
	require.Empty(t, c.Metrics)
	c, err = FromEnvironment(environment(map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}), "head")
	require.NoError(t, err)
	require.Empty(t, c.Traces)
	for name, values := range map[string]map[string]string{
		"OTEL_EXPORTER_OTLP_ENDPOINT": {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"},
		"grpc":                        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
		"OTEL_EXPORTER_OTLP_HEADERS":  {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_HEADERS": "secret"},
		"OTEL_EXPORTER_OTLP_TIMEOUT":  {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_TIMEOUT": "1s"},
	} {
		_, err := FromEnvironment(environment(values), "head")
		require.ErrorContains(t, err, name)
		require.NotContains(t, err.Error(), "secret")
	}
}

func TestTraceparent(t *testing.T) {
	const text = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	require.Equal(t, text, recorder.ParseTrace(text).String())
	require.True(t, recorder.ParseTrace(text).Sampled)
	for _, bad := range []string{"", "x", "00-0af7-b7-01", "ff" + text[2:], text[:len(text)-2] + "zz", "00-00000000000000000000000000000000-b7ad6b7169203331-01", "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01"} {
		require.True(t, recorder.ParseTrace(bad).IsZero(), bad)
	}
	child := recorder.ParseTrace(text).Child()
	require.Equal(t, recorder.ParseTrace(text).ID, child.ID)
	require.NotEqual(t, recorder.ParseTrace(text).Span, child.Span)
	require.False(t, recorder.ParseTrace(text[:len(text)-1]+"0").Child().Sampled, "what the caller does not sample is not sampled")
	require.True(t, recorder.Trace{}.Child().Sampled)
}

// A collector that fails, or answers slowly, costs records and nothing else.
func TestCollectorThatFails(t *testing.T) {
	var requests int
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests++
		body, err := io.ReadAll(r.Body)
		if err != nil || !json.Valid(body) || r.Header.Get("tenant") != "a" {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		if requests < 3 {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer server.Close()
	e := Start(Config{Traces: server.URL, Headers: map[string]string{"tenant": "a"}, Every: time.Hour}, slog.New(slog.DiscardHandler))
	defer e.Stop()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	e.take(recorder.Record{Kind: recorder.Span, Name: "load", Trace: recorder.Trace{}.Child()})
	e.take(recorder.Record{Kind: recorder.Span, Name: "not sampled"})
	e.Flush(ctx)
	require.Equal(t, 3, requests, "a temporary failure is tried again")
	require.Zero(t, e.Dropped())
	for range maxQueued + 5 {
		e.take(recorder.Record{Kind: recorder.Span, Name: "load", Trace: recorder.Trace{}.Child()})
	}
	require.EqualValues(t, 5, e.Dropped())
}
