package sessions

import (
	"slices"
	"time"

	"troupe/roles/sessions/book"
)

const (
	pollEvery   = 500 * time.Millisecond // of what has no event
	returnGrace = 15 * time.Second       // for the nodes of an earlier service to return
)

var withdrawn = &book.RefusedError{Text: "the request was withdrawn"}

// holder describes who holds resources, for those that wait for them.
func (s *service) holder(job, what, name string) string {
	text := "ray job " + job + ": " + what
	if name != "" {
		text += " " + name
	}
	return text
}

// request asks for resources; then is called with the decision.
func (s *service) request(r book.Request, then func(grant)) {
	s.requests[r.Key] = then
	s.book.Request(r)
}

// release gives back what a key holds, or withdraws its request.
func (s *service) release(key string) {
	delete(s.requests, key)
	s.book.Release(key)
}

// decided carries out decisions. nodeDied: what was evicted ran on a node that is gone.
func (s *service) decided(d book.Decisions, nodeDied bool) {
	for _, a := range d.Granted {
		if then := s.requests[a.Key]; then != nil {
			delete(s.requests, a.Key)
			then(grant{allocation: a})
		} else {
			s.later(func() { s.do(func() { s.release(a.Key) }) }) // nothing waits for it any more
		}
	}
	for _, r := range d.Refused {
		if then := s.requests[r.Key]; then != nil {
			delete(s.requests, r.Key)
			then(grant{refused: r.Why})
		}
	}
	for _, id := range slices.Concat(d.Created, d.Removed) {
		s.groupChanged(id)
	}
	reason := reasonGroupRemoved
	if nodeDied {
		reason = reasonNodeDied
	}
	for _, key := range d.Evicted {
		s.evict(key, reason)
	}
}

// needsOf says whether requests and groups of a process wait, and which of their demands no node could hold.
func (s *service) needsOf(process string) map[string]any {
	waits, infeasible := false, []map[string]float64{}
	for _, need := range s.book.Needs() {
		if s.ownerOf(need.Key) != process {
			continue
		}
		waits = true
		if !need.Feasible {
			infeasible = append(infeasible, need.Demand)
		}
	}
	return map[string]any{"waits": waits, "infeasible": infeasible}
}

// ownerOf is the process that asked for the resources of a key, or created the group of that id; empty: it is not known.
func (s *service) ownerOf(key string) string {
	if q := s.asking[key]; q != nil {
		return q.c.caller
	}
	if a := s.actors[key]; a != nil {
		return a.spec.Owner
	}
	if g := s.book.Group(key); g != nil {
		return g.Owner
	}
	return ""
}

// evict ends the actor or the lease whose resources are gone.
func (s *service) evict(key, reason string) {
	if a := s.actors[key]; a != nil {
		if reason == reasonNodeDied {
			s.processLost(a, a.role, reason)
		} else {
			s.endActor(a, reason, false)
		}
	} else if w := s.leases[key]; w != nil {
		s.endWorker(w)
	} else {
		for _, w := range s.workers {
			if w.lease == key { // it starts
				s.endWorker(w)
			}
		}
	}
}

// takeNodes takes over the nodes that the head knows.
func (s *service) takeNodes() {
	known := s.book.Known()
	s.book.SetNodes(s.meta.Address, s.restored && time.Since(s.began) < returnGrace) // agents of an earlier head return one after the other
	if now := s.book.Known(); !slices.Equal(known, now) {
		s.meta.Nodes = now
		s.store.dirty(metaKey)
	}
	for _, j := range s.jobs {
		s.tellEnded(j) // a node may have died
	}
}

func (s *service) refreshAsked(c *call) error {
	s.takeNodes()
	c.reply(nil)
	return nil
}
