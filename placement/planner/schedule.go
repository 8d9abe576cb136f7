package planner

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"troupe/placement/internal/text"
)

// Decision is the result of one pass over a queue. Every request, or instance of one, is in exactly one of Grants,
// Waits and Refusals, each in the order of the queue.
type Decision struct {
	Grants      []Grant      `json:"grants,omitempty" msgpack:"grants,omitempty"`
	Preemptions []Preemption `json:"preemptions,omitempty" msgpack:"preemptions,omitempty"`
	Waits       []Wait       `json:"waits,omitempty" msgpack:"waits,omitempty"`
	Refusals    []Refusal    `json:"refusals,omitempty" msgpack:"refusals,omitempty"`
}

// Grant is a request to grant now.
type Grant struct {
	Reservation    Reservation `json:"reservation" msgpack:"reservation"`
	Unmet          string      `json:"unmet,omitempty" msgpack:"unmet,omitempty"`   // as in Plan
	BackfilledPast string      `json:"passed,omitempty" msgpack:"passed,omitempty"` // the head of the queue, if the request was granted out of turn
}

// Preemption asks for the eviction of reservations. The owner of the planner notifies the holders and sets Leaving;
// reservations that are leaving already are not listed.
type Preemption struct {
	For     string   `json:"for" msgpack:"for"`
	Victims []string `json:"victims" msgpack:"victims"` // by age
}

// Wait is a request that stays in the queue, with the cause.
type Wait struct {
	ID       string     `json:"id" msgpack:"id"`
	Code     WaitCode   `json:"code" msgpack:"code"`
	Text     string     `json:"text" msgpack:"text"`
	Behind   string     `json:"behind,omitempty" msgpack:"behind,omitempty"`       // the head of the queue, for WaitBehind
	WaitsFor []Obstacle `json:"waits_for,omitempty" msgpack:"waits_for,omitempty"` // for WaitCapacity; Planner.Plan returns them for any request
}

// WaitCode is the kind of a Wait.
type WaitCode string

const (
	WaitCapacity WaitCode = "capacity" // the request is the head of the queue: it is granted as soon as it fits
	WaitBehind   WaitCode = "behind"   // it does not fit next to the reserve for the head
	WaitQuota    WaitCode = "quota"    // the namespace has reached its quota
	WaitNodes    WaitCode = "nodes"    // it fits only on nodes that are not there yet
	WaitParent   WaitCode = "parent"   // it waits for the parent, or for room in a bundle of the parent
	WaitLedger   WaitCode = "ledger"   // the ledger has lost data: nothing is granted until that is resolved
)

// Refusal is a request that leaves the queue: it is invalid or never fits.
type Refusal struct {
	ID  string `json:"id" msgpack:"id"`
	Err error  `json:"-"` // a *RequestError, a *NoCapacityError or a *QuotaError
}

// Schedule returns Planner.Schedule of a snapshot.
func Schedule(s Snapshot, queue []Queued, p Policy) (Decision, error) {
	pl, err := New(s)
	if err != nil {
		return Decision{}, err
	}
	return pl.Schedule(queue, p), nil
}

// Schedule decides on a queue by priority and age. The first request that does not fit is the head: the free part of
// the resources it will use is reserved for it, and requests behind it are granted only on what remains. So backfilling
// never delays the head. Requests that are opportunistic or do not wait are never the head.
//
// The planner is unchanged; its owner adds the grants with Grant once they are committed.
func (pl *Planner) Schedule(queue []Queued, p Policy) Decision {
	s := queuePass{planner: pl, policy: p, backfillLeft: p.WithDefaults().BackfillDepth, quotaWaits: map[string]*QuotaError{}, queued: map[string]bool{}}
	defer s.undo()
	for i := range queue {
		s.queued[queue[i].Request.ID] = true
	}
	line := sortQueue(queue)
	for i := range line {
		if gang := line[i].Request.Gang; gang.Name == "" {
			s.consider(&line[i])
		} else if members := membersOf(line, &line[i].Request); members[0] == &line[i] {
			s.considerGang(members)
		}
	}
	return s.decision
}

// queuePass is the state of one pass over a queue.
type queuePass struct {
	planner  *Planner
	policy   Policy
	decision Decision

	head         *gang                  // the first request that does not fit; nil: all fit so far
	reserve      headReserve            // for the head
	quotaWaits   map[string]*QuotaError // namespaces in which a request waits for the quota
	unplaceable  []*gang                // requests that do not fit next to the reserve
	queued       map[string]bool        // the ids of all requests in the queue
	backfillLeft int                    // requests behind the head that are still tried
}

// undo restores the planner.
func (s *queuePass) undo() {
	s.reserve.release(s.planner)
	for _, g := range s.decision.Grants {
		s.planner.Release(g.Reservation.ID)
	}
}

// consider decides on the next request of the queue.
func (s *queuePass) consider(q *Queued) {
	g, err := s.planner.prepare(&q.Request)
	if err != nil && s.parentMayCome(q, err) {
		s.decision.Waits = append(s.decision.Waits, Wait{ID: q.Request.ID, Code: WaitParent, Text: "it waits for reservation " + text.Clip(q.Request.Parent)})
		return
	}
	if err != nil {
		s.refuse(&q.Request, err)
		return
	}
	if g.parent != nil {
		s.considerInParent(q, g)
		return
	}
	if over := s.overQuota(g.request); over != nil {
		s.waitForQuota(q, g, over)
		return
	}
	if s.head != nil && s.skips(g) {
		s.waitBehind(q, g)
		return
	}
	yields := g.request.Opportunistic || q.Try
	if yields && slices.ContainsFunc(s.unplaceable, g.sameDemand) {
		s.waitOpportunistically(q, g)
		return
	}
	switch placement, ok := s.planner.place(g); {
	case ok:
		s.grant(g, placement)
	case yields && s.head == nil:
		s.unplaceable = append(s.unplaceable, g)
		s.waitOpportunistically(q, g)
	case s.head != nil:
		s.unplaceable = append(s.unplaceable, g)
		s.waitBehind(q, g)
	default:
		s.becomeHead(g)
	}
}

// membersOf returns the requests of one gang, in the order of the queue.
func membersOf(line []Queued, r *Request) []*Queued {
	var members []*Queued
	for i := range line {
		if other := &line[i].Request; other.Gang.Name == r.Gang.Name && other.Namespace == r.Namespace {
			members = append(members, &line[i])
		}
	}
	return members
}

// considerGang grants the requests of a gang together, or leaves all of them waiting. Nothing is reserved for them.
func (s *queuePass) considerGang(members []*Queued) {
	before := len(s.decision.Grants)
	whole, refused := len(members) >= members[0].Request.Gang.Size, map[string]bool{}
	for _, q := range members {
		g, err := s.planner.prepare(&q.Request)
		if err != nil {
			s.refuse(&q.Request, err)
			whole, refused[q.Request.ID] = false, true
			continue
		}
		placement, fits := s.planner.place(g)
		if whole = whole && fits && s.overQuota(&q.Request) == nil; whole {
			s.grant(g, placement)
		}
	}
	if whole {
		return
	}
	s.undoGrants(before)
	for _, q := range members {
		if gang := q.Request.Gang; !refused[q.Request.ID] {
			s.decision.Waits = append(s.decision.Waits, Wait{ID: q.Request.ID, Code: WaitCapacity,
				Text: fmt.Sprintf("it is granted as soon as all %s of gang %s fit", plural(gang.Size, "request"), text.Clip(gang.Name))})
		}
	}
}

// undoGrants takes back the grants of this pass after the first n.
func (s *queuePass) undoGrants(n int) {
	for _, g := range s.decision.Grants[n:] {
		s.planner.Release(g.Reservation.ID)
	}
	s.decision.Grants = s.decision.Grants[:n]
}

// parentGrace is how long a request may wait for a parent that is neither granted nor queued: the requests of one client
// may arrive out of order.
const parentGrace = 10 * time.Second

// parentMayCome reports whether the only error of a request is that its parent is not granted yet.
func (s *queuePass) parentMayCome(q *Queued, err error) bool {
	var unknown *RequestError
	if q.Request.Parent == "" || !errors.As(err, &unknown) || unknown.Problem != ErrUnknownReservation {
		return false
	}
	return s.queued[q.Request.Parent] || s.planner.Now.Sub(q.Since) < parentGrace
}

// considerInParent grants a request from a bundle of its parent, or leaves it waiting for one. It takes nothing from the
// nodes, so it neither becomes the head nor waits behind it.
func (s *queuePass) considerInParent(q *Queued, g *gang) {
	if placement, ok := s.planner.place(g); ok {
		s.grant(g, placement)
		return
	}
	s.decision.Waits = append(s.decision.Waits, Wait{ID: q.Request.ID, Code: WaitParent, Text: g.parentWaitText()})
}

// waitOpportunistically leaves a request waiting without a reserve, or refuses one that never fits.
func (s *queuePass) waitOpportunistically(q *Queued, g *gang) {
	if !q.Admitted && !g.request.AwaitNodes {
		if reasons, possible := s.planner.canEverFit(g); !possible {
			s.refuseImpossible(g, reasons)
			return
		}
	}
	s.decision.Waits = append(s.decision.Waits, Wait{ID: q.Request.ID, Code: WaitCapacity, Text: "it is granted as soon as it fits"})
}

// overQuota returns an error if the request exceeds the quota of its namespace. Once one request of a namespace waits
// for the quota, later ones of the namespace wait too: they would take what it waits for.
func (s *queuePass) overQuota(r *Request) *QuotaError {
	over := s.policy.overQuota(r, s.planner.usage[r.Namespace])
	if over == nil && r.Devices() > 0 {
		over = s.quotaWaits[r.Namespace]
	}
	return over
}

func (s *queuePass) waitForQuota(q *Queued, g *gang, over *QuotaError) {
	if errors.Is(over, ErrNeverFits) {
		s.refuse(g.request, over)
		return
	}
	if !q.Try {
		s.quotaWaits[over.Namespace] = over
	}
	s.wait(q, g, Wait{Code: WaitQuota, Text: over.Error()})
}

// skips reports whether a request behind the head is not tried: the backfill depth is used up, or an equal request did
// not fit. Colocated requests are always tried, because the head may wait for the work they belong to.
func (s *queuePass) skips(g *gang) bool {
	if g.colocated != nil {
		return false
	}
	s.backfillLeft--
	return s.backfillLeft < 0 || slices.ContainsFunc(s.unplaceable, g.sameDemand)
}

// grant adds the request to the planner for the rest of the pass.
func (s *queuePass) grant(g *gang, p gangPlacement) {
	r := grantedPlan(p, g).Reservation(*g.request, s.planner.Now)
	if err := s.planner.Grant(r); err != nil {
		s.refuse(g.request, err)
		return
	}
	s.decision.Grants = append(s.decision.Grants, Grant{Reservation: r, Unmet: p.unmet, BackfilledPast: s.headID()})
}

// becomeHead reserves what the request will need, and preempts for it if the policy allows.
func (s *queuePass) becomeHead(g *gang) {
	analysis, possible := s.planner.analyzeWait(g, analysisScope{})
	if !possible {
		s.refuseImpossible(g, analysis.reasons)
		return
	}
	if s.policy.Preempt {
		analysis = s.preempt(g, analysis)
	}
	s.head = g
	s.reserve = s.planner.reserveForHead(analysis.workers, g.request)
	s.decision.Waits = append(s.decision.Waits, Wait{
		ID:       g.request.ID,
		Code:     WaitCapacity,
		Text:     "it is the head of the queue and is granted as soon as it fits",
		WaitsFor: analysis.waitsFor(),
	})
}

// preempt selects victims of lower priority if their eviction suffices; otherwise it returns the given analysis.
// Reservations that are leaving and devices that only wait for verification count as available first, so the victims of
// one request suffice until it is granted.
func (s *queuePass) preempt(g *gang, analysis waitAnalysis) waitAnalysis {
	sc := analysisScope{preempt: true, belowPriority: g.request.Priority}
	lower, possible := s.planner.analyzeWait(g, sc)
	if !possible {
		return analysis
	}
	victims := s.planner.victims(lower)
	if len(victims) > 1 {
		sc.fewest = true
		if other, possible := s.planner.analyzeWait(g, sc); possible && betterVictims(s.planner.victims(other), victims) {
			lower, victims = other, s.planner.victims(other)
		}
	}
	if len(victims) > 0 {
		p := Preemption{For: g.request.ID}
		for _, alloc := range victims {
			p.Victims = append(p.Victims, alloc.ID)
		}
		s.decision.Preemptions = append(s.decision.Preemptions, p)
	}
	return lower
}

// victims returns the reservations that the analysis needs gone and that are not leaving yet, by age.
func (pl *Planner) victims(analysis waitAnalysis) []*allocation {
	var victims []*allocation
	for _, alloc := range pl.allocations {
		if !alloc.Leaving && analysis.includes(alloc) {
			victims = append(victims, alloc)
		}
	}
	return victims
}

// betterVictims reports whether the first set of victims is better: fewer, then a lower maximum priority.
func betterVictims(these, those []*allocation) bool {
	highest := func(all []*allocation) int {
		most := all[0].Priority
		for _, alloc := range all {
			most = max(most, alloc.Priority)
		}
		return most
	}
	if len(these) != len(those) || len(these) == 0 {
		return len(these) < len(those)
	}
	return highest(these) < highest(those)
}

// refuseImpossible refuses a request that never fits.
func (s *queuePass) refuseImpossible(g *gang, reasons []Reason) {
	err := s.planner.checkInventory(g)
	if err == nil {
		err = &NoCapacityError{Never: true, Reasons: reasons}
	}
	s.refuse(g.request, err)
}

// refuse removes a request from the queue, unless it waits for more nodes.
func (s *queuePass) refuse(r *Request, err error) {
	if r.AwaitNodes && (fixableByNodes(err) || errors.Is(err, ErrNeverFits)) {
		s.decision.Waits = append(s.decision.Waits, Wait{ID: r.ID, Code: WaitNodes, Text: err.Error()})
		return
	}
	s.decision.Refusals = append(s.decision.Refusals, Refusal{ID: r.ID, Err: err})
}

func (s *queuePass) waitBehind(q *Queued, g *gang) {
	s.wait(q, g, Wait{Code: WaitBehind, Behind: s.headID(), Text: "it does not fit next to what is reserved for " + s.headID()})
}

// headID returns the id of the head; empty if all requests fit so far.
func (s *queuePass) headID() string {
	if s.head == nil {
		return ""
	}
	return s.head.request.ID
}

// wait leaves a request in the queue if it can ever be granted, and refuses it otherwise.
func (s *queuePass) wait(q *Queued, g *gang, w Wait) {
	if !q.Admitted {
		s.reserve.apply(-1)
		reasons, possible := s.planner.canEverFit(g)
		s.reserve.apply(+1)
		if !possible {
			s.refuseImpossible(g, reasons)
			return
		}
	}
	w.ID = g.request.ID
	s.decision.Waits = append(s.decision.Waits, w)
}
