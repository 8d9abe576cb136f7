package kv

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"troupe/bus"
)

// LeadConfig is a candidacy. Everybody who runs with the same Key stands for the same lead.
type LeadConfig struct {
	// Key is the lease of the lead, in Leases. <Key>.epoch and <Key>.fence, in the bucket that is led, belong to it too.
	Key string
	// Leases is the bucket of the lease.
	Leases *Bucket
	// ID says who leads, to those who read the key.
	ID string
	// TTL is how long the lead outlives a leader that died: the others take over then, at once if it resigned. It may be
	// short, because a leader that was only slow cannot do harm. At least a second.
	TTL time.Duration
}

// Lead stands for the lead until ctx ends, and calls lead each time it is won. The context of that call ends when the
// lead is lost; when lead has returned, Lead stands again. If lead returns while it still leads, its lead is given up
// and its error, or nil, is what Lead returns. When ctx ends, Lead returns ctx's error.
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
		bucket.b.Logger().Warn("bus: the lead is lost; standing again", "bucket", bucket.cfg.Bucket, "key", cfg.Key, "id", cfg.ID, "error", err)
	}
}

// campaign waits until the lease is ours.
func (bucket *Bucket) campaign(ctx context.Context, cfg LeadConfig) (*Lease, error) {
	for wait := retryPause; ; wait = min(2*wait, maxPause) {
		l, err := cfg.Leases.Lease(ctx, cfg.Key, []byte(cfg.ID), cfg.TTL)
		switch {
		case err == nil:
			return l, nil
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case errors.Is(err, bus.ErrExists):
			cfg.awaitFree(ctx)
			wait = retryPause
		case errors.Is(err, bus.ErrInvalid), errors.Is(err, bus.ErrClosed), errors.Is(err, bus.ErrNotFound), errors.Is(err, bus.ErrRefused):
			return nil, err
		}
		if err := bus.Sleep(ctx, rand.N(wait)); err != nil { // standbys see the end together; let one be first
			return nil, err
		}
	}
}

// awaitFree returns when the lease may be free: it is gone, or so much time has passed that we had better look again.
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

// serve leads. again says that the lead was lost rather than laid down.
func (bucket *Bucket) serve(ctx context.Context, cfg LeadConfig, l *Lease, lead func(context.Context, *Term) error) (again bool, err error) {
	defer func() { _ = l.Release(ctx) }() // if it fails, the lease expires
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

// Term is one time of leading. Every write carries its epoch, and the server refuses it with ErrFenced once another
// leader has begun, however long this one was asleep; no lease and no clock is needed for that. Since nobody else can
// write under the fence, Put is as safe as Update here, and costs one message where Update costs a batch of two.
// It is safe for concurrent use.
type Term struct {
	Writer
	epoch uint64
	lease *Lease
}

// newTerm writes the epoch while the lease is held. Two candidates may be at it, one of which does not know yet that its
// lease has ended: the epoch changes by compare-and-set, so the later one fences the earlier. Epochs are only overwritten,
// never deleted, so none comes back after a crash.
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
			continue // a candidate that has lost the lease wrote; its term ends with ours
		case err != nil:
			return nil, err
		}
		fences := []fence{{subject: bucket.prefix + key, revision: revision, key: cfg.Key + ".fence"}}
		return &Term{Writer: Writer{kv: bucket, fences: fences}, epoch: revision, lease: l}, nil
	}
}

// Epoch is the term's fencing token: later terms have greater ones.
func (t *Term) Epoch() uint64 { return t.epoch }

// Valid reports whether nobody else can lead now, so that what this leader knows is the latest there is. It asks only
// the clock; a write needs no such question.
func (t *Term) Valid() bool { return t.lease.Valid() }
