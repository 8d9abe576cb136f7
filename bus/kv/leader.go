package kv

import (
	"context"
	"errors"
	"time"

	"troupe/bus"
)

// LeadConfig describes a candidate. Candidates with the same Key compete for the same leadership.
type LeadConfig struct {
	// Key names the leadership: <Key>.epoch and <Key>.fence in the bucket belong to it, and the lease of the leader.
	Key string
	// Leases is the bucket of the lease. Nil: the bus has a server that is a member of a cluster (bus.Member), and a candidate leads while
	// its server leads the stream of the bucket. So the loss of a host costs one election, and no lease.
	Leases *Bucket
	// ID names the leader to readers of the key.
	ID string
	// TTL is the time from the death of a leader with a lease to its succession; a leader that resigns is succeeded at once. It may
	// be short, because the fence stops the writes of a slow leader. At least a second.
	TTL time.Duration
}

// mandate is what entitles a candidate to begin a term: a lease, or that its server leads the stream.
type mandate interface {
	Lost() <-chan struct{}
	Err() error // why it is lost; nil while it is held
	// Valid reports whether no other process can have a mandate now; always for one that knows that only by a write.
	Valid() bool
	// Release gives it up, so that another candidate can have it at once.
	Release(ctx context.Context) error
}

// Lead competes for the leadership until ctx ends, and calls lead each time it is won. The context of that call ends
// when the leadership is lost; after lead has returned, Lead competes again. If lead returns while it still leads, the
// leadership is given up and Lead returns its error, or nil. When ctx ends, Lead returns ctx's error.
func (bucket *Bucket) Lead(ctx context.Context, cfg LeadConfig, lead func(context.Context, *Term) error) error {
	if cfg.Leases == nil && bucket.b.Member() == nil {
		return bus.Errorf(bus.CodeInvalid, "lead %s: without a bucket of leases, the bus must have a server that is a member of a cluster", cfg.Key)
	}
	for {
		m, err := bucket.campaign(ctx, cfg)
		if err != nil {
			return err
		}
		again, err := bucket.serve(ctx, cfg, m, lead)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if !again {
			return err
		}
		bucket.b.Logger().Warn("bus: the leadership is lost; competing again", "bucket", bucket.cfg.Bucket, "key", cfg.Key, "id", cfg.ID, "error", err)
	}
}

// campaign waits until this candidate has a mandate.
func (bucket *Bucket) campaign(ctx context.Context, cfg LeadConfig) (mandate, error) {
	if cfg.Leases == nil {
		return bucket.awaitStreamLead(ctx)
	}
	waits := retries.Start()
	for {
		l, err := cfg.Leases.Lease(ctx, cfg.Key, []byte(cfg.ID), cfg.TTL)
		switch {
		case err == nil:
			return l, nil
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case errors.Is(err, bus.ErrExists):
			cfg.awaitFree(ctx)
			waits.Reset()
		case isFinal(err):
			return nil, err
		}
		if err := waits.Wait(ctx); err != nil { // with jitter, because standbys see the end at the same time
			return nil, err
		}
	}
}

// isFinal reports whether a lease that could not be taken cannot be taken later either.
func isFinal(err error) bool {
	return errors.Is(err, bus.ErrInvalid) || errors.Is(err, bus.ErrClosed) || errors.Is(err, bus.ErrNotFound) || errors.Is(err, bus.ErrRefused)
}

// awaitFree returns when the lease may be free: it was deleted, or so much time has passed that the caller should try
// again.
func (cfg LeadConfig) awaitFree(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*cfg.TTL+maxPause)
	defer cancel()
	events, err := cfg.Leases.Watch(ctx, cfg.Key)
	if err != nil {
		return
	}
	held := false
	for ev := range events {
		if ev.Key == cfg.Key {
			held = ev.Kind == EventPut
		}
		if !held && (ev.Kind == EventComplete || ev.Key == cfg.Key) {
			return
		}
	}
}

// serve calls lead. again reports that the leadership was lost, rather than given up.
func (bucket *Bucket) serve(ctx context.Context, cfg LeadConfig, m mandate, lead func(context.Context, *Term) error) (again bool, err error) {
	defer func() { _ = m.Release(ctx) }() // otherwise the lease expires
	term, err := bucket.newTerm(ctx, cfg.Key, cfg.ID, m)
	if err != nil {
		return true, err
	}
	led, cancel := context.WithCancelCause(ctx)
	doneCh := make(chan struct{})
	bus.Go(func() {
		defer close(doneCh)
		select {
		case <-led.Done():
		case <-m.Lost():
			cancel(nil)
		}
	})
	err = lead(led, term)
	cancel(nil)
	<-doneCh
	if lost := m.Err(); lost != nil {
		return true, lost
	}
	return errors.Is(err, bus.ErrFenced), err
}

const streamLeadPoll = 20 * time.Millisecond // of a state in memory

// streamLead is the mandate of a candidate whose server leads the stream of the bucket.
type streamLead struct {
	bucket *Bucket
	lostCh chan struct{} // closed when the server leads no more
	stop   context.CancelFunc
	doneCh chan struct{}
}

// awaitStreamLead returns when the server leads the stream.
func (bucket *Bucket) awaitStreamLead(ctx context.Context) (*streamLead, error) {
	for !bucket.b.Member().Leads(bucket.stream) {
		if err := bus.Sleep(ctx, streamLeadPoll); err != nil {
			return nil, err
		}
	}
	watched, stop := context.WithCancel(context.WithoutCancel(ctx))
	l := &streamLead{bucket: bucket, lostCh: make(chan struct{}), stop: stop, doneCh: make(chan struct{})}
	bus.Go(func() {
		defer close(l.doneCh)
		for bus.Sleep(watched, streamLeadPoll) == nil {
			if !l.Valid() {
				close(l.lostCh)
				return
			}
		}
	})
	return l, nil
}

func (l *streamLead) Lost() <-chan struct{} { return l.lostCh }

func (l *streamLead) Err() error {
	select {
	case <-l.lostCh:
		return bus.Errorf(bus.CodeUnavailable, "another server leads stream %s, or none does", l.bucket.stream)
	default:
		return nil
	}
}

// Valid reports whether the server leads as far as it knows. One that is cut off from the others learns within seconds that it does not.
func (l *streamLead) Valid() bool { return l.bucket.b.Member().Leads(l.bucket.stream) }

// Release hands the stream over to another server, unless that has happened.
func (l *streamLead) Release(context.Context) error {
	l.stop()
	<-l.doneCh
	if !l.Valid() {
		return nil
	}
	return l.bucket.b.Member().HandOver(l.bucket.stream)
}

// Begin begins a term without a mandate, for a leader that is one by other means: of two that believe so, the later one fences the earlier.
func (bucket *Bucket) Begin(ctx context.Context, key, id string) (*Term, error) {
	return bucket.newTerm(ctx, key, id, nil)
}

// Term is one term of a leader. Every write carries its epoch, and the server refuses it with ErrFenced once another
// term has begun, however long this leader was suspended; this needs no lease and no clock. Since no other process can
// write under the fence, Put is as safe as Update here, and costs one message where Update costs a batch of two. It is
// safe for concurrent use.
type Term struct {
	Writer
	epoch   uint64
	fence   string // key of messages that only carry the fence
	mandate mandate
}

// newTerm writes the epoch while the candidate has a mandate. Two candidates may do so, one of which does not know yet that its
// mandate has ended: the epoch changes by compare-and-set, so the later one fences the earlier. Epochs are only
// overwritten, never deleted, so none can return after a crash.
func (bucket *Bucket) newTerm(ctx context.Context, key, id string, m mandate) (*Term, error) {
	epochKey := key + ".epoch"
	for {
		rec, err := bucket.read(ctx, epochKey)
		if err != nil {
			return nil, err
		}
		op := OpCreate(epochKey, []byte(id))
		if !rec.deleted {
			op = OpUpdate(epochKey, []byte(id), rec.Revision)
		}
		revision, err := one(bucket.Apply(ctx, []Op{op}))
		if m != nil && m.Err() != nil {
			return nil, m.Err()
		}
		switch {
		case errors.Is(err, bus.ErrConflict), errors.Is(err, bus.ErrExists):
			continue // a candidate without a mandate wrote; the next epoch ends its term
		case err != nil:
			return nil, err
		}
		fences := []fence{{subject: bucket.prefix + epochKey, revision: revision, key: key + ".fence"}}
		return &Term{Writer: Writer{kv: bucket, fences: fences}, epoch: revision, fence: key + ".fence", mandate: m}, nil
	}
}

// Epoch is the term's fencing token, which grows from term to term.
func (t *Term) Epoch() uint64 { return t.epoch }

// Valid reports whether no other process can lead now, as far as this one can know without a message.
func (t *Term) Valid() bool { return t.mandate == nil || t.mandate.Valid() }

// Confirm returns nil if no other term had begun when it was called, so that what the leader knew then was current: a lease proves that by
// the clock, anything else by a write. A write of the term proves the same.
func (t *Term) Confirm(ctx context.Context) error {
	if lease, ok := t.mandate.(*Lease); ok {
		if !lease.Valid() {
			return bus.Errorf(bus.CodeFenced, "the lead has expired")
		}
		return nil
	}
	_, err := t.Put(ctx, t.fence, nil)
	return err
}
