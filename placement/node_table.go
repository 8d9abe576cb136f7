package placement

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"troupe/gpu"
	"troupe/nodes/protocol"
	"troupe/placement/planner"
)

// roster is what the leader knows of the nodes. It is told what is heard, and when, and says which nodes have changed;
// it has no clock of its own. The loop owns it.
//
//	absent ──lease──▶ unproven ──report──▶ ready ──silence──▶ lost ──beat──▶ unproven
//	   ▲                                     │ good-bye         │ lease over
//	   └─────────────────────────────────────┴──────────────────┘
type nodeTable struct {
	lease      time.Duration
	silence    time.Duration
	judgeFrom  time.Time // nobody is judged before
	byName     map[string]*nodeEntry
	cordons    map[string]cordons // by node; of those that are away too
	leasesSeen bool               // all leases that there were at the beginning have been seen
	lastStamp  uint64             // the last stamp of a question
}

// member is one node, by name. It stays for as long as it has a seat in the ledger.
type nodeEntry struct {
	name       string
	rank       int
	rankStored bool // its rank is in the ledger

	leased      bool
	departed    bool      // its agent has said that it ends
	lastHeard   time.Time // the last beat or lease; zero: never in this term
	session     string
	report      *protocol.Report
	verified    bool // its report was made in this term, and since it was last lost
	requestedAt time.Time
	stamp       uint64 // of the question that a report must answer to prove anything

	cordons cordons // shared with the roster, which replaces it as a whole
	state   NodeState
	why     string
	since   time.Time

	// probation is the devices that were in use by what has ended without anybody having seen the end: they are unfit
	// until a report that answers the newest question shows nothing on them. stale is the devices on which the newest
	// report shows workers of reservations that the ledger says have ended.
	unverified map[string]*unverifiedDevice
	stale      map[string]*unverifiedDevice
	killOrders []protocol.KillOrder // what its agent is to end, as the newest report shows; asked for until it is gone
	changed    bool                 // the book has not been told yet
	gone       bool                 // it is gone, and what that ends has been ended
}

// unverified is a device that has not been seen empty since its last use.
type unverifiedDevice struct {
	why   string
	since time.Time
	late  bool // it has lasted so long that nobody counts on it
}

func newNodeTable(lease, silence time.Duration, now time.Time) *nodeTable {
	return &nodeTable{
		lease: lease, silence: silence, judgeFrom: now.Add(lease), byName: map[string]*nodeEntry{}, cordons: map[string]cordons{},
		lastStamp: uint64(now.UnixMicro()), // another than those of the leader before
	}
}

// calm starts the time in which nobody is judged anew: the server was away, and so nobody could be heard.
func (t *nodeTable) postponeJudgement(now time.Time) { t.judgeFrom = now.Add(t.lease) }

// settling reports whether nodes that were there before may still come back, so that nothing is impossible yet.
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

// question makes the next question to a node a new one: only a report that was made after it proves anything.
func (t *nodeTable) renewStamp(n *nodeEntry) {
	t.lastStamp++
	n.stamp, n.requestedAt = t.lastStamp, time.Time{}
}

// answered reports whether the newest report of the node was made after the newest question. An agent of a version that
// does not answer stamps is believed.
func (n *nodeEntry) answersNewest() bool {
	return n.report != nil && (n.report.Answered == 0 || n.report.Answered == n.stamp)
}

// present reports whether the node belongs in the book.
func (n *nodeEntry) isUsable() bool { return n.report != nil && n.rankStored }

// sit enters a node with its rank as the ledger has it.
func (t *nodeTable) restore(name string, rank int) *nodeEntry {
	n := &nodeEntry{name: name, rank: rank, rankStored: true, cordons: t.cordons[name], state: NodeUnproven, why: "it has not reported yet"}
	t.renewStamp(n)
	t.byName[name] = n
	return n
}

// newcomer gives a node that is not known the lowest rank that is free. It is seated once that is in the ledger.
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

// leaseTaken is a lease that was seen in the bucket: at the beginning, at a renewal, or because the node is new.
func (t *nodeTable) leaseTaken(report *protocol.Report, now time.Time) *nodeEntry {
	n := t.byName[report.Node]
	if n == nil {
		n = t.add(report.Node)
		n.report = report
		t.markReturned(n, report.Session, "it has not reported yet", now) // it may have been here before, and nobody remembers
	}
	switch {
	case n.report == nil && n.gone:
		n.report = report
		t.markReturned(n, report.Session, "it was gone and is back", now)
	case n.report == nil:
		n.report, n.session, n.changed = report, report.Session, true
		n.setState(NodeUnproven, "it has not reported yet", now)
	case n.session != report.Session:
		n.report = report
		t.markReturned(n, report.Session, "another agent of that name has come", now)
	}
	n.leased, n.gone, n.departed = true, false, false
	return n
}

// leaseGone is a lease that has expired or was given up.
func (t *nodeTable) leaseGone(name string) {
	if n := t.byName[name]; n != nil {
		n.leased = false
	}
}

// beat is a sign of life. Nodes are introduced by their lease, so one that has none yet is not known.
func (t *nodeTable) heartbeat(hb *protocol.Heartbeat, now time.Time) *nodeEntry {
	n := t.byName[hb.Node]
	if n != nil && n.report == nil && !hb.Bye {
		n.lastHeard = now // it lives, though its lease has not been seen yet
	}
	if n == nil || n.report == nil || n.session != hb.Session {
		return nil // of an agent that was replaced, or that is not known yet
	}
	if hb.Bye {
		n.leased, n.lastHeard, n.departed = false, time.Time{}, true
		return nil
	}
	n.lastHeard = now
	if n.state == NodeLost {
		t.markReturned(n, hb.Session, "it was lost and is back", now)
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

// returns is a node that was not to be relied on for a while: nothing is granted on it before it has reported anew, and
// no device before it was shown clean.
func (t *nodeTable) markReturned(n *nodeEntry, session, why string, now time.Time) {
	n.session, n.verified, n.changed = session, false, true
	n.unverified = map[string]*unverifiedDevice{}
	for _, d := range n.report.Devices {
		n.unverified[d.UUID] = &unverifiedDevice{why: "not shown clean since the node came back", since: now}
	}
	t.renewStamp(n)
	n.setState(NodeUnproven, why, now)
}

func (n *nodeEntry) setState(s NodeState, why string, now time.Time) {
	if n.state != s || n.why != why {
		n.state, n.why, n.since, n.changed = s, why, now, true
	}
}

// learn takes a report of this term. One that was made before the newest question, and was held up on its way, says what
// there is, but proves nothing.
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

// explained reports whether what is on a device is the work of workers that the report names: whether they may be there
// is judged by the ledger.
func (n *nodeEntry) usedByWorkers(uuid string) bool {
	if !n.report.RunningComplete || len(n.report.Foreign[uuid]) > 0 {
		return false
	}
	return slices.ContainsFunc(n.report.Running, func(run protocol.RunningGrant) bool { return grantUses(&run, uuid) })
}

// uses reports whether workers of a grant have a device.
func grantUses(run *protocol.RunningGrant, uuid string) bool {
	return slices.ContainsFunc(run.Devices, func(d protocol.DeviceShare) bool { return d.UUID == uuid })
}

// setStale replaces the devices on which there are workers whose reservations have ended.
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

// lapse marks the devices that were not seen empty for so long that nobody should count on them.
func (n *nodeEntry) expireUnverified(now time.Time) {
	for _, all := range []map[string]*unverifiedDevice{n.unverified, n.stale} {
		for _, u := range all {
			if !u.late && now.Sub(u.since) > maxVerification {
				u.late, n.changed = true, true
			}
		}
	}
}

// inUse reports whether somebody computes on the device. A driver that does not say is believed.
func inUse(d gpu.Device) bool {
	return slices.ContainsFunc(d.Sample.Processes, func(p gpu.Process) bool { return p.Kind == gpu.Compute })
}

// sameNode reports whether two reports are the same to the planner.
func sameResources(a, b *protocol.Report) bool {
	return a.CPUs == b.CPUs && a.Memory == b.Memory && maps.Equal(a.Labels, b.Labels) &&
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

// suspect puts devices on probation, until a report that is made from now on.
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

// judge finds the nodes that are lost and those that are gone: silent, and without a lease. A leader that has not seen
// the leases yet cannot tell.
func (t *nodeTable) findLost(now time.Time) (lost, gone []*nodeEntry) {
	for _, name := range slices.Sorted(maps.Keys(t.byName)) {
		n := t.byName[name]
		silent := now.Sub(n.lastHeard) > t.silence
		left := n.lastHeard.IsZero() && !n.leased && n.report != nil && n.verified // it said good-bye
		switch {
		case n.gone:
		case left:
			gone = append(gone, n)
		case !silent || now.Before(t.judgeFrom) || !t.leasesSeen:
		case !n.leased:
			gone = append(gone, n)
		case n.state != NodeLost:
			n.verified = false
			n.setState(NodeLost, "no heartbeat for "+now.Sub(t.heardSince(n)).Round(time.Second).String(), now)
			lost = append(lost, n)
		}
	}
	return lost, gone
}

// lastHeard is when a node was last heard of, as far as this leader can know.
func (t *nodeTable) heardSince(n *nodeEntry) time.Time {
	if n.lastHeard.IsZero() {
		return t.judgeFrom.Add(-t.lease)
	}
	return n.lastHeard
}

// leave makes a node that is gone absent. Its seat stays until nobody needs it.
func (n *nodeEntry) markGone() {
	n.report, n.leased, n.lastHeard, n.verified, n.session = nil, false, time.Time{}, false, ""
	n.state, n.why = NodeUnproven, "it has not reported yet"
	n.stale, n.killOrders = nil, nil
	n.changed, n.gone = true, true
}

// node is the member as the planner sees it.
func (n *nodeEntry) plannerNode() planner.Node {
	node := planner.Node{
		ID: n.name, Rank: n.rank, Labels: n.report.Labels, CPUs: Wholes(n.report.CPUs), Memory: int64(n.report.Memory),
		State: n.state, Why: n.why, Since: n.since, Cordoned: n.cordons.describe(""), Devices: make([]planner.Device, len(n.report.Devices)),
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

// clearing reports whether a device is unfit only until it was seen empty, which should be soon.
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

func (n *nodeEntry) String() string { return fmt.Sprintf("node %s (%s)", n.name, n.state) }

// NodesOf makes the planner's nodes of reports, in their order: what a leader would see if all of them were ready.
func NodesFromReports(reports []protocol.Report) []planner.Node {
	nodes := make([]planner.Node, len(reports))
	for i := range reports {
		m := nodeEntry{name: reports[i].Node, rank: i, report: &reports[i], state: NodeReady}
		nodes[i] = m.plannerNode()
	}
	return nodes
}
