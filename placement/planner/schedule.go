package planner

import (
	"errors"
	"slices"
)

// Decision is what a pass over a queue comes to. Every request, or instance of one, is in exactly one of Grants, Waits
// and Refusals, each list in the order of the queue.
type Decision struct {
	Grants      []Grant      `json:"grants,omitempty" msgpack:"grants,omitempty"`
	Preemptions []Preemption `json:"preemptions,omitempty" msgpack:"preemptions,omitempty"`
	Waits       []Wait       `json:"waits,omitempty" msgpack:"waits,omitempty"`
	Refusals    []Refusal    `json:"refusals,omitempty" msgpack:"refusals,omitempty"`
}

// Grant is a request that is to be granted now.
type Grant struct {
	Reservation    Reservation `json:"reservation" msgpack:"reservation"`
	Unmet          string      `json:"unmet,omitempty" msgpack:"unmet,omitempty"`   // as in Plan
	BackfilledPast string      `json:"passed,omitempty" msgpack:"passed,omitempty"` // the head of the queue that it went past
}

// Preemption asks for reservations to be told to go. Whoever tells them marks them as Leaving; those that are leaving
// already are not named again.
type Preemption struct {
	For     string   `json:"for" msgpack:"for"`
	Victims []string `json:"victims" msgpack:"victims"` // by age
}

// Wait is a request that stays in the queue, and why.
type Wait struct {
	ID       string     `json:"id" msgpack:"id"`
	Code     WaitCode   `json:"code" msgpack:"code"`
	Text     string     `json:"text" msgpack:"text"`
	Behind   string     `json:"behind,omitempty" msgpack:"behind,omitempty"`       // the head of the queue, for WaitBehind
	WaitsFor []Obstacle `json:"waits_for,omitempty" msgpack:"waits_for,omitempty"` // for WaitCapacity; Book.Plan has them for any request
}

// WaitCode says what kind of wait it is.
type WaitCode string

const (
	WaitCapacity WaitCode = "capacity" // it is the head of the queue: the next that fits
	WaitBehind   WaitCode = "behind"   // there is no room beside what is kept for the head
	WaitQuota    WaitCode = "quota"    // its namespace holds as much as it may
	WaitNodes    WaitCode = "nodes"    // it could only fit on nodes that are yet to come
	WaitLedger   WaitCode = "ledger"   // the ledger has lost something: nothing is granted until that is resolved
)

// Refusal is a request that must leave the queue: it makes no sense or can never fit.
type Refusal struct {
	ID  string `json:"id" msgpack:"id"`
	Err error  `json:"-"` // a *RequestError, a *NoCapacityError or a *QuotaError
}

// Schedule is Book.Schedule on a snapshot.
func Schedule(s Snapshot, queue []Queued, p Policy) (Decision, error) {
	pl, err := New(s)
	if err != nil {
		return Decision{}, err
	}
	return pl.Schedule(queue, p), nil
}

// Schedule goes through a queue by priority and age and says who gets what now. The first request that finds no room
// is the head: the room that it will have once what it waits for is gone is kept for it, and those behind it are
// granted only what lies beside. So nothing passes the head that would make it wait longer.
//
// The book is left as it was; whoever owns it enters the grants with Grant once they are committed.
func (pl *Planner) Schedule(queue []Queued, p Policy) Decision {
	s := queuePass{planner: pl, policy: p, backfillLeft: p.WithDefaults().BackfillDepth, quotaWaits: map[string]*QuotaError{}}
	defer s.undo()
	for _, q := range sortQueue(queue) {
		s.consider(&q)
	}
	return s.decision
}

// pass is one pass over a queue.
type queuePass struct {
	planner  *Planner
	policy   Policy
	decision Decision

	head         *gang                  // the first that found no room; nil while everything fits
	reserve      headReserve            // what is kept for it
	quotaWaits   map[string]*QuotaError // namespaces of which a request waits for the quota
	unplaceable  []*gang                // what found no room beside the earmark
	backfillLeft int                    // how many more are tried behind the head
}

// undo takes back what the pass tried out.
func (s *queuePass) undo() {
	s.reserve.release(s.planner)
	for _, g := range s.decision.Grants {
		s.planner.Release(g.Reservation.ID)
	}
}

// consider decides on the next request in the queue.
func (s *queuePass) consider(q *Queued) {
	g, err := s.planner.prepare(&q.Request)
	if err != nil {
		s.refuse(&q.Request, err)
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
	switch placement, ok := s.planner.place(g); {
	case ok:
		s.grant(g, placement)
	case s.head != nil:
		s.unplaceable = append(s.unplaceable, g)
		s.waitBehind(q, g)
	default:
		s.becomeHead(g)
	}
}

// overQuota is why the request exceeds the quota of its namespace, if it does. Once one request of a namespace waits
// for the quota, those behind it do too: they would take what it waits for.
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
	s.quotaWaits[over.Namespace] = over
	s.wait(q, g, Wait{Code: WaitQuota, Text: over.Error()})
}

// passesBy reports whether a request behind the head is not even tried: the pass has tried enough, or the same in vain.
// What is laid over a reservation is always tried, because the head may be waiting for that to get on with its work.
func (s *queuePass) skips(g *gang) bool {
	if g.colocated != nil {
		return false
	}
	s.backfillLeft--
	return s.backfillLeft < 0 || slices.ContainsFunc(s.unplaceable, g.sameDemand)
}

// grant enters the request into the book for the rest of the pass.
func (s *queuePass) grant(g *gang, p gangPlacement) {
	r := grantedPlan(p, g).Reservation(*g.request, s.planner.Now)
	if err := s.planner.Grant(r); err != nil {
		s.refuse(g.request, err)
		return
	}
	s.decision.Grants = append(s.decision.Grants, Grant{Reservation: r, Unmet: p.unmet, BackfilledPast: s.headID()})
}

// becomeHead keeps for the request what it will need, and sends away whoever may be sent away for it.
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
		Text:     "it is next, once what it waits for is gone",
		WaitsFor: analysis.waitsFor(),
	})
}

// preempt asks for reservations of a lower priority to go, if that is enough; otherwise it is o that is waited for. Those
// that are leaving anyway are counted on first, and so are devices whose last holders have gone and that have only to be
// seen empty: so whoever was sent away for a request suffices until the request is granted.
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

// victims are the reservations that an outlook needs to be gone and that have not been told to go, by age.
func (pl *Planner) victims(analysis waitAnalysis) []*allocation {
	var victims []*allocation
	for _, alloc := range pl.allocations {
		if !alloc.Leaving && analysis.includes(alloc) {
			victims = append(victims, alloc)
		}
	}
	return victims
}

// preferred reports whether one set of victims is to be preferred to another: the fewer, then the lower their highest
// priority.
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

// refuseImpossible ends a request that nothing would be enough for.
func (s *queuePass) refuseImpossible(g *gang, reasons []Reason) {
	err := s.planner.checkInventory(g)
	if err == nil {
		err = &NoCapacityError{Never: true, Reasons: reasons}
	}
	s.refuse(g.request, err)
}

// refuse ends a request, unless it waits for the nodes that would make it possible.
func (s *queuePass) refuse(r *Request, err error) {
	if r.AwaitNodes && (fixableByNodes(err) || errors.Is(err, ErrNeverFits)) {
		s.decision.Waits = append(s.decision.Waits, Wait{ID: r.ID, Code: WaitNodes, Text: err.Error()})
		return
	}
	s.decision.Refusals = append(s.decision.Refusals, Refusal{ID: r.ID, Err: err})
}

func (s *queuePass) waitBehind(q *Queued, g *gang) {
	s.wait(q, g, Wait{Code: WaitBehind, Behind: s.headID(), Text: "there is no room beside what is kept for " + s.headID()})
}

// headID is the head of the queue; empty while everything fits.
func (s *queuePass) headID() string {
	if s.head == nil {
		return ""
	}
	return s.head.request.ID
}

// wait leaves a request in the queue, if it can ever be granted.
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
