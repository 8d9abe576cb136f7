package placement

import (
	"maps"
	"slices"
	"strings"
	"time"

	"troupe/gpu"
	"troupe/nodes/evidence"
	"troupe/nodes/protocol"
	"troupe/placement/planner"
)

// nodeTable is the leader's knowledge of the nodes. Its callers pass in what has been received and the time; it has no
// clock. The loop owns it.
//
//	absent ──lease──▶ unproven ──report──▶ ready ──silence──▶ lost ──heartbeat──▶ unproven
//	   ▲                                     │ goodbye          │ lease expired
//	   └─────────────────────────────────────┴──────────────────┘
type nodeTable struct {
	lease      time.Duration
	silence    time.Duration
	judgeFrom  time.Time // no node is declared lost before
	byName     map[string]*nodeEntry
	cordons    map[string]cordons // by node, absent ones included
	leasesSeen bool               // all leases that existed at the start have been seen
	lastStamp  uint64             // of report requests
}

// nodeEntry is one node. It exists for as long as its rank is stored in the ledger.
type nodeEntry struct {
	name       string
	rank       int
	rankStored bool // in the ledger

	leased      bool
	departed    bool      // its agent has ended in order
	lastHeard   time.Time // the last heartbeat; zero: none in this term
	session     string
	report      *protocol.Report
	verified    bool // the report was made in this term, and after the node was last lost
	requestedAt time.Time
	stamp       uint64 // that a report must answer to verify anything

	cordons cordons // shared with the table, which replaces the map as a whole
	state   NodeState
	why     string
	since   time.Time

	// unverified is the devices whose last workers have not been seen to end: they are unfit until a report that
	// answers the newest request shows nothing on them. stale is the devices on which the newest report shows workers
	// of ended reservations.
	unverified map[string]*unverifiedDevice
	stale      map[string]*unverifiedDevice
	killOrders []protocol.KillOrder // according to the newest report; sent until a report no longer shows the workers
	changed    bool                 // since the last syncPlanner
	gone       bool                 // its grants have been ended
}

// unverifiedDevice is a device that has not been seen empty since its last use.
type unverifiedDevice struct {
	why   string
	since time.Time
	late  bool // maxVerification is over
}

func newNodeTable(lease, silence time.Duration, now time.Time) *nodeTable {
	return &nodeTable{
		lease: lease, silence: silence, judgeFrom: now.Add(lease), byName: map[string]*nodeEntry{}, cordons: map[string]cordons{},
		lastStamp: uint64(now.UnixMicro()), // differs from the stamps of earlier leaders
	}
}

// postponeJudgement restarts the period without loss detection after a server outage, during which no heartbeat could
// arrive.
func (t *nodeTable) postponeJudgement(now time.Time) { t.judgeFrom = now.Add(t.lease) }

// nodesPending reports whether nodes may still return after the start of the term, so that no request is impossible
// yet.
func (t *nodeTable) nodesPending(now time.Time) bool {
	if !now.Before(t.judgeFrom) {
		return false
	}
	if !t.leasesSeen {
		return true
	}
	for _, n := range t.byName {
		if !n.isUsable() || !n.verified {
			return true
		}
	}
	return false
}

// renewStamp makes the next report request a new one: only a report made after it verifies anything.
func (t *nodeTable) renewStamp(n *nodeEntry) {
	t.lastStamp++
	n.stamp, n.requestedAt = t.lastStamp, time.Time{}
}

// answersNewest reports whether the newest report was made after the newest request. Reports of agents without stamps
// are accepted.
func (n *nodeEntry) answersNewest() bool {
	return n.report != nil && (n.report.Answered == 0 || n.report.Answered == n.stamp)
}

// isUsable reports whether the node belongs in the planner.
func (n *nodeEntry) isUsable() bool { return n.report != nil && n.rankStored }

// restore adds a node with the rank recorded in the ledger.
func (t *nodeTable) restore(name string, rank int) *nodeEntry {
	n := &nodeEntry{name: name, rank: rank, rankStored: true, cordons: t.cordons[name], state: NodeUnproven, why: "it has not reported yet"}
	t.renewStamp(n)
	t.byName[name] = n
	return n
}

// add adds an unknown node with the lowest free rank, which is not stored yet.
func (t *nodeTable) add(name string) *nodeEntry {
	taken := map[int]bool{}
	for _, n := range t.byName {
		taken[n.rank] = true
	}
	rank := 0
	for taken[rank] {
		rank++
	}
	n := t.restore(name, rank)
	n.rankStored = false
	return n
}

// leaseTaken records a lease: seen at the start, renewed, or of a new node.
func (t *nodeTable) leaseTaken(report *protocol.Report, now time.Time) *nodeEntry {
	n := t.byName[report.Node]
	if n == nil {
		n = t.add(report.Node)
		n.report = report
		t.markReturned(n, report.Session, "it has not reported yet", now) // it may have been known to an earlier ledger
	}
	switch {
	case n.report == nil && n.gone:
		n.report = report
		t.markReturned(n, report.Session, "it was gone and has returned", now)
	case n.report == nil:
		n.report, n.session, n.changed = report, report.Session, true
		n.setState(NodeUnproven, "it has not reported yet", now)
	case n.session != report.Session:
		n.report = report
		t.markReturned(n, report.Session, "another agent has registered under this name", now)
	}
	n.leased, n.gone, n.departed = true, false, false
	return n
}

// leaseGone records that a lease has expired or was released.
func (t *nodeTable) leaseGone(name string) {
	if n := t.byName[name]; n != nil {
		n.leased = false
	}
}

// heartbeat records a heartbeat. It returns nil for nodes whose lease has not been seen, for replaced agents, and for
// the last heartbeat.
func (t *nodeTable) heartbeat(hb *protocol.Heartbeat, now time.Time) *nodeEntry {
	n := t.byName[hb.Node]
	if n != nil && n.report == nil && !hb.Bye {
		n.lastHeard = now // it is alive, though its lease has not been seen yet
	}
	if n == nil || n.report == nil || n.session != hb.Session {
		return nil // a replaced agent, or an unknown node
	}
	if hb.Bye {
		n.leased, n.lastHeard, n.departed = false, time.Time{}, true
		return nil
	}
	n.lastHeard = now
	if n.state == NodeLost {
		t.markReturned(n, hb.Session, "it was lost and has returned", now)
	}
	if hb.Report != nil && hb.Report.Seq >= n.report.Seq {
		n.applyReport(hb.Report, now)
	}
	return n
}

func (t *nodeTable) isLost(name string) bool {
	n := t.byName[name]
	return n != nil && n.state == NodeLost
}

// markReturned marks a node as unproven: nothing is granted on it before it reports again, and no device before a
// report shows it empty.
func (t *nodeTable) markReturned(n *nodeEntry, session, why string, now time.Time) {
	n.session, n.verified, n.changed = session, false, true
	n.unverified = map[string]*unverifiedDevice{}
	for _, d := range n.report.Devices {
		n.unverified[d.UUID] = &unverifiedDevice{why: "not verified to be empty since the node returned", since: now}
	}
	t.renewStamp(n)
	n.setState(NodeUnproven, why, now)
}

func (n *nodeEntry) setState(s NodeState, why string, now time.Time) {
	if n.state != s || n.why != why {
		n.state, n.why, n.since, n.changed = s, why, now, true
	}
}

// applyReport records a report. A delayed report that was made before the newest request updates the devices but
// verifies nothing.
func (n *nodeEntry) applyReport(report *protocol.Report, now time.Time) {
	before := n.report
	n.report = report
	if n.answersNewest() {
		for _, d := range report.Devices {
			if _, waits := n.unverified[d.UUID]; waits && (!inUse(d) || n.usedByWorkers(d.UUID)) {
				delete(n.unverified, d.UUID)
				n.changed = true
			}
		}
		if !n.verified {
			n.verified = true
			n.setState(NodeReady, "", now)
		}
	}
	n.changed = n.changed || !sameResources(before, report)
}

// usedByWorkers reports whether the processes on a device are those of workers that the report lists. reconcile decides
// whether these may run.
func (n *nodeEntry) usedByWorkers(uuid string) bool {
	if !n.report.RunningComplete || len(n.report.Foreign[uuid]) > 0 {
		return false
	}
	return slices.ContainsFunc(n.report.Running, func(run protocol.RunningGrant) bool { return grantUses(&run, uuid) })
}

// grantUses reports whether workers of a grant use a device.
func grantUses(run *protocol.RunningGrant, uuid string) bool {
	return slices.ContainsFunc(run.Devices, func(d protocol.DeviceShare) bool { return d.UUID == uuid })
}

// setStale replaces the devices with workers of ended reservations.
func (n *nodeEntry) setStale(why map[string]string, now time.Time) {
	for uuid := range n.stale {
		if _, still := why[uuid]; !still {
			delete(n.stale, uuid)
			n.changed = true
		}
	}
	for uuid, words := range why {
		if old := n.stale[uuid]; old != nil && old.why == words {
			continue
		}
		if n.stale == nil {
			n.stale = map[string]*unverifiedDevice{}
		}
		n.stale[uuid], n.changed = &unverifiedDevice{why: words, since: now}, true
	}
}

// expireUnverified marks devices that have waited for verification longer than maxVerification.
func (n *nodeEntry) expireUnverified(now time.Time) {
	for _, all := range []map[string]*unverifiedDevice{n.unverified, n.stale} {
		for _, u := range all {
			if !u.late && now.Sub(u.since) > maxVerification {
				u.late, n.changed = true, true
			}
		}
	}
}

// inUse reports whether a compute process is on the device. A driver that reports no processes is trusted.
func inUse(d gpu.Device) bool {
	return slices.ContainsFunc(d.Sample.Processes, func(p gpu.Process) bool { return p.Kind == gpu.Compute })
}

// sameResources reports whether two reports are equal for the planner.
func sameResources(a, b *protocol.Report) bool {
	return a.CPUs == b.CPUs && a.Memory == b.Memory && maps.Equal(a.Labels, b.Labels) && maps.Equal(a.Resources, b.Resources) &&
		slices.EqualFunc(a.Devices, b.Devices, func(x, y gpu.Device) bool {
			return x.UUID == y.UUID && x.Index == y.Index && numa(x) == numa(y) && slices.Equal(a.Unfit(x), b.Unfit(y))
		})
}

func numa(d gpu.Device) int {
	if d.NUMA == nil {
		return 0
	}
	return *d.NUMA
}

// requireVerification makes devices unfit until a report made from now on shows them empty.
func (t *nodeTable) requireVerification(slots []Slot, why string, now time.Time) {
	for _, slot := range slots {
		n := t.byName[slot.Node]
		if n == nil {
			continue
		}
		if n.unverified == nil {
			n.unverified = map[string]*unverifiedDevice{}
		}
		n.unverified[slot.UUID], n.changed = &unverifiedDevice{why: why, since: now}, true
		t.renewStamp(n)
	}
}

// findLost returns the nodes that are newly lost, and those that are gone: silent and without a lease. Before the
// leases have been seen, it returns none. complete reports whether everything that nodes sent until a moment has arrived: a
// leader that hears of no node at all cannot tell which node is silent.
func (t *nodeTable) findLost(now time.Time, complete func(until time.Time) bool) (lost, gone []*nodeEntry) {
	for _, name := range slices.Sorted(maps.Keys(t.byName)) {
		n := t.byName[name]
		heard := t.heardSince(n)
		signs := evidence.Signs{Silence: now.Sub(heard)}
		if n.lastHeard.IsZero() && !n.leased && n.report != nil && n.verified {
			signs.Exit = "its agent has ended in order"
		}
		if !now.Before(t.judgeFrom) && t.leasesSeen && complete(heard.Add(t.silence)) {
			signs.Heard = signs.Silence
		}
		v := evidence.Judge(signs, evidence.Limits{Silence: t.silence})
		switch {
		case n.gone || !v.Dead:
		case !n.leased:
			gone = append(gone, n)
		case n.state != NodeLost:
			n.verified = false
			n.setState(NodeLost, v.Why, now)
			lost = append(lost, n)
		}
	}
	return lost, gone
}

// heardSince returns when a node was last heard, or the earliest time that this leader can know of.
func (t *nodeTable) heardSince(n *nodeEntry) time.Time {
	if n.lastHeard.IsZero() {
		return t.judgeFrom.Add(-t.lease)
	}
	return n.lastHeard
}

// markGone makes a node absent. Its rank remains until no reservation uses the node.
func (n *nodeEntry) markGone() {
	n.report, n.leased, n.lastHeard, n.verified, n.session = nil, false, time.Time{}, false, ""
	n.state, n.why = NodeUnproven, "it has not reported yet"
	n.stale, n.killOrders = nil, nil
	n.changed, n.gone = true, true
}

// plannerNode returns the node for the planner.
func (n *nodeEntry) plannerNode() planner.Node {
	node := planner.Node{
		ID: n.name, Rank: n.rank, Labels: n.report.Labels, CPUs: Wholes(n.report.CPUs), Memory: int64(n.report.Memory),
		State: n.state, Why: n.why, Since: n.since, Cordoned: n.cordons.describe(""), Devices: make([]planner.Device, len(n.report.Devices)),
	}
	for name, amount := range n.report.Resources {
		if node.Resources == nil {
			node.Resources = make(map[string]Share, len(n.report.Resources))
		}
		node.Resources[name] = Share(amount)
	}
	if one, closed := n.cordons[""]; closed && n.state == NodeReady {
		node.Since = one.Since
	}
	islands := gpu.Islands(n.report.Devices)
	for i, d := range n.report.Devices {
		node.Devices[i] = planner.Device{UUID: d.UUID, Index: d.Index, NUMA: numa(d), Island: islands[i], Unfit: n.unfitReason(d), Clearing: n.clearing(d), Cordoned: n.cordons.describe(d.UUID)}
	}
	return node
}

func (n *nodeEntry) unfitReason(d gpu.Device) string {
	reasons := n.report.Unfit(d)
	for _, all := range []map[string]*unverifiedDevice{n.stale, n.unverified} {
		if u := all[d.UUID]; u != nil {
			reasons = append(reasons, u.why)
		}
	}
	return strings.Join(reasons, "; ")
}

// clearing reports whether a device is unfit only until a report shows it empty, which is expected soon.
func (n *nodeEntry) clearing(d gpu.Device) bool {
	stale, probation := n.stale[d.UUID], n.unverified[d.UUID]
	if stale == nil && probation == nil || len(n.report.Unfit(d)) > 0 {
		return false
	}
	return (stale == nil || !stale.late) && (probation == nil || !probation.late)
}

func (n *nodeEntry) status() NodeStatus {
	s := NodeStatus{Rank: n.rank, State: n.state, Why: n.why, Cordons: n.cordons.list()}
	for _, all := range []map[string]*unverifiedDevice{n.unverified, n.stale} {
		for uuid, u := range all {
			if s.Unverified == nil {
				s.Unverified = map[string]string{}
			}
			s.Unverified[uuid] = u.why
		}
	}
	if n.report != nil {
		s.Report = *n.report
	} else {
		s.Report.Node = n.name
	}
	return s
}

// NodesFromReports returns planner nodes for reports, in their order, as if all nodes were ready.
func NodesFromReports(reports []protocol.Report) []planner.Node {
	nodes := make([]planner.Node, len(reports))
	for i := range reports {
		m := nodeEntry{name: reports[i].Node, rank: i, report: &reports[i], state: NodeReady}
		nodes[i] = m.plannerNode()
	}
	return nodes
}
