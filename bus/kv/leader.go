package kv

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"troupe/bus"
)

// LeadConfig describes a candidate. Candidates with the same Key compete for the same leadership.
type LeadConfig struct {
	// Key is the lease of the leader, in Leases. <Key>.epoch and <Key>.fence, in the bucket itself, belong to it too.
	Key string
	// Leases is the bucket of the lease.
	Leases *Bucket
	// ID names the leader to readers of the key.
	ID string
	// TTL is the time from the death of a leader to its succession; a leader that resigns is succeeded at once. It may
	// be short, because the fence stops the writes of a slow leader. At least a second.
	TTL time.Duration
	// KeepTerm has a leader whose lease was lost take it again and lead on, as long as no other term has begun. For leaders whose
	// state is worth more than the certainty that no other process is about to lead: the fence decides.
	KeepTerm bool
	// HolderEnded returns true once the process that leads under that ID has certainly ended; false when ctx ends. Its lease is
	// then taken from it at once. It blocks. Nil: the lease of a dead leader expires.
	HolderEnded func(ctx context.Context, id string) bool
}

// Lead competes for the leadership until ctx ends, and calls lead each time it is won. The context of that call ends
// when the leadership is lost; after lead has returned, Lead competes again. If lead returns while it still leads, the
// leadership is given up and Lead returns its error, or nil. When ctx ends, Lead returns ctx's error.
func (bucket *Bucket) Lead(ctx context.Context, cfg LeadConfig, lead func(context.Context, *Term) error) error {
	for {
		l, err := bucket.campaign(ctx, cfg)
		if err != nil {
			return err
		}
		again, err := bucket.serve(ctx, cfg, l, lead)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if !again {
			return err
		}
		bucket.b.Logger().Warn("bus: the leadership is lost; competing again", "bucket", bucket.cfg.Bucket, "key", cfg.Key, "id", cfg.ID, "error", err)
	}
}

// campaign waits until this candidate has the lease.
func (bucket *Bucket) campaign(ctx context.Context, cfg LeadConfig) (*Lease, error) {
	waits := retries.Start()
	for {
		l, err := cfg.Leases.Lease(ctx, cfg.Key, []byte(cfg.ID), cfg.TTL)
		switch {
		case err == nil:
			return l, nil
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case errors.Is(err, bus.ErrExists):
			cfg.awaitFree(ctx, err)
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
// again. refused is the error that names the holder.
func (cfg LeadConfig) awaitFree(ctx context.Context, refused error) {
	ctx, cancel := context.WithTimeout(ctx, 2*cfg.TTL+maxPause)
	defer cancel()
	if held := (*LeaseHeldError)(nil); cfg.HolderEnded != nil && errors.As(refused, &held) {
		watched, stop := context.WithCancel(ctx)
		doneCh := make(chan struct{})
		defer func() { stop(); <-doneCh }()
		bus.Go(func() {
			defer close(doneCh)
			cfg.takeFromDead(watched, string(held.Holder))
		})
	}
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

// takeFromDead deletes the lease of a leader that has ended. A renewal in the meantime prevents it.
func (cfg LeadConfig) takeFromDead(ctx context.Context, id string) {
	held, err := cfg.Leases.Get(ctx, cfg.Key)
	if err != nil || string(held.Value) != id || !cfg.HolderEnded(ctx, id) {
		return
	}
	_ = cfg.Leases.Delete(ctx, cfg.Key, held.Revision) // otherwise it was renewed after all, or expires
}

// serve calls lead. again reports that the leadership was lost, rather than given up.
func (bucket *Bucket) serve(ctx context.Context, cfg LeadConfig, l *Lease, lead func(context.Context, *Term) error) (again bool, err error) {
	term, err := bucket.newTerm(ctx, cfg, l)
	if err != nil {
		_ = l.Release(ctx) // otherwise the lease expires
		return true, err
	}
	led, cancel := context.WithCancelCause(ctx)
	doneCh := make(chan struct{})
	bus.Go(func() {
		defer close(doneCh)
		if why := bucket.hold(led, cfg, term); why != nil {
			cancel(&lostError{why})
		}
	})
	err = lead(led, term)
	cancel(nil)
	<-doneCh
	held := term.lease.Load()
	defer func() { _ = held.Release(ctx) }() // otherwise the lease expires
	if lost := (*lostError)(nil); errors.As(context.Cause(led), &lost) {
		return true, lost.cause
	}
	if lost := held.Err(); !cfg.KeepTerm && lost != nil {
		return true, lost
	}
	return errors.Is(err, bus.ErrFenced), err
}

// lostError ends the context of a leader that leads no more.
type lostError struct{ cause error }

func (e *lostError) Error() string { return e.cause.Error() }
func (e *lostError) Unwrap() error { return e.cause }

// hold returns why the leadership was lost, or nil when ctx ends.
func (bucket *Bucket) hold(ctx context.Context, cfg LeadConfig, term *Term) error {
	for {
		l := term.lease.Load()
		select {
		case <-ctx.Done():
			return nil
		case <-l.Lost():
		}
		err := l.Err()
		if cfg.KeepTerm && !errors.Is(err, bus.ErrClosed) {
			bucket.b.Logger().Warn("bus: the leader's lease is lost; taking it again", "bucket", bucket.cfg.Bucket, "key", cfg.Key, "id", cfg.ID, "error", err)
			err = bucket.takeAgain(ctx, cfg, term)
		}
		if err != nil {
			return err
		}
	}
}

// takeAgain takes the lease again for a term that goes on. The error says why it does not: ErrFenced after another term has begun.
func (bucket *Bucket) takeAgain(ctx context.Context, cfg LeadConfig, term *Term) error {
	return bus.Retry(ctx, retries, func() error {
		l := term.lease.Load()
		err := l.Regain(ctx)
		if errors.Is(err, bus.ErrConflict) { // it has expired, or another process has it
			l, err = cfg.Leases.Lease(ctx, cfg.Key, []byte(cfg.ID), cfg.TTL)
		}
		switch {
		case err == nil:
			term.lease.Store(l)
		case isFinal(err):
			return bus.Permanent(err)
		}
		if lost := bucket.checkTerm(ctx, cfg, term); lost != nil { // also while another holds the lease: it may begin a term, or die before
			return lost
		}
		return err
	})
}

// checkTerm returns ErrFenced after another term has begun.
func (bucket *Bucket) checkTerm(ctx context.Context, cfg LeadConfig, term *Term) error {
	rec, err := bucket.read(ctx, cfg.epochKey())
	if err != nil {
		return err
	}
	if rec.deleted || rec.Revision != term.epoch {
		return bus.Permanent(bus.Errorf(bus.CodeFenced, "another term of %s has begun", cfg.Key))
	}
	return nil
}

// epochKey is the key of the epoch, in the led bucket.
func (cfg LeadConfig) epochKey() string { return cfg.Key + ".epoch" }

// Term is one term of a leader. Every write carries its epoch, and the server refuses it with ErrFenced once another
// term has begun, however long this leader was suspended; this needs no lease and no clock. Since no other process can
// write under the fence, Put is as safe as Update here, and costs one message where Update costs a batch of two. It is
// safe for concurrent use.
type Term struct {
	Writer
	epoch uint64
	lease atomic.Pointer[Lease]
}

// newTerm writes the epoch while it holds the lease. Two candidates may do so, one of which does not know yet that its
// lease has ended: the epoch changes by compare-and-set, so the later one fences the earlier. Epochs are only
// overwritten, never deleted, so none can return after a crash.
func (bucket *Bucket) newTerm(ctx context.Context, cfg LeadConfig, l *Lease) (*Term, error) {
	key := cfg.epochKey()
	for {
		rec, err := bucket.read(ctx, key)
		if err != nil {
			return nil, err
		}
		op := OpCreate(key, []byte(cfg.ID))
		if !rec.deleted {
			op = OpUpdate(key, []byte(cfg.ID), rec.Revision)
		}
		revision, err := one(bucket.Apply(ctx, []Op{op}))
		if lost := l.Err(); lost != nil {
			return nil, lost
		}
		switch {
		case errors.Is(err, bus.ErrConflict), errors.Is(err, bus.ErrExists):
			continue // a candidate without the lease wrote; the next epoch ends its term
		case err != nil:
			return nil, err
		}
		fences := []fence{{subject: bucket.prefix + key, revision: revision, key: cfg.Key + ".fence"}}
		t := &Term{Writer: Writer{kv: bucket, fences: fences}, epoch: revision}
		t.lease.Store(l)
		return t, nil
	}
}

// Epoch is the term's fencing token, which grows from term to term.
func (t *Term) Epoch() uint64 { return t.epoch }

// Valid reports whether no other process can lead now, so that the state of this leader is current. It uses only the
// clock; writes do not need it.
func (t *Term) Valid() bool { return t.lease.Load().Valid() }
