package metrics

import (
	"context"
	"log/slog"
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"troupe/bus"
	"troupe/pipeline"
)

// The bounds of the number of series. Further pipelines and streams are not exported.
const (
	maxPipelineMetrics = 64
	maxStreamMetrics   = 512
)

// pipelineMetrics tells Prometheus about pipelines and about the streams of JetStream.
type pipelineMetrics struct {
	b   *bus.Bus
	log *slog.Logger
}

var (
	itemsDesc      = describe("pipeline_stream_items", "Items of a stream that are not completed.", "namespace", "pipeline", "stream")
	itemsMaxDesc   = describe("pipeline_stream_items_max", "The bound of the items of a stream.", "namespace", "pipeline", "stream")
	itemBytesDesc  = describe("pipeline_stream_bytes", "Bytes of the items of a stream.", "namespace", "pipeline", "stream")
	itemAgeDesc    = describe("pipeline_stream_oldest_seconds", "Age of the oldest item of a stream.", "namespace", "pipeline", "stream")
	itemsInDesc    = describe("pipeline_stream_in_total", "Items that were put into a stream since the pipeline was opened.", "namespace", "pipeline", "stream")
	itemsOutDesc   = describe("pipeline_stream_out_total", "Items that have left a stream since the pipeline was opened.", "namespace", "pipeline", "stream")
	blockedDesc    = describe("pipeline_stream_blocked", "Puts that wait for room in a stream.", "namespace", "pipeline", "stream")
	deadDesc       = describe("pipeline_dead_letters", "Dead letters that are neither retried nor dropped.", "namespace", "pipeline")
	stageFlyDesc   = describe("pipeline_stage_in_flight", "Items that the workers of a stage have in hand.", "namespace", "pipeline", "stage")
	stageDoneDesc  = describe("pipeline_stage_handled_total", "Items that a stage has handled since the pipeline was opened.", "namespace", "pipeline", "stage")
	stageRetryDesc = describe("pipeline_stage_retries_total", "Attempts of a stage that failed and were repeated.", "namespace", "pipeline", "stage")
	jetStreamDesc  = describe("jetstream_bytes", "Bytes of JetStream's files for the account of the head: used, and limit where there is one.", "kind")
	streamDesc     = describe("jetstream_stream_bytes", "Bytes of a stream.", "stream")
	streamMaxDesc  = describe("jetstream_stream_bytes_max", "The bound of a stream, where it has one.", "stream")
	streamMsgsDesc = describe("jetstream_stream_messages", "Messages of a stream.", "stream")
	replicasDesc   = describe("jetstream_stream_replicas", "Replicas that a stream should have.", "stream")
	currentDesc    = describe("jetstream_stream_replicas_current", "Replicas of a stream that are up to date, on servers that run.", "stream")
	ledDesc        = describe("jetstream_stream_leader", "1 if a server leads the stream, 0 if it takes no messages.", "stream")
	quorumDesc     = describe("jetstream_quorum", "0 if most servers of the NATS cluster are gone, so that nothing is stored.")
	roundTripDesc  = describe("nats_round_trip_seconds", "Time of a round trip between the head and its NATS server.")
)

// Describe is Prometheus's.
func (m *pipelineMetrics) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(m, ch) }

// Collect is Prometheus's: one scrape.
func (m *pipelineMetrics) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeWait)
	defer cancel()
	t := gauges(ch)
	if state, err := m.b.ServerState(ctx); err != nil {
		m.log.Warn("troupe: metrics without JetStream", "error", err)
	} else {
		t.jetStream(state)
	}
	all, err := pipeline.ListAll(ctx, m.b)
	if err != nil {
		m.log.Warn("troupe: metrics without pipelines", "error", err)
		return
	}
	n := 0
	for _, namespace := range slices.Sorted(maps.Keys(all)) {
		for _, name := range all[namespace] {
			if n++; n > maxPipelineMetrics {
				return
			}
			client, err := pipeline.Connect(m.b, namespace, name)
			if err != nil {
				continue // the name of a stream that is not ours
			}
			if status, err := client.Status(ctx); err == nil { // otherwise it does not run
				t.pipeline(status)
			}
		}
	}
}

func (t gauges) count(desc *prometheus.Desc, value uint64, labels ...string) {
	t <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(value), labels...)
}

func (t gauges) jetStream(s bus.ServerState) {
	t.send(roundTripDesc, s.RoundTrip.Seconds())
	t.send(quorumDesc, one(!s.NoQuorum && !slices.ContainsFunc(s.Streams, bus.StreamUsage.QuorumLost)))
	if s.NoQuorum {
		return
	}
	t.send(jetStreamDesc, float64(s.StoreUsed), "used")
	if s.StoreLimit > 0 {
		t.send(jetStreamDesc, float64(s.StoreLimit), "limit")
	}
	for _, stream := range s.Streams[:min(len(s.Streams), maxStreamMetrics)] {
		t.send(streamDesc, float64(stream.Bytes), stream.Name)
		t.send(streamMsgsDesc, float64(stream.Messages), stream.Name)
		t.send(replicasDesc, float64(stream.Replicas), stream.Name)
		t.send(currentDesc, float64(stream.Current()), stream.Name)
		t.send(ledDesc, one(!stream.Leaderless()), stream.Name)
		if stream.MaxBytes > 0 {
			t.send(streamMaxDesc, float64(stream.MaxBytes), stream.Name)
		}
	}
}

func (t gauges) pipeline(p pipeline.Status) {
	t.send(deadDesc, float64(p.Dead), p.Namespace, p.Name)
	for _, s := range p.Streams {
		labels := []string{p.Namespace, p.Name, s.Name}
		t.send(itemsDesc, float64(s.Items), labels...)
		t.send(itemsMaxDesc, float64(s.MaxItems), labels...)
		t.send(itemBytesDesc, float64(s.Bytes), labels...)
		t.send(itemAgeDesc, s.Oldest, labels...)
		t.send(blockedDesc, float64(s.Blocked), labels...)
		t.count(itemsInDesc, s.In, labels...)
		t.count(itemsOutDesc, s.Out, labels...)
	}
	for _, s := range p.Stages {
		labels := []string{p.Namespace, p.Name, s.Name}
		t.send(stageFlyDesc, float64(s.InFlight), labels...)
		t.count(stageDoneDesc, s.Handled, labels...)
		t.count(stageRetryDesc, s.Retries, labels...)
	}
}
