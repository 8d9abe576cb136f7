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
type roster struct {
	lease   time.Duration
	silence time.Duration
	judgeAt time.Time // nobody is judged before
	members map[string]*member
	cordons map[string]cordons // by node; of those that are away too
	seen    bool               // all leases that there were at the beginning have been seen
	stamps  uint64             // the last stamp of a question
}

// member is one node, by name. It stays for as long as it has a seat in the ledger.
type member struct {
	name   string
	rank   int
	seated bool // its rank is in the ledger

	leased   bool
	departed bool      // its agent has said that it ends
	heard    time.Time // the last beat or lease; zero: never in this term
	session  string
	report   *protocol.Report
	proven   bool // its report was made in this term, and since it was last lost
	asked    time.Time
	stamp    uint64 // of the question that a report must answer to prove anything

	cordons cordons // shared with the roster, which replaces it as a whole
	state   NodeState
	why     string
	since   time.Time

	// probation is the devices that were in use by what has ended without anybody having seen the end: they are unfit
	// until a report that answers the newest question shows nothing on them. stale is the devices on which the newest
	// report shows workers of reservations that the ledger says have ended.
	probation map[string]*unverified
	stale     map[string]*unverified
	ended     []protocol.KillOrder // what its agent is to end, as the newest report shows; asked for until it is gone
	changed   bool                 // the book has not been told yet
	over      bool                 // it is gone, and what that ends has been ended
}

// unverified is a device that has not been seen empty since its last use.
type unverified struct {
	why   string
	since time.Time
	late  bool // it has lasted so long that nobody counts on it
}

func newRoster(lease, silence time.Duration, now time.Time) *roster {
	return &roster{
		lease: lease, silence: silence, judgeAt: now.Add(lease), members: map[string]*member{}, cordons: map[string]cordons{},
		stamps: uint64(now.UnixMicro()), // another than those of the leader before
	}
}

// calm starts the time in which nobody is judged anew: the server was away, and so nobody could be heard.
func (r *roster) calm(now time.Time) { r.judgeAt = now.Add(r.lease) }

// settling reports whether nodes that were there before may still come back, so that nothing is impossible yet.
func (r *roster) settling(now time.Time) bool {
	if !now.Before(r.judgeAt) {
		return false
	}
	if !r.seen {
		return true
	}
	for _, m := range r.members {
		if !m.present() || !m.proven {
			return true
		}
	}
	return false
}

// question makes the next question to a node a new one: only a report that was made after it proves anything.
func (r *roster) question(m *member) {
	r.stamps++
	m.stamp, m.asked = r.stamps, time.Time{}
}

// answered reports whether the newest report of the node was made after the newest question. An agent of a version that
// does not answer stamps is believed.
func (m *member) answered() bool {
	return m.report != nil && (m.report.Answered == 0 || m.report.Answered == m.stamp)
}

// present reports whether the node belongs in the book.
func (m *member) present() bool { return m.report != nil && m.seated }

// sit enters a node with its rank as the ledger has it.
func (r *roster) sit(name string, rank int) *member {
	m := &member{name: name, rank: rank, seated: true, cordons: r.cordons[name], state: NodeUnproven, why: "it has not reported yet"}
	r.question(m)
	r.members[name] = m
	return m
}

// newcomer gives a node that is not known the lowest rank that is free. It is seated once that is in the ledger.
func (r *roster) newcomer(name string) *member {
	taken := map[int]bool{}
	for _, m := range r.members {
		taken[m.rank] = true
	}
	rank := 0
	for taken[rank] {
		rank++
	}
	m := r.sit(name, rank)
	m.seated = false
	return m
}

// leaseTaken is a lease that was seen in the bucket: at the beginning, at a renewal, or because the node is new.
func (r *roster) leaseTaken(report *protocol.Report, now time.Time) *member {
	m := r.members[report.Node]
	if m == nil {
		m = r.newcomer(report.Node)
		m.report = report
		r.returns(m, report.Session, "it has not reported yet", now) // it may have been here before, and nobody remembers
	}
	switch {
	case m.report == nil && m.over:
		m.report = report
		r.returns(m, report.Session, "it was gone and is back", now)
	case m.report == nil:
		m.report, m.session, m.changed = report, report.Session, true
		m.set(NodeUnproven, "it has not reported yet", now)
	case m.session != report.Session:
		m.report = report
		r.returns(m, report.Session, "another agent of that name has come", now)
	}
	m.leased, m.over, m.departed = true, false, false
	return m
}

// leaseGone is a lease that has expired or was given up.
func (r *roster) leaseGone(name string) {
	if m := r.members[name]; m != nil {
		m.leased = false
	}
}

// beat is a sign of life. Nodes are introduced by their lease, so one that has none yet is not known.
func (r *roster) beat(b *protocol.Heartbeat, now time.Time) *member {
	m := r.members[b.Node]
	if m != nil && m.report == nil && !b.Bye {
		m.heard = now // it lives, though its lease has not been seen yet
	}
	if m == nil || m.report == nil || m.session != b.Session {
		return nil // of an agent that was replaced, or that is not known yet
	}
	if b.Bye {
		m.leased, m.heard, m.departed = false, time.Time{}, true
		return nil
	}
	m.heard = now
	if m.state == NodeLost {
		r.returns(m, b.Session, "it was lost and is back", now)
	}
	if b.Report != nil && b.Report.Seq >= m.report.Seq {
		m.learn(b.Report, now)
	}
	return m
}

func (r *roster) isLost(name string) bool {
	m := r.members[name]
	return m != nil && m.state == NodeLost
}

// returns is a node that was not to be relied on for a while: nothing is granted on it before it has reported anew, and
// no device before it was shown clean.
func (r *roster) returns(m *member, session, why string, now time.Time) {
	m.session, m.proven, m.changed = session, false, true
	m.probation = map[string]*unverified{}
	for _, d := range m.report.Devices {
		m.probation[d.UUID] = &unverified{why: "not shown clean since the node came back", since: now}
	}
	r.question(m)
	m.set(NodeUnproven, why, now)
}

func (m *member) set(s NodeState, why string, now time.Time) {
	if m.state != s || m.why != why {
		m.state, m.why, m.since, m.changed = s, why, now, true
	}
}

// learn takes a report of this term. One that was made before the newest question, and was held up on its way, says what
// there is, but proves nothing.
func (m *member) learn(report *protocol.Report, now time.Time) {
	before := m.report
	m.report = report
	if m.answered() {
		for _, d := range report.Devices {
			if _, waits := m.probation[d.UUID]; waits && (!inUse(d) || m.explained(d.UUID)) {
				delete(m.probation, d.UUID)
				m.changed = true
			}
		}
		if !m.proven {
			m.proven = true
			m.set(NodeReady, "", now)
		}
	}
	m.changed = m.changed || !sameNode(before, report)
}

// explained reports whether what is on a device is the work of workers that the report names: whether they may be there
// is judged by the ledger.
func (m *member) explained(uuid string) bool {
	if !m.report.RunningComplete || len(m.report.Foreign[uuid]) > 0 {
		return false
	}
	return slices.ContainsFunc(m.report.Running, func(run protocol.RunningGrant) bool { return uses(&run, uuid) })
}

// uses reports whether workers of a grant have a device.
func uses(run *protocol.RunningGrant, uuid string) bool {
	return slices.ContainsFunc(run.Devices, func(d protocol.DeviceShare) bool { return d.UUID == uuid })
}

// setStale replaces the devices on which there are workers whose reservations have ended.
func (m *member) setStale(why map[string]string, now time.Time) {
	for uuid := range m.stale {
		if _, still := why[uuid]; !still {
			delete(m.stale, uuid)
			m.changed = true
		}
	}
	for uuid, words := range why {
		if old := m.stale[uuid]; old != nil && old.why == words {
			continue
		}
		if m.stale == nil {
			m.stale = map[string]*unverified{}
		}
		m.stale[uuid], m.changed = &unverified{why: words, since: now}, true
	}
}

// lapse marks the devices that were not seen empty for so long that nobody should count on them.
func (m *member) lapse(now time.Time) {
	for _, all := range []map[string]*unverified{m.probation, m.stale} {
		for _, u := range all {
			if !u.late && now.Sub(u.since) > verifyMost {
				u.late, m.changed = true, true
			}
		}
	}
}

// inUse reports whether somebody computes on the device. A driver that does not say is believed.
func inUse(d gpu.Device) bool {
	return slices.ContainsFunc(d.Sample.Processes, func(p gpu.Process) bool { return p.Kind == gpu.Compute })
}

// sameNode reports whether two reports are the same to the planner.
func sameNode(a, b *protocol.Report) bool {
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
func (r *roster) suspect(slots []Slot, why string, now time.Time) {
	for _, slot := range slots {
		m := r.members[slot.Node]
		if m == nil {
			continue
		}
		if m.probation == nil {
			m.probation = map[string]*unverified{}
		}
		m.probation[slot.UUID], m.changed = &unverified{why: why, since: now}, true
		r.question(m)
	}
}

// judge finds the nodes that are lost and those that are gone: silent, and without a lease. A leader that has not seen
// the leases yet cannot tell.
func (r *roster) judge(now time.Time) (lost, gone []*member) {
	for _, name := range slices.Sorted(maps.Keys(r.members)) {
		m := r.members[name]
		silent := now.Sub(m.heard) > r.silence
		left := m.heard.IsZero() && !m.leased && m.report != nil && m.proven // it said good-bye
		switch {
		case m.over:
		case left:
			gone = append(gone, m)
		case !silent || now.Before(r.judgeAt) || !r.seen:
		case !m.leased:
			gone = append(gone, m)
		case m.state != NodeLost:
			m.proven = false
			m.set(NodeLost, "no heartbeat for "+now.Sub(r.lastHeard(m)).Round(time.Second).String(), now)
			lost = append(lost, m)
		}
	}
	return lost, gone
}

// lastHeard is when a node was last heard of, as far as this leader can know.
func (r *roster) lastHeard(m *member) time.Time {
	if m.heard.IsZero() {
		return r.judgeAt.Add(-r.lease)
	}
	return m.heard
}

// leave makes a node that is gone absent. Its seat stays until nobody needs it.
func (m *member) leave() {
	m.report, m.leased, m.heard, m.proven, m.session = nil, false, time.Time{}, false, ""
	m.state, m.why = NodeUnproven, "it has not reported yet"
	m.stale, m.ended = nil, nil
	m.changed, m.over = true, true
}

// node is the member as the planner sees it.
func (m *member) node() planner.Node {
	n := planner.Node{
		ID: m.name, Rank: m.rank, Labels: m.report.Labels, CPUs: Wholes(m.report.CPUs), Memory: int64(m.report.Memory),
		State: m.state, Why: m.why, Since: m.since, Cordoned: m.cordons.words(""), Devices: make([]planner.Device, len(m.report.Devices)),
	}
	if one, closed := m.cordons[""]; closed && m.state == NodeReady {
		n.Since = one.Since
	}
	islands := gpu.Islands(m.report.Devices)
	for i, d := range m.report.Devices {
		n.Devices[i] = planner.Device{UUID: d.UUID, Index: d.Index, NUMA: numa(d), Island: islands[i], Unfit: m.unfit(d), Clearing: m.clearing(d), Cordoned: m.cordons.words(d.UUID)}
	}
	return n
}

func (m *member) unfit(d gpu.Device) string {
	reasons := m.report.Unfit(d)
	for _, all := range []map[string]*unverified{m.stale, m.probation} {
		if u := all[d.UUID]; u != nil {
			reasons = append(reasons, u.why)
		}
	}
	return strings.Join(reasons, "; ")
}

// clearing reports whether a device is unfit only until it was seen empty, which should be soon.
func (m *member) clearing(d gpu.Device) bool {
	stale, probation := m.stale[d.UUID], m.probation[d.UUID]
	if stale == nil && probation == nil || len(m.report.Unfit(d)) > 0 {
		return false
	}
	return (stale == nil || !stale.late) && (probation == nil || !probation.late)
}

func (m *member) status() NodeStatus {
	s := NodeStatus{Rank: m.rank, State: m.state, Why: m.why, Cordons: m.cordons.list()}
	for _, all := range []map[string]*unverified{m.probation, m.stale} {
		for uuid, u := range all {
			if s.Unverified == nil {
				s.Unverified = map[string]string{}
			}
			s.Unverified[uuid] = u.why
		}
	}
	if m.report != nil {
		s.Report = *m.report
	} else {
		s.Report.Node = m.name
	}
	return s
}

func (m *member) String() string { return fmt.Sprintf("node %s (%s)", m.name, m.state) }

// NodesOf makes the planner's nodes of reports, in their order: what a leader would see if all of them were ready.
func NodesOf(reports []protocol.Report) []planner.Node {
	nodes := make([]planner.Node, len(reports))
	for i := range reports {
		m := member{name: reports[i].Node, rank: i, report: &reports[i], state: NodeReady}
		nodes[i] = m.node()
	}
	return nodes
}
