package metrics

import (
	"maps"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"troupe/bus"
	"troupe/bus/wire"
)

const (
	// measuredFor is how long the series of a process without a new report are shown. It reports every ten seconds.
	measuredFor = 30 * time.Second
	// maxMeasured bounds the series of programs; further ones are counted in troupe_measured_dropped.
	maxMeasured = 10_000
	// measuredPrefix stands before the names, as Ray has it.
	measuredPrefix = "ray_"
)

var droppedDesc = describe("measured_dropped", "Series of programs that are not shown: they are too many, or malformed.")

var (
	metricName = regexp.MustCompile(`^[a-zA-Z_:][a-zA-Z0-9_:]*$`)
	labelName  = regexp.MustCompile(`^[a-zA-Z_][a-zA-Z0-9_]*$`)
)

// measuredMetrics shows Prometheus the series that programs measure, from the reports of their processes.
type measuredMetrics struct {
	sub *bus.Subscription

	mu       sync.Mutex // guards what follows
	sessions map[[2]string]measuredReport
}

// measuredReport is what a session has reported last.
type measuredReport struct {
	series []bus.Measured
	seen   time.Time
}

func watchMeasured(b *bus.Bus) (*measuredMetrics, error) {
	m := &measuredMetrics{sessions: map[[2]string]measuredReport{}}
	sub, err := b.Subscribe(bus.AllMeasured(), m.receive)
	m.sub = sub
	return m, err
}

func (m *measuredMetrics) close() { _ = m.sub.Unsubscribe() } // fails only if the connection is closed

func (m *measuredMetrics) receive(msg *bus.Msg) {
	namespace, session, ok := bus.ParseMeasured(msg.Subject)
	var series []bus.Measured
	if !ok || wire.Unmarshal(msg.Data, &series) != nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.forgetLocked(time.Now())
	if key := [2]string{namespace, session}; m.countLocked()-len(m.sessions[key].series) < maxMeasured {
		m.sessions[key] = measuredReport{series, time.Now()}
	}
}

func (m *measuredMetrics) forgetLocked(now time.Time) {
	maps.DeleteFunc(m.sessions, func(_ [2]string, r measuredReport) bool { return now.Sub(r.seen) > measuredFor })
}

func (m *measuredMetrics) countLocked() int {
	n := 0
	for _, r := range m.sessions {
		n += len(r.series)
	}
	return n
}

// Describe is Prometheus's. It sends nothing: the names are known at a scrape.
func (m *measuredMetrics) Describe(chan<- *prometheus.Desc) {}

// Collect is Prometheus's: one scrape.
func (m *measuredMetrics) Collect(ch chan<- prometheus.Metric) {
	m.mu.Lock()
	m.forgetLocked(time.Now())
	reports := maps.Clone(m.sessions)
	m.mu.Unlock()
	dropped := 0
	kinds := map[string]string{} // by name, the kind, help and labels: all series of a name must agree in them
	for _, key := range slices.SortedFunc(maps.Keys(reports), func(a, b [2]string) int { return slices.Compare(a[:], b[:]) }) {
		series := reports[key].series
		for i := range series {
			metric := metricOf(&series[i], key, kinds)
			if metric == nil {
				dropped++
				continue
			}
			ch <- metric
		}
	}
	gauges(ch).send(droppedDesc, float64(dropped))
}

// metricOf is a series as Prometheus takes it; nil: it is malformed, or does not agree with others of its name.
func metricOf(s *bus.Measured, key [2]string, kinds map[string]string) prometheus.Metric {
	names := slices.Sorted(maps.Keys(s.Labels))
	signature := s.Kind + "\x00" + s.Help
	labels, values := []string{"namespace", "session"}, key[:]
	for _, name := range names {
		if !labelName.MatchString(name) || slices.Contains(labels, name) {
			return nil
		}
		labels, values = append(labels, name), append(slices.Clip(values), s.Labels[name])
		signature += "\x00" + name
	}
	if known, ok := kinds[s.Name]; !metricName.MatchString(s.Name) || ok && known != signature {
		return nil
	}
	kinds[s.Name] = signature
	desc := prometheus.NewDesc(measuredPrefix+s.Name, s.Help, labels, nil)
	var metric prometheus.Metric
	var err error
	switch s.Kind {
	case bus.CounterKind:
		metric, err = prometheus.NewConstMetric(desc, prometheus.CounterValue, s.Value, values...)
	case bus.GaugeKind:
		metric, err = prometheus.NewConstMetric(desc, prometheus.GaugeValue, s.Value, values...)
	case bus.HistogramKind:
		buckets := map[float64]uint64{}
		for i := range min(len(s.Bounds), len(s.Counts)) {
			buckets[s.Bounds[i]] = s.Counts[i]
		}
		metric, err = prometheus.NewConstHistogram(desc, s.Count, s.Value, buckets, values...)
	default:
		return nil
	}
	if err != nil {
		return nil
	}
	return metric
}
