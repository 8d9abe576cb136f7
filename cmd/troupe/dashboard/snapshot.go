package dashboard

import (
	"cmp"
	"context"
	"sync"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/nodes"
	"troupe/placement"
	"troupe/roles/registry"
)

// Snapshot is the state of a cluster at one moment, as the page shows it. Durations are in seconds.
type Snapshot struct {
	At           time.Time           `json:"at"`
	Version      string              `json:"version"`
	URL          string              `json:"url"`
	Problem      string              `json:"problem,omitempty"` // why parts of the rest are missing or old
	Nodes        []Node              `json:"nodes"`
	Roles        []Role              `json:"roles"`
	Reservations []placement.Record  `json:"reservations"`
	Queue        []placement.Waiting `json:"queue"`
	Failures     []nodes.Event       `json:"failures"`
	Store        *bus.StoreUsage     `json:"store,omitempty"`
	Latencies    []float64           `json:"latency_bounds"` // of the buckets of methods; the last bucket has none
}

// Node is a node, and why some of its devices are not granted: by UUID, the worst reason first.
type Node struct {
	placement.NodeStatus
	Unfit map[string][]string `json:"unfit,omitempty"`
}

// Role is a role of the registry with the state of its workers.
type Role struct {
	registry.RoleRecord
	Workers RoleWorkers `json:"workers"`
}

// Observer collects snapshots. One reading serves all viewers of the same second.
type Observer struct {
	Workers *Workers
	Traffic *Traffic
	Events  *Events

	b       *bus.Bus
	client  *placement.Client
	version string

	mu   sync.Mutex
	last Snapshot
}

// snapshotAge is how old a snapshot may be before another one is made.
const (
	snapshotAge  = 500 * time.Millisecond
	snapshotWait = 3 * time.Second
)

// Observe begins to observe the cluster of a head, until Close.
func Observe(b *bus.Bus, events *Events, version string) (*Observer, error) {
	client, err := placement.NewClient(b, "")
	if err != nil {
		return nil, err
	}
	workers, err := WatchWorkers(b)
	if err != nil {
		client.Close()
		return nil, err
	}
	traffic, err := WatchTraffic(b)
	if err != nil {
		workers.Close()
		client.Close()
		return nil, err
	}
	empty := Snapshot{Nodes: []Node{}, Reservations: []placement.Record{}, Queue: []placement.Waiting{}}
	return &Observer{Workers: workers, Traffic: traffic, Events: events, b: b, client: client, version: version, last: empty}, nil
}

// Close ends it. The events stay the caller's.
func (o *Observer) Close() {
	o.Workers.Close()
	o.Traffic.Close()
	o.client.Close()
}

// Snapshot is the state now. It waits for at most three seconds; what does not answer is named in Problem.
func (o *Observer) Snapshot(ctx context.Context) Snapshot {
	o.mu.Lock()
	defer o.mu.Unlock()
	if time.Since(o.last.At) < snapshotAge {
		return o.last
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), snapshotWait) // another viewer may wait for it too
	defer cancel()
	s := Snapshot{Version: o.version, URL: o.b.URL(), Failures: o.Events.Failures(), Nodes: []Node{}, Reservations: []placement.Record{}, Queue: []placement.Waiting{}, Latencies: actors.LatencyBounds[:]}
	if usage, ours := o.b.Store(); ours {
		s.Store = &usage
	}
	if err := o.read(ctx, &s); err != nil {
		s.Problem = err.Error()
	}
	s.At = time.Now().UTC()
	o.last = s
	return s
}

// read asks for the parts of a snapshot at once. A part that does not answer is that of the last snapshot.
func (o *Observer) read(ctx context.Context, s *Snapshot) error {
	var records []registry.RoleRecord
	var known []placement.NodeStatus
	var list placement.Listing
	var noRecords, noNodes, noList error
	var group sync.WaitGroup
	group.Go(func() { records, noRecords = registry.All(ctx, o.b) })
	group.Go(func() { known, noNodes = o.client.Nodes(ctx) })
	group.Go(func() { list, noList = o.client.List(ctx) })
	group.Wait()
	if noRecords != nil {
		for _, r := range o.last.Roles {
			records = append(records, r.RoleRecord)
		}
	}
	s.Roles = joinRoles(records, o.Workers.Roles(time.Now()))
	if noNodes != nil {
		s.Nodes = o.last.Nodes
	}
	for _, n := range known {
		s.Nodes = append(s.Nodes, Node{NodeStatus: n, Unfit: unfit(n)})
	}
	if noList != nil {
		list.Records, list.Waiting = o.last.Reservations, o.last.Queue
	}
	s.Reservations, s.Queue = list.Records, list.Waiting
	return cmp.Or(noRecords, noNodes, noList)
}

func unfit(n placement.NodeStatus) map[string][]string {
	why := map[string][]string{}
	for _, d := range n.Report.Devices {
		reasons := n.Report.Unfit(d)
		if unverified := n.Unverified[d.UUID]; unverified != "" {
			reasons = append(reasons, unverified)
		}
		if len(reasons) > 0 {
			why[d.UUID] = reasons
		}
	}
	return why
}

// joinRoles gives each role of the registry its workers.
func joinRoles(records []registry.RoleRecord, workers []RoleWorkers) []Role {
	byAddress := make(map[bus.Address]RoleWorkers, len(workers))
	for _, w := range workers {
		byAddress[w.Address] = w
	}
	out := make([]Role, len(records))
	for i, r := range records {
		w, heard := byAddress[r.Address()]
		if !heard {
			w = RoleWorkers{Address: r.Address(), Ranks: []Rank{}}
		}
		out[i] = Role{RoleRecord: r, Workers: w}
	}
	return out
}

// Ready reports why the head cannot serve requests, or nil.
func (o *Observer) Ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, snapshotWait)
	defer cancel()
	if _, full := o.b.StoreErr(); full != nil {
		return full
	}
	_, err := o.client.Nodes(ctx)
	return err
}
