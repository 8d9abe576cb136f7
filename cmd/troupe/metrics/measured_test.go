package metrics

import (
	"net/http/httptest"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/wire"
)

// What a process reports is shown; what is malformed, or does not agree with others of its name, is counted and dropped.
func TestMeasuredSeriesAreShownOrCounted(t *testing.T) {
	m := &measuredMetrics{sessions: map[[2]string]measuredReport{}}
	report := func(session string, series ...bus.Measured) {
		data, err := wire.Marshal(series)
		require.NoError(t, err)
		m.receive(&bus.Msg{Subject: "troupe.n.@measured." + session, Data: data})
	}
	good := bus.Measured{Name: "samples", Help: "made", Kind: bus.CounterKind, Labels: map[string]string{"role": "a"}, Value: 3}
	report("one", good,
		bus.Measured{Name: "bad name", Kind: bus.GaugeKind}, bus.Measured{Name: "lag", Kind: "dial"},
		bus.Measured{Name: "lag", Kind: bus.GaugeKind, Labels: map[string]string{"session": "mine"}})
	m.receive(&bus.Msg{Subject: "troupe.n.@measured.two", Data: []byte("no msgpack")})
	m.receive(&bus.Msg{Subject: "troupe.n.@other.two"})
	registry := prometheus.NewRegistry()
	registry.MustRegister(m)
	shown := func() string {
		page := httptest.NewRecorder()
		promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(page, httptest.NewRequest("GET", "/metrics", nil))
		require.Equal(t, 200, page.Code)
		return page.Body.String()
	}
	require.Contains(t, shown(), "# TYPE ray_samples counter\nray_samples{namespace=\"n\",role=\"a\",session=\"one\"} 3\n")
	require.Contains(t, shown(), "troupe_measured_dropped 3\n")
	other := good
	other.Labels = map[string]string{"rank": "0"}
	report("two", other) // would make the scrape fail
	require.Contains(t, shown(), "troupe_measured_dropped 4\n")
	many := make([]bus.Measured, maxMeasured+1)
	report("many", many...)
	require.Len(t, m.sessions, 3)
	report("late", good)
	require.Len(t, m.sessions, 3, "no room is left")
}
