package kv

import (
	"context"
	"errors"
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
			cfg.awaitFree(ctx)
			waits.Reset()
		case errors.Is(err, bus.ErrInvalid), errors.Is(err, bus.ErrClosed), errors.Is(err, bus.ErrNotFound), errors.Is(err, bus.ErrRefused):
			return nil, err
		}
		if err := waits.Wait(ctx); err != nil { // with jitter, because standbys see the end at the same time
			return nil, err
		}
	}
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
func (bucket *Bucket) serve(ctx context.Context, cfg LeadConfig, l *Lease, lead func(context.Context, *Term) error) (again bool, err error) {
	defer func() { _ = l.Release(ctx) }() // otherwise the lease expires
	term, err := bucket.newTerm(ctx, cfg, l)
	if err != nil {
		return true, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	lostCh := l.Lost()
	bus.Go(func() {
		select {
		case <-lostCh:
			cancel(l.Err())
		case <-ctx.Done():
		}
	})
	err = lead(ctx, term)
	if !l.Valid() {
		return true, l.Err()
	}
	return errors.Is(err, bus.ErrFenced), err
}

// Term is one term of a leader. Every write carries its epoch, and the server refuses it with ErrFenced once another
// term has begun, however long this leader was suspended; this needs no lease and no clock. Since no other process can
// write under the fence, Put is as safe as Update here, and costs one message where Update costs a batch of two. It is
// safe for concurrent use.
type Term struct {
	Writer
	epoch uint64
	lease *Lease
}

// newTerm writes the epoch while it holds the lease. Two candidates may do so, one of which does not know yet that its
// lease has ended: the epoch changes by compare-and-set, so the later one fences the earlier. Epochs are only
// overwritten, never deleted, so none can return after a crash.
func (bucket *Bucket) newTerm(ctx context.Context, cfg LeadConfig, l *Lease) (*Term, error) {
	key := cfg.Key + ".epoch"
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
		switch {
		case !l.Valid():
			return nil, l.Err()
		case errors.Is(err, bus.ErrConflict), errors.Is(err, bus.ErrExists):
			continue // a candidate without the lease wrote; the next epoch ends its term
		case err != nil:
			return nil, err
		}
		fences := []fence{{subject: bucket.prefix + key, revision: revision, key: cfg.Key + ".fence"}}
		return &Term{Writer: Writer{kv: bucket, fences: fences}, epoch: revision, lease: l}, nil
	}
}

// Epoch is the term's fencing token, which grows from term to term.
func (t *Term) Epoch() uint64 { return t.epoch }

// Valid reports whether no other process can lead now, so that the state of this leader is current. It uses only the
// clock; writes do not need it.
func (t *Term) Valid() bool { return t.lease.Valid() }
