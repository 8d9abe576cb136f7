package values

import (
	"slices"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
)

// receive handles a frame about references. It runs on the goroutine of the inbox and does not block.
func (r *References) receive(f *wire.Frame) {
	if f.Kind == wire.KindResolve {
		r.asked(f)
		return
	}
	refs, err := wire.ReadReferences(f.Body)
	if err != nil {
		r.store.session.Bus().Logger().Warn("bus: the inbox received a malformed list of references", "kind", f.Kind.String())
		return
	}
	switch f.Kind {
	case wire.KindFree:
		r.freed(f.Header.Session, refs)
	case wire.KindKept:
		r.keptReported(f.Header.Session, refs)
	case wire.KindHandOver:
		r.takeOver(f.Header.Session, refs)
	default:
		r.holderReported(f, refs)
	}
}

// peerLocked is the state of another process.
func (r *References) peerLocked(session string) *peer {
	p := r.peers[session]
	if p == nil {
		p = &peer{holds: map[uint64]struct{}{}}
		r.peers[session] = p
	}
	return p
}

// holderReported handles hold, drop and report of another process. Repeats change nothing, and a drop or report that was overtaken
// by a later message is ignored.
func (r *References) holderReported(f *wire.Frame, refs []wire.Reference) {
	r.mu.Lock()
	p := r.peerLocked(f.Header.Session)
	late := f.Header.Seq <= p.version
	if late && f.Kind != wire.KindHold { // a late hold does no harm: the next report corrects it
		r.mu.Unlock()
		return
	}
	p.version, p.absentSince, p.absentLast = max(p.version, f.Header.Seq), time.Time{}, time.Time{}
	var free []func()
	switch f.Kind {
	case wire.KindHold:
		r.heldByLocked(p, refs)
	case wire.KindDrop:
		for _, ref := range refs {
			free = append(free, r.notHeldByLocked(p, ref.ID))
		}
	case wire.KindReport:
		r.heldByLocked(p, refs)
		now := make(map[uint64]struct{}, len(refs))
		for _, ref := range refs {
			now[ref.ID] = struct{}{}
		}
		for id := range p.holds {
			if _, still := now[id]; !still {
				free = append(free, r.notHeldByLocked(p, id))
			}
		}
	}
	r.mu.Unlock()
	for _, do := range free {
		do()
	}
}

func (r *References) heldByLocked(p *peer, refs []wire.Reference) {
	for _, ref := range refs {
		v := r.owned[ref.ID]
		if _, known := p.holds[ref.ID]; v == nil || known || ref.Owner != r.store.name {
			continue
		}
		p.holds[ref.ID] = struct{}{}
		v.others++
		v.shared = true
		delete(r.unheld, v.id)
	}
	r.store.session.WakeSweep()
}

func (r *References) notHeldByLocked(p *peer, id uint64) (free func()) {
	if _, known := p.holds[id]; !known {
		return func() {}
	}
	delete(p.holds, id)
	v := r.owned[id]
	if v == nil {
		return func() {}
	}
	v.others--
	return r.unusedLocked(v)
}

// SessionEnded tells that a process has ended: what it held is dropped, and what it kept is lost.
func (r *References) SessionEnded(session string) {
	if session != "" && session != r.store.name {
		r.ended(session)
	}
}

// absent handles the server's report that the inbox of a session has no subscriber. That may be temporary.
func (r *References) absent(session string, now time.Time) {
	r.mu.Lock()
	p := r.peerLocked(session)
	if now.Sub(p.absentLast) > 2*reportEvery {
		p.absentSince = now
	}
	p.absentLast = now
	since := now.Sub(p.absentSince)
	var after []func()
	for key, v := range r.elsewhere {
		if key.session == session && v.lost != nil { // its role has reported the loss
			after = append(after, r.failLocked(v, v.lost))
		}
	}
	if since >= bus.GoneAfter {
		after = append(after, r.failRequestsLocked(session))
	}
	r.mu.Unlock()
	for _, do := range after {
		do()
	}
	if since >= absentAfter {
		r.ended(session)
	}
}

// ended drops what a process held, and fails what it kept or owned.
func (r *References) ended(session string) {
	r.mu.Lock()
	var after []func()
	if p := r.peers[session]; p != nil {
		for id := range p.holds {
			after = append(after, r.notHeldByLocked(p, id))
		}
		delete(r.peers, session)
	}
	for key, v := range r.elsewhere {
		if key.session == session {
			why := v.lost
			if why == nil {
				e := bus.Errorf(bus.CodeWorkerLost, "the process that kept the result has ended")
				e.Role, e.Rank = v.producer.to.Role, v.producer.rank
				why = e
			}
			after = append(after, r.failLocked(v, why))
		}
	}
	for _, k := range r.kept {
		if k.owner == session {
			after = append(after, r.dropKeptLocked(k))
		}
	}
	for _, v := range r.owned {
		for a := range v.askers {
			if a.session == session {
				delete(v.askers, a)
			}
		}
	}
	after = append(after, r.failRequestsLocked(session))
	r.mu.Unlock()
	for _, do := range after {
		do()
	}
}

// Lost records that a rank is known to be dead. Its results are lost when its process is gone too: another worker of the
// process, or a worker that ends in order, still has them.
func (r *References) Lost(to bus.Address, rank int, gen uint32, why error) {
	r.mu.Lock()
	sessions := map[string]bool{}
	for key, v := range r.elsewhere {
		if p := v.producer; p.to == to && p.rank == rank && p.gen <= gen && v.lost == nil {
			v.lost = why
			sessions[key.session] = true
		}
	}
	r.mu.Unlock()
	for session := range sessions {
		r.store.session.Probe(session)
	}
}

// active reports whether the sweep has work: something may be lost, or a process gone, without a message.
func (r *References) active() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.requests)+len(r.owners)+len(r.kept)+len(r.elsewhere)+len(r.unheld)+len(r.peers) > 0
}

// sweep frees values that are not held any more, repeats requests, sends reports, and probes holders that were absent. Only the endpoint's sweep calls it.
// anew: messages may have been lost just now.
func (r *References) sweep(now time.Time, connected, anew bool) {
	r.repeatRequests(now, connected)
	r.mu.Lock()
	var free []func()
	for _, v := range r.unheld {
		if now.Sub(v.since) >= freeGrace {
			free = append(free, r.freeLocked(v))
		}
	}
	if due := now.Sub(r.reported) >= reportEvery; connected && (anew || due) {
		r.reported = now
		r.reportLocked(now, due)
	}
	for session, p := range r.peers {
		if silent := now.Sub(p.absentLast); connected && len(p.holds) > 0 && silent >= probeAgain && silent < 2*reportEvery {
			r.store.session.Probe(session)
		}
	}
	r.mu.Unlock()
	for _, do := range free {
		do()
	}
}

// reportLocked sends owners what this process holds of theirs and keeps for them, and probes holders and keepers. A report that is not
// due follows a reconnection, in which owners may not have subscribed again yet: it does not count as one of emptyReports.
func (r *References) reportLocked(now time.Time, due bool) {
	held := map[string][]wire.Reference{}
	for ref := range r.held {
		held[ref.Owner] = append(held[ref.Owner], ref)
	}
	for owner, left := range r.owners {
		refs := held[owner]
		switch {
		case len(refs) > 0:
			r.owners[owner] = emptyReports
		case left == 0:
			delete(r.owners, owner)
			continue
		case due:
			r.owners[owner] = left - 1
		}
		if len(refs) <= MaxReport {
			r.tellLocked(wire.KindReport, owner, true, refs)
			continue
		}
		// No message can name all of them, so the owner cannot tell what is missing: these messages repair lost holds; a lost drop is
		// repaired by the first report that names all.
		for part := range slices.Chunk(refs, MaxReport) {
			r.tellLocked(wire.KindHold, owner, true, part)
		}
	}
	kept := map[string][]uint64{}
	for _, k := range r.kept {
		ids := kept[k.owner]
		if k.settled && len(ids) < MaxReport {
			ids = append(ids, k.upload.ID)
		}
		kept[k.owner] = ids
	}
	for owner, ids := range kept {
		r.tellLocked(wire.KindKept, owner, true, bodyNames(r.store.name, ids))
	}
	probed := map[string]bool{}
	for key := range r.elsewhere {
		probed[key.session] = true
	}
	for session, p := range r.peers {
		if len(p.holds) > 0 {
			probed[session] = true
		} else if now.Sub(p.absentLast) > absentAfter {
			delete(r.peers, session)
		}
	}
	for session := range probed {
		if held[session] == nil && kept[session] == nil {
			r.store.session.Probe(session)
		}
	}
	for _, v := range r.owned {
		for a, at := range v.askers {
			if now.Sub(at) > askerTTL {
				delete(v.askers, a)
			}
		}
	}
}
