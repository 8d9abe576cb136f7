package values

import (
	"context"
	"time"

	"troupe/bus/wire"
)

const (
	handOverEvery    = 500 * time.Millisecond // between two requests of a process that ends to the owners of the results it keeps
	unreachableAfter = time.Second            // time without a subscriber after which an owner takes nothing over
)

// keptBody is a large result that a worker of this process has made. It belongs to the caller, and stays here until the caller
// frees it, pulls it because this process ends, or is gone.
type keptBody struct {
	owner    string // session of the caller
	upload   wire.BodyRef
	contains RetainedReferences
	settled  bool // the caller has the answer, or waits for it no longer: a body that it does not know is not needed
}

// ReserveKept counts a result of n bytes that stays here, until UnreserveKept. False: it is past the bound, and its caller pulls it at once.
func (r *References) ReserveKept(n int) bool {
	r.mu.Lock()
	closed := r.closed
	r.mu.Unlock()
	return n > MaxInline && !closed && r.bound.reserve(n)
}

// UnreserveKept ends the count of a result of n bytes.
func (r *References) UnreserveKept(n int) { r.bound.add(-n) }

// Keep keeps a result for its caller. onDone, if set, is called when it is not read any more.
func (r *References) Keep(owner string, body []byte, contains RetainedReferences, onDone func()) wire.BodyRef {
	k := &keptBody{owner: owner, contains: contains}
	k.upload = r.store.OfferKept(body, onDone)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.kept[k.upload.ID] = k
	r.keptBytes += k.upload.Len
	r.store.session.WakeSweep()
	return k.upload
}

// Settle records that the caller has the answer with a kept body, or has given the call up.
func (r *References) Settle(id uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if k := r.kept[id]; k != nil {
		k.settled = true
	}
}

// dropKeptLocked ends a kept body; the result must be called without the lock.
func (r *References) dropKeptLocked(k *keptBody) (free func()) {
	if r.kept[k.upload.ID] != k {
		return func() {}
	}
	delete(r.kept, k.upload.ID)
	r.keptBytes -= k.upload.Len
	return func() {
		r.store.Withdraw(k.upload)
		k.contains.ReleaseSent()
	}
}

// freed handles the owner's message that it needs these bodies no more.
func (r *References) freed(owner string, bodies []wire.Reference) {
	var free []func()
	r.mu.Lock()
	for _, b := range bodies {
		if k := r.kept[b.ID]; k != nil && k.owner == owner {
			free = append(free, r.dropKeptLocked(k))
		}
	}
	r.mu.Unlock()
	for _, do := range free {
		do()
	}
}

// keptReported answers another process's report of what it keeps for this one: bodies that no value has are freed.
func (r *References) keptReported(keeper string, bodies []wire.Reference) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var unknown []uint64
	for _, b := range bodies {
		if r.elsewhere[bodyKey{keeper, b.ID}] == nil {
			unknown = append(unknown, b.ID)
		}
	}
	if len(unknown) > 0 {
		r.sendFreeLocked(keeper, unknown...)
	}
}

// HandOver asks the owners of the results that this process keeps to pull them, and returns when none is left of owners that can be reached, or
// when ctx ends.
func (r *References) HandOver(ctx context.Context) {
	t := time.NewTicker(handOverEvery / 10)
	defer t.Stop()
	var asked time.Time
	for {
		r.mu.Lock()
		left := 0
		for _, k := range r.kept {
			if p := r.peers[k.owner]; p == nil || !p.isUnreachable(time.Now()) {
				left++
			}
		}
		if left > 0 && time.Since(asked) >= handOverEvery {
			asked = time.Now()
			byOwner := map[string][]uint64{}
			for _, k := range r.kept {
				byOwner[k.owner] = append(byOwner[k.owner], k.upload.ID)
			}
			for owner, ids := range byOwner {
				r.tellLocked(wire.KindHandOver, owner, true, bodyNames(r.store.name, ids))
			}
		}
		r.mu.Unlock()
		if left == 0 {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-r.store.session.Done():
			return
		case <-t.C:
		}
	}
}

// isUnreachable reports whether the last probes found no subscriber of the process's inbox.
func (p *peer) isUnreachable(now time.Time) bool {
	return now.Sub(p.absentLast) < unreachableAfter && p.absentLast.Sub(p.absentSince) >= unreachableAfter
}

// takeOver pulls the results that a process which ends has kept for this one.
func (r *References) takeOver(keeper string, bodies []wire.Reference) {
	var pull []*ownedValue
	var unknown []uint64
	r.mu.Lock()
	for _, b := range bodies {
		v := r.elsewhere[bodyKey{keeper, b.ID}]
		switch {
		case v == nil:
			unknown = append(unknown, b.ID)
		case !v.taking:
			v.taking = true
			v.uses++
			pull = append(pull, v)
		}
	}
	if len(unknown) > 0 {
		r.sendFreeLocked(keeper, unknown...)
	}
	r.mu.Unlock()
	for _, v := range pull {
		ref, memory := v.ref, v.memory // fixed while taking
		r.store.Fetch(ref, v.location, Receiver{Memory: memory, Alone: true}, func(body []byte, err error) { r.taken(v, ref, memory, body, err) })
	}
}

// taken ends the pull of takeOver. A body past the bound is written to disk, or stays in memory where that cannot be done: it would be lost.
func (r *References) taken(v *ownedValue, from wire.BodyRef, memory Memory, body []byte, err error) {
	if err != nil || r.bound.reserve(len(body)) {
		r.placeTaken(v, from, memory, body, err)
		return
	}
	spill := func() {
		place, in, err := r.Spill(body)
		if err != nil {
			r.store.session.Bus().Logger().Warn("bus: a result of a process that ends stays in memory, past the bound", "error", err)
			r.bound.add(len(body))
			place, in = body, memory
		} else {
			FreeBody(memory, body)
		}
		r.placeTaken(v, from, in, place, nil)
	}
	if !r.store.session.Spawn(spill) {
		r.placeTaken(v, from, memory, body, errReferencesClosed)
		FreeBody(memory, body)
	}
}

// placeTaken: the body lies here from now on.
func (r *References) placeTaken(v *ownedValue, from wire.BodyRef, memory Memory, body []byte, err error) {
	key := bodyKey{from.Owner, from.ID}
	r.mu.Lock()
	v.taking = false
	mine := r.elsewhere[key] == v && err == nil && !r.closed
	if mine {
		delete(r.elsewhere, key)
		r.placeLocked(v, body, memory, v.contains)
		r.sendFreeLocked(from.Owner, from.ID)
	}
	r.mu.Unlock()
	if !mine && err == nil {
		FreeBody(memory, body)
		r.discharge(body, memory)
	}
	r.Release(r.nameOf(v))
}
