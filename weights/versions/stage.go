package versions

import (
	"fmt"
	"slices"
	"time"

	"troupe/bus/wire"
)

const maxWaiting = 100_000 // requests that wait for a version

// waiting is a request for a version that is not complete.
type waiting struct {
	to      any
	member  string
	version Version // zero: the next one
	request StageRequest
}

// Stage answers with where a receiver finds a version, as soon as that is known.
func (s *State) Stage(now time.Time, to any, id string, r StageRequest) {
	m := s.need(to, id)
	if m == nil {
		return
	}
	v, err := s.wanted(r.Version)
	switch {
	case err != nil:
		s.refuse(to, err)
	case v != nil && v.isComplete():
		s.stage(now, to, m, v, r)
		s.settle(now)
	case len(s.waiting) >= maxWaiting:
		s.refuse(to, wire.Errorf(wire.CodeBusy, "weights %q: %d requests wait for a version already", s.name, len(s.waiting)))
	default:
		s.waiting = append(s.waiting, waiting{to: to, member: id, version: r.Version, request: r})
	}
}

// wanted is the version that a request is for; nil: it is not there yet.
func (s *State) wanted(v Version) (*version, error) {
	if v.IsZero() {
		return s.newest(), nil
	}
	if found := s.find(v); found != nil {
		if found.lost != "" {
			return nil, wire.Errorf(wire.CodeWorkerLost, "weights %q: %s cannot be taken: %s; the next version can", s.name, v, found.lost)
		}
		return found, nil
	}
	if newest := s.newest(); newest != nil && v.Compare(newest.Version) < 0 {
		return nil, superseded("weights %q: %s was replaced by %s; take that", s.name, v, newest.Version)
	}
	if n := len(s.complete); n > 0 && v.Compare(s.complete[n-1]) <= 0 {
		return nil, wire.Errorf(wire.CodeWorkerLost, "weights %q: %s cannot be taken: the processes that published it have ended; the next version can", s.name, v)
	}
	if e := s.epoch; e != nil && (v.Epoch < e.number || v.Epoch == e.number && e.over != "") {
		return nil, s.abandoned(v)
	}
	return nil, nil
}

// Cancel ends the wait of a request, with what it waits for as the error.
func (s *State) Cancel(to any) {
	if i := slices.IndexFunc(s.waiting, func(w waiting) bool { return w.to == to }); i >= 0 {
		w := s.waiting[i]
		s.waiting = slices.Delete(s.waiting, i, i+1)
		s.refuse(to, wire.Errorf(wire.CodeTimedOut, "weights %q: %s", s.name, s.why(w.version)))
		return
	}
	for _, v := range s.versions {
		for _, r := range v.recuts {
			if i := slices.IndexFunc(r.waiting, func(w waiting) bool { return w.to == to }); i >= 0 {
				r.waiting = slices.Delete(r.waiting, i, i+1)
				s.refuse(to, wire.Errorf(wire.CodeTimedOut, "weights %q: %s is being packed for this layout by %d processes", s.name, v, len(r.pending)))
				return
			}
		}
	}
}

// Close refuses all requests that wait.
func (s *State) Close(err error) {
	for _, w := range s.waiting {
		s.refuse(w.to, err)
	}
	s.waiting = nil
	for _, v := range s.versions {
		for _, r := range v.recuts {
			r.fail(s, v, err)
		}
	}
}

// why is what a version waits for.
func (s *State) why(v Version) string {
	found := s.find(v)
	switch {
	case found != nil:
		return v.String() + " waits for rank " + names(found.missing()) + " to publish it"
	case v.IsZero() && len(s.complete) > 0:
		return fmt.Sprintf("%s was lost with its publisher, and no later one was published", s.complete[len(s.complete)-1])
	case v.IsZero():
		return "no version was published yet"
	}
	return v.String() + " was not published yet"
}

// forgetWaiting drops the requests of a member that has ended, or has bound anew.
func (s *State) forgetWaiting(id string) {
	own := func(w waiting) bool {
		if w.member == id {
			s.refuse(w.to, ErrUnbound)
		}
		return w.member == id
	}
	s.waiting = slices.DeleteFunc(s.waiting, own)
	for _, v := range s.versions {
		for _, r := range v.recuts {
			r.waiting = slices.DeleteFunc(r.waiting, own)
		}
	}
}

// failWaiting answers those that wait for a version which is dropped.
func (s *State) failWaiting(v *version) {
	s.waiting = slices.DeleteFunc(s.waiting, func(w waiting) bool {
		if w.version != v.Version {
			return false
		}
		s.refuse(w.to, superseded("weights %q: %s was given up: %s; take a later one", s.name, v, v.lost))
		return true
	})
}

// stage answers a request for a version that is complete.
func (s *State) stage(now time.Time, to any, m *member, v *version, r StageRequest) {
	if m == nil {
		return
	}
	for _, other := range s.versions { // a receiver takes one version at a time
		delete(other.takers, m.ID)
	}
	v.takers[m.ID] = true
	if p := v.plannedFor(m); p != nil {
		key, _ := p.places.unit(m)
		unit := p.units[key]
		if err := p.plan.Refused[unit]; err != nil {
			delete(v.takers, m.ID)
			s.refuse(to, wire.Errorf(wire.CodeInvalid, "weights %q: %v", s.name, err))
			return
		}
		s.answer(to, s.offer(v, p, unit, r))
		return
	}
	s.recut(now, waiting{to: to, member: m.ID, version: v.Version, request: r}, m, v)
}

// plannedFor is the plan by which all ranks have packed a version, if it has a part for a member.
func (v *version) plannedFor(m *member) *planned {
	p := v.packedBy()
	if p == nil || len(p.ranks) != len(v.ranks) {
		return nil
	}
	key, _ := p.places.unit(m)
	if _, known := p.units[key]; !known {
		return nil
	}
	return p
}

// offer is the answer for a unit of the plan by which a version was packed.
func (s *State) offer(v *version, p *planned, unit int, r StageRequest) StageAnswer {
	out := StageAnswer{Version: v.Version, PartName: p.partName(unit)}
	part := p.plan.OfUnit(unit)
	if out.PartName != r.Part {
		out.Part = part.Encode()
	}
	for _, b := range part.Buckets {
		pub := v.pubs[p.rank(b.Number)]
		out.Buckets = append(out.Buckets, pub.Buckets[p.local[b.Number]])
		out.Keep = out.Keep || pub.Keep
	}
	if out.PartName == r.Part && !r.Base.IsZero() {
		out.Deltas = s.deltas(v, p, part, r.Base)
	}
	return out
}

// rank is the rank that packs a bucket.
func (p *planned) rank(bucket int32) int { return p.ranks[p.plan.Buckets[bucket].Source] }
