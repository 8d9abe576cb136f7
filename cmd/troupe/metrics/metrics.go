// Package metrics serves the metrics of a head: its HTTP address with the dashboard, health checks and metrics for
// Prometheus, and their export by OTLP.
package metrics

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/cmd/troupe/dashboard"
	"troupe/gpu"
	"troupe/placement"
)

// scrapeWait bounds the wait of a scrape for the placement service.
const scrapeWait = 5 * time.Second

// headMetrics collects the metrics of a head from the placement service at each scrape.
type headMetrics struct {
	b      *bus.Bus
	client *placement.Client
	events *dashboard.Events
	meter  *deviceMeter
	log    *slog.Logger

	standby func() bool
}

// The descriptions, in the order of output.
var (
	upDesc       = describe("up", "1 if the placement service answers.")
	infoDesc     = describe("head_info", "1; its label is the version of the head.", "version")
	badDesc      = describe("malformed_messages_total", "Messages to the head that could not be read and were dropped.")
	refusedDesc  = describe("connections_refused_total", "Connections without credentials.")
	storeDesc    = describe("store_bytes", "Bytes of the head's store: used, reserved (set aside for streams), limit (--store-limit), free (on its disk).", "kind")
	fullDesc     = describe("store_full", "1 if the head's store takes no writes, because its disk is full or cannot be written.")
	leaderDesc   = describe("leader", "1; its label is the head whose placement service leads.", "leader")
	epochDesc    = describe("leader_epoch", "Number of the leader's term; it grows with each change of the leader.")
	nodeDesc     = describe("node_ready", "1 if the node is ready, 0 if it is lost or has yet to show its devices.", "node")
	lostDesc     = describe("node_lost", "1 for a node that was lost in the last day, has not returned and is not cordoned.", "node")
	cordonDesc   = describe("node_cordoned", "1 if an operator wants nothing new on the node.", "node")
	deviceDesc   = describe("device_held", "1 if the device or a part of it is reserved.", "node", "index", "uuid", "model")
	unfitDesc    = describe("device_unfit", "1 if the device must not be granted, for its health or a foreign process.", "node", "index", "uuid", "model")
	memoryDesc   = describe("device_memory_bytes", "Memory of the device.", "node", "index", "uuid", "kind")
	busyDesc     = describe("device_utilisation_ratio", "Share of the time in which a kernel ran.", "node", "index", "uuid")
	heatDesc     = describe("device_temperature_celsius", "Temperature of the device.", "node", "index", "uuid")
	powerDesc    = describe("device_power_watts", "Power that the device takes.", "node", "index", "uuid")
	reservedDesc = describe("reservations", "Reservations that are held.", "namespace", "state")
	waitingDesc  = describe("requests_waiting", "Requests in the queue.", "namespace")
	longestDesc  = describe("request_waiting_seconds_max", "How long the request has waited that has waited longest.", "namespace")
)

// names are the names of all metrics that describe was called with.
var names []string

func describe(name, help string, labels ...string) *prometheus.Desc {
	names = append(names, "troupe_"+name)
	return prometheus.NewDesc("troupe_"+name, help, labels, nil)
}

// Names lists the metrics of a head.
func Names() []string { return slices.Clone(names) }

// Serve serves the dashboard, health checks and metrics at an address until stop is called. Beyond loopback every
// request but health checks must show the token. standby reports whether another head leads, which serves what they all would tell; nil: none
// does.
func Serve(at, token string, b *bus.Bus, standby func() bool, log *slog.Logger) (where string, stop func(), err error) {
	client, err := placement.NewClient(b, "")
	if err != nil {
		return "", nil, err
	}
	listener, err := net.Listen("tcp", at)
	if err != nil {
		client.Close()
		return "", nil, err
	}
	events := dashboard.FollowEvents(b, log)
	observer, err := dashboard.Observe(b, events, cli.Version)
	if err != nil {
		events.Close()
		client.Close()
		return "", nil, errors.Join(err, listener.Close())
	}
	measured, err := watchMeasured(b)
	if err != nil {
		observer.Close()
		events.Close()
		client.Close()
		return "", nil, errors.Join(err, listener.Close())
	}
	if standby == nil {
		standby = func() bool { return false }
	}
	meter := &deviceMeter{owners: map[deviceOwner]*deviceUse{}}
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		&headMetrics{b: b, client: client, events: events, meter: meter, log: log, standby: standby},
		leading{&roleMetrics{b: b, workers: observer.Workers, traffic: observer.Traffic, log: log}, standby},
		leading{&pipelineMetrics{b: b, log: log}, standby}, leading{&weightsMetrics{b: b, log: log}, standby}, leading{measured, standby},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	handler := dashboard.Handler(dashboard.Config{
		Bus: b, Observer: observer, Token: token, StandbyFunc: standby,
		Metrics: promhttp.HandlerFor(registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4, Timeout: 2 * scrapeWait}),
	})
	limit := newConnections(bus.MaxPageConnections())
	server := &http.Server{Handler: handler, ReadHeaderTimeout: scrapeWait, IdleTimeout: idleLimit, ConnState: limit.changed}
	doneCh := make(chan struct{})
	go func() {
		defer close(doneCh)
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			log.Warn("troupe: metrics are no longer served", "error", err)
		}
	}()
	ctx, cancel := context.WithCancel(context.Background())
	var group sync.WaitGroup
	group.Go(func() { Export(ctx, registry, log) })
	group.Go(func() { meter.run(ctx, client) })
	return listener.Addr().String(), func() {
		cancel()
		group.Wait()
		_ = server.Close() // a running scrape fails, and the next one reports the same
		<-doneCh
		measured.close()
		observer.Close()
		events.Close()
		client.Close()
	}, nil
}

// leading collects only while the head leads.
type leading struct {
	prometheus.Collector
	standby func() bool
}

func (l leading) Collect(ch chan<- prometheus.Metric) {
	if !l.standby() {
		l.Collector.Collect(ch)
	}
}

// Describe implements prometheus.Collector.
func (m *headMetrics) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(m, ch) }

// Collect implements prometheus.Collector. Each scrape calls it.
func (m *headMetrics) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeWait)
	defer cancel()
	ch <- prometheus.MustNewConstMetric(badDesc, prometheus.CounterValue, float64(m.b.MalformedCount()))
	ch <- prometheus.MustNewConstMetric(refusedDesc, prometheus.CounterValue, float64(m.b.Refused()))
	t := gauges(ch)
	t.send(infoDesc, 1, cli.Version)
	if usage, ours := m.b.Store(); ours {
		t.send(fullDesc, one(usage.Full))
		for kind, bytes := range map[string]int64{"used": usage.Used, "reserved": usage.Reserved, "limit": usage.Limit, "free": usage.Free} {
			t.send(storeDesc, float64(bytes), kind)
		}
	}
	all, err := m.client.Nodes(ctx)
	list := placement.Listing{}
	if err == nil {
		list, err = m.client.List(ctx)
	}
	t.send(upDesc, one(err == nil))
	if err != nil {
		m.log.Warn("troupe: the placement service does not answer; its metrics are missing", "error", err)
		return
	}
	if m.standby() {
		return
	}
	held := map[string]bool{}
	for _, r := range list.Records {
		for _, w := range r.Workers {
			for _, s := range w.Slots {
				held[s.UUID] = true
			}
		}
	}
	m.meter.read(list.Records, time.Now())
	m.meter.send(t)
	for _, n := range all {
		t.node(n, held)
	}
	for _, name := range m.events.Lost(time.Now()) {
		if !slices.ContainsFunc(all, func(n placement.NodeStatus) bool { return n.Report.Node == name && closed(n) }) {
			t.send(lostDesc, 1, name)
		}
	}
	t.queue(list)
	if status, err := m.client.Ledger(ctx); err == nil {
		t.send(leaderDesc, 1, status.Leader)
		t.send(epochDesc, float64(status.Epoch))
	}
}

// closed reports whether the node as a whole is cordoned: an operator has taken it out of service.
func closed(n placement.NodeStatus) bool {
	return slices.ContainsFunc(n.Cordons, func(c placement.Cordon) bool { return c.Device == "" })
}

// gauges sends gauges to a channel.
type gauges chan<- prometheus.Metric

func (t gauges) send(desc *prometheus.Desc, value float64, labels ...string) {
	t <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
}

func one(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

func (t gauges) node(n placement.NodeStatus, held map[string]bool) {
	name := n.Report.Node
	if n.Rank >= 0 { // of others only the cordons are left
		t.send(nodeDesc, one(n.State == placement.NodeReady), name)
	}
	t.send(cordonDesc, one(len(n.Cordons) > 0), name)
	for _, d := range n.Report.Devices {
		index := strconv.Itoa(d.Index)
		t.send(deviceDesc, one(held[d.UUID]), name, index, d.UUID, d.Model)
		t.send(unfitDesc, one(len(n.Report.Unfit(d)) > 0), name, index, d.UUID, d.Model)
		t.sample(d, name, index)
	}
}

// sample sends the readings that the driver has.
func (t gauges) sample(d gpu.Device, node, index string) {
	t.send(memoryDesc, float64(d.MemoryTotal), node, index, d.UUID, "total")
	if free := d.Sample.MemoryFree; free != nil {
		t.send(memoryDesc, float64(*free), node, index, d.UUID, "free")
	}
	for desc, reading := range map[*prometheus.Desc]struct {
		value *int
		unit  float64
	}{busyDesc: {d.Sample.Utilisation, 100}, heatDesc: {d.Sample.Temperature, 1}, powerDesc: {d.Sample.Power, 1000}} {
		if reading.value != nil {
			t.send(desc, float64(*reading.value)/reading.unit, node, index, d.UUID)
		}
	}
}

func (t gauges) queue(list placement.Listing) {
	type kind struct{ namespace, state string }
	reservations, waiting, longest := map[kind]int{}, map[string]int{}, map[string]int64{}
	namespaces := namespaceLabels{}
	for _, r := range list.Records {
		reservations[kind{namespaces.of(r.Namespace), string(r.State)}]++
	}
	for _, w := range list.Waiting {
		namespace := namespaces.of(w.Namespace)
		waiting[namespace]++
		longest[namespace] = max(longest[namespace], w.Waited)
	}
	for k, n := range reservations {
		t.send(reservedDesc, float64(n), k.namespace, k.state)
	}
	for namespace, n := range waiting {
		t.send(waitingDesc, float64(n), namespace)
		t.send(longestDesc, float64(longest[namespace])/1000, namespace)
	}
}

// namespaceLabels bounds the namespaces of one scrape: further ones share a label.
type namespaceLabels map[string]bool

func (l namespaceLabels) of(namespace string) string {
	if !l[namespace] && len(l) >= dashboard.MaxNamespaces {
		return dashboard.OtherNamespaces
	}
	l[namespace] = true
	return namespace
}
