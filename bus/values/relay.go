package values

import (
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/direct"
	"troupe/bus/wire"
)

// relayKeep is how long the room of a body that was passed on is kept for the next host: longer than a receiver needs to connect.
const relayKeep = 3 * time.Second

// relays are the bodies that this process pulls for its host and passes on to others while they arrive.
type relays struct {
	store *Store

	mu    sync.Mutex // guards what follows
	byRef map[wire.BodyRef]*relay
	byID  map[uint64]*relay // numbers of uploads, as the data port knows them
}

// relay is one of them. It holds the room of a HostFetch.
type relay struct {
	ref     wire.BodyRef
	id      uint64
	found   direct.Found
	release func()

	uses int // connections
	last time.Time
}

// pass sends the receiver of a want of another owner's body a ticket for what this process has of it. If it has none, the owner is asked again.
func (rs *relays) pass(f *wire.Frame) {
	var ask directAsk
	if wire.UnmarshalRecord(f.Body, &ask) != nil || f.Header.Session == rs.store.name {
		return // the receiver repeats its request
	}
	r := rs.find(f.Header.Ref)
	if r == nil {
		_ = rs.store.session.Tell(f.Header.Ref.Owner, f) // the same
		return
	}
	receiver := f.Header.Session
	rs.store.session.Spawn(func() {
		server, err := rs.store.direct.serving()
		if err != nil {
			return
		}
		ticket, err := server.Ticket(ask.Receiver, direct.Body{ID: r.id, Length: r.ref.Len})
		if err != nil {
			return
		}
		ticket.Relay = true
		if body, err := wire.MarshalRecord(&ticket); err == nil {
			_ = rs.store.session.Tell(receiver, &wire.Frame{Kind: wire.KindTicket, Header: wire.Header{Ref: r.ref}, Body: body}) // the same
		}
	})
}

// find is the relay of a body, which a download with room for its host becomes; nil: there is none.
func (rs *relays) find(ref wire.BodyRef) *relay {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if r := rs.byRef[ref]; r != nil && !r.found.Arrived.Ended() {
		r.last = time.Now()
		return r
	}
	found, release := rs.store.downloads.hold(ref)
	if release == nil {
		return nil
	}
	found.SentFunc = func(n int) { rs.store.CountSent(PathDirect, int64(n)) }
	r := &relay{ref: ref, id: rs.store.uploads.number(), found: found, release: release, last: time.Now()}
	rs.byRef[ref], rs.byID[r.id] = r, r
	rs.sweepLater(r, relayKeep)
	return r
}

func (rs *relays) sweepLater(r *relay, after time.Duration) {
	time.AfterFunc(after, bus.Guard(func() { rs.sweep(r) }))
}

// sweep ends a relay that no connection has used for a while.
func (rs *relays) sweep(r *relay) {
	rs.mu.Lock()
	left := relayKeep - time.Since(r.last)
	if r.uses > 0 {
		left = relayKeep
	}
	ends := rs.byID[r.id] == r && left <= 0
	if ends {
		rs.forgetLocked(r)
	}
	rs.mu.Unlock()
	switch {
	case ends:
		r.release()
	case left > 0:
		rs.sweepLater(r, left)
	}
}

func (rs *relays) forgetLocked(r *relay) {
	delete(rs.byID, r.id)
	if rs.byRef[r.ref] == r {
		delete(rs.byRef, r.ref)
	}
}

// open finds a relay for the data port.
func (rs *relays) open(id uint64) (direct.Found, func()) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	r := rs.byID[id]
	if r == nil {
		return direct.Found{}, nil
	}
	r.uses++
	return r.found, func() {
		rs.mu.Lock()
		r.uses--
		r.last = time.Now()
		rs.mu.Unlock()
	}
}

// close ends all of them, after the data port.
func (rs *relays) close() {
	rs.mu.Lock()
	all := rs.byID
	rs.byID, rs.byRef = map[uint64]*relay{}, map[wire.BodyRef]*relay{}
	rs.mu.Unlock()
	for _, r := range all {
		r.release()
	}
}

// hold keeps the room of a download for a relay; nil: the download has none.
func (rs *downloads) hold(ref wire.BodyRef) (direct.Found, func()) {
	rs.mu.Lock()
	r := rs.in[ref]
	rs.mu.Unlock()
	if r == nil {
		return direct.Found{}, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fetch == nil || r.finished {
		return direct.Found{}, nil
	}
	release := r.fetch.Hold()
	if release == nil {
		return direct.Found{}, nil
	}
	return direct.Found{Bytes: r.fetch.Room(), Arrived: r.arrivedLocked()}, release
}

// arrivedLocked is what of the body is there.
func (r *download) arrivedLocked() *direct.Arrived {
	if r.arrived == nil {
		r.arrived = direct.NewArrived(int(r.ref.Len))
		r.arrived.Fill(r.got)
	}
	return r.arrived
}
