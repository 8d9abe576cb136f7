package metrics

import (
	"context"
	"log/slog"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"troupe/bus"
	"troupe/weights"
)

// weightsMetrics tells Prometheus about weights. The service bounds the number of names.
type weightsMetrics struct {
	b   *bus.Bus
	log *slog.Logger
}

var (
	weightsStepDesc      = describe("weights_step", "Step of the newest complete version.", "namespace", "weights")
	weightsEpochDesc     = describe("weights_epoch", "Number of the epoch of the publishers.", "namespace", "weights")
	weightsReceiversDesc = describe("weights_receivers", "Processes that take the weights: all, current (with the newest version), and failing (whose last commit failed).", "namespace", "weights", "kind")
	weightsLagDesc       = describe("weights_lag_versions", "Complete versions that the receiver farthest behind has not committed.", "namespace", "weights")
	weightsTimeDesc      = describe("weights_last_seconds", "Time of the slowest last publish, stage and commit of a process.", "namespace", "weights", "what")
	weightsTakenDesc     = describe("weights_taken_bytes", "Bytes that the receivers that run have taken, by way.", "namespace", "weights", "way")
)

// Describe is Prometheus's.
func (m *weightsMetrics) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(m, ch) }

// Collect is Prometheus's: one scrape.
func (m *weightsMetrics) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeWait)
	defer cancel()
	all, err := weights.Overviews(ctx, m.b)
	if err != nil {
		m.log.Warn("troupe: metrics without weights", "error", err)
		return
	}
	for _, o := range all {
		gauges(ch).weights(o)
	}
}

func (t gauges) weights(o weights.Overview) {
	t.send(weightsEpochDesc, float64(o.Epoch), o.Namespace, o.Name)
	for _, v := range slices.Backward(o.Versions) {
		if v.State == "complete" {
			t.send(weightsStepDesc, float64(v.Step), o.Namespace, o.Name)
			break
		}
	}
	for kind, n := range map[string]int{"all": o.Receivers, "current": o.Current, "failing": o.Failing} {
		t.send(weightsReceiversDesc, float64(n), o.Namespace, o.Name, kind)
	}
	t.send(weightsLagDesc, float64(o.Lag), o.Namespace, o.Name)
	for what, seconds := range map[string]float64{"publish": o.Publish, "stage": o.Stage, "commit": o.Pause} {
		t.send(weightsTimeDesc, seconds, o.Namespace, o.Name, what)
	}
	for way, n := range o.Bytes {
		t.send(weightsTakenDesc, float64(n), o.Namespace, o.Name, way)
	}
}
