package metrics

import (
	"context"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/values"
	"troupe/cmd/troupe/dashboard"
	"troupe/roles/registry"
)

// maxRoleMetrics bounds the number of series of the registry. Further roles are counted by state alone.
const maxRoleMetrics = 1024

// roleMetrics tells Prometheus about roles, workers, calls and the bytes that they move. The numbers come from the registry, from the
// heartbeats of the workers and from the reports of all processes. A head observes at most 1,024 roles, 64 methods of each and the bytes of
// 256 namespaces, which bounds the number of series.
type roleMetrics struct {
	b       *bus.Bus
	workers *dashboard.Workers
	traffic *dashboard.Traffic
	log     *slog.Logger
}

var (
	rolesDesc    = describe("roles", "Roles by state.", "namespace", "state")
	restartsDesc = describe("role_restarts_total", "Times the policy of a role has restarted workers.", "namespace", "role")
	workersDesc  = describe("role_workers", "Workers of a role by state; silent: no heartbeat for six seconds.", "namespace", "role", "state")
	queuedDesc   = describe("role_calls_queued", "Calls that wait in the workers' queues.", "namespace", "role")
	runningDesc  = describe("role_calls_running", "Calls that run.", "namespace", "role")
	oldestDesc   = describe("role_call_running_seconds_max", "How long the oldest running call of a role has been running.", "namespace", "role")
	laggingDesc  = describe("role_ranks_lagging", "Ranks that the other ranks of a role wait for: most have been in one method for five seconds, and these are elsewhere.", "namespace", "role")
	slowestDesc  = describe("role_slowest_rank_ratio", "Mean run time of a method on its slowest rank, divided by that of the median rank, since the workers started.", "namespace", "role", "method")
	errorsDesc   = describe("role_call_errors_total", "Calls that ended with an error.", "namespace", "role", "method")
	gathersDesc  = describe("role_gathers_pending", "Calls on a role that its callers still wait for: some of its ranks have not answered.", "namespace", "role")
	waitedDesc   = describe("role_gather_pending_seconds_max", "How long the oldest of them has been waited for.", "namespace", "role")
	bytesDesc    = describe("bytes_total", "Bytes of arguments and results by path: inline (in the message), chunks (over the bus), direct (between the hosts), shared (memory of the host), device.", "namespace", "path", "direction")
	transferDesc = describe("transfer_bytes_total", "Bytes of large values that processes have received by way: direct (between the hosts), bus (in chunks), shm (memory of the host).", "way")
	callsDesc    = describe("role_calls_seconds", "Run times of the calls that have ended.", "namespace", "role", "method")
)

// Describe is Prometheus's.
func (m *roleMetrics) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(m, ch) }

// Collect is Prometheus's: one scrape.
func (m *roleMetrics) Collect(ch chan<- prometheus.Metric) {
	t := gauges(ch)
	ctx, cancel := context.WithTimeout(context.Background(), scrapeWait)
	defer cancel()
	records, err := registry.All(ctx, m.b)
	if err != nil {
		m.log.Warn("troupe: metrics without the registry", "error", err)
	}
	type kind struct{ namespace, state string }
	states := map[kind]int{}
	namespaces := namespaceLabels{}
	for i, r := range records {
		states[kind{namespaces.of(r.Namespace), string(r.State)}]++
		if i >= maxRoleMetrics {
			continue
		}
		ch <- prometheus.MustNewConstMetric(restartsDesc, prometheus.CounterValue, float64(r.Restarts), r.Namespace, r.Name)
	}
	for k, n := range states {
		t.send(rolesDesc, float64(n), k.namespace, k.state)
	}
	t.traffic(m.traffic)
	seen := map[[2]string]bool{} // two incarnations of a role are one series: the first that is listed is kept
	for _, r := range m.workers.Roles(time.Now()) {
		if key := [2]string{r.Namespace, r.Role}; !seen[key] && current(records, r.Address) {
			seen[key] = true
			t.workers(r)
		}
	}
}

func (t gauges) traffic(from *dashboard.Traffic) {
	ways := map[values.TrafficPath]string{values.PathDirect: "direct", values.PathChunks: "bus", values.PathShared: "shm"}
	for p, way := range ways {
		sum := uint64(0)
		for _, n := range from.Namespaces() {
			sum += n.Received[p]
		}
		t.count(transferDesc, sum, way)
	}
	for _, n := range from.Namespaces() {
		for p := range values.TrafficPaths {
			t.count(bytesDesc, n.Sent[p], n.Namespace, p.String(), "sent")
			t.count(bytesDesc, n.Received[p], n.Namespace, p.String(), "received")
		}
	}
	for _, p := range from.Pending(time.Now()) {
		t.send(gathersDesc, float64(p.Calls), p.Namespace, p.Role)
		t.send(waitedDesc, p.Oldest.Seconds(), p.Namespace, p.Role)
	}
}

// current reports whether an incarnation is the one in the registry.
func current(records []registry.RoleRecord, a bus.Address) bool {
	for _, r := range records {
		if r.Address() == a {
			return true
		}
	}
	return false
}

func (t gauges) workers(r dashboard.RoleWorkers) {
	states := map[string]int{}
	queued, running, oldest := 0, 0, 0.0
	for _, w := range r.Ranks {
		states[w.State]++
		queued, running, oldest = queued+w.Queued, running+w.Running, max(oldest, w.Busy)
	}
	for state, n := range states {
		t.send(workersDesc, float64(n), r.Namespace, r.Role, state)
	}
	t.send(queuedDesc, float64(queued), r.Namespace, r.Role)
	t.send(runningDesc, float64(running), r.Namespace, r.Role)
	t.send(oldestDesc, oldest, r.Namespace, r.Role)
	t.send(laggingDesc, float64(len(r.Lagging)), r.Namespace, r.Role)
	for _, s := range r.Skews {
		t.send(slowestDesc, s.Ratio, r.Namespace, r.Role, s.Method)
	}
	for _, m := range r.Methods {
		t <- prometheus.MustNewConstMetric(errorsDesc, prometheus.CounterValue, float64(m.Errors), r.Namespace, r.Role, m.Method)
		buckets, n := map[float64]uint64{}, uint64(0)
		for i, bound := range actors.LatencyBounds {
			n += m.Buckets[i]
			buckets[bound] = n
		}
		t <- prometheus.MustNewConstHistogram(callsDesc, m.Calls, m.Seconds, buckets, r.Namespace, r.Role, m.Method)
	}
}
