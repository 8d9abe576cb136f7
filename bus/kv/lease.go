package kv

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/wire"

	"github.com/nats-io/nuid"
)

const (
	minLease       = time.Second     // the server's resolution is a second
	maxLease       = time.Hour       // lifetime of the marker of a deleted lease
	releaseTimeout = 2 * time.Second // of Release, whose context may have ended
)

// LeaseHeldError describes the holder of a lease. It matches ErrExists.
type LeaseHeldError struct {
	Key     string
	Holder  []byte    // the value that the holder wrote
	Since   time.Time // of its last renewal, by the server's clock
	Expires time.Time // unless it is renewed again, by the server's clock
}

func (e *LeaseHeldError) Error() string {
	return fmt.Sprintf("lease %s is held by %q until %s", e.Key, wire.Clip(string(e.Holder)), e.Expires.Format(time.RFC3339))
}

func (e *LeaseHeldError) Unwrap() error {
	return &bus.Error{Code: bus.CodeExists, Message: e.Error(), Rank: -1}
}

// Lease is a key that its holder renews and that expires otherwise, which watchers see as a deletion. The holder renews
// it three times per lifetime in the background. The lease is valid from before the last successful renewal was sent,
// for its lifetime less a tenth: then the holder steps down by its own clock, before the server lets another process
// take the key.
//
//	held ──renewal refused, or the clock──▶ lost ──Regain──▶ held
//	  └──────────────Release───────────────▶ released ◀──Release── lost
type Lease struct {
	kv    *Bucket
	key   string
	value []byte
	ttl   time.Duration
	id    string // written with the key, to recognise the own lease

	mu       sync.Mutex // guards what follows
	revision uint64
	until    time.Time // end of validity
	err      error     // why it is not held; nil while it is held
	lostCh   chan struct{}
	timer    *time.Timer        // ends the lease even if the renewal hangs
	stop     context.CancelFunc // ends the renewals
	doneCh   chan struct{}      // closed when they have ended
}

// Lease takes the key for ttl and renews it. If another process holds it, the error is a *LeaseHeldError. ctx bounds
// the taking only; the lease lasts until it is lost or Release is called.
func (bucket *Bucket) Lease(ctx context.Context, key string, value []byte, ttl time.Duration) (*Lease, error) {
	if err := checkKey(key); err != nil {
		return nil, err
	}
	if !bucket.cfg.Leases {
		return nil, bus.Errorf(bus.CodeInvalid, "lease %s: bucket %s is not a bucket of leases; open it with Config.Leases", key, bucket.cfg.Bucket)
	}
	if ttl < minLease || ttl > maxLease {
		return nil, bus.Errorf(bus.CodeInvalid, "lease %s: a lease lasts %v to %v, not %v", key, minLease, maxLease, ttl)
	}
	ctx, cancel := bounded(ctx)
	defer cancel()
	l := &Lease{kv: bucket, key: key, value: value, ttl: ttl, id: nuid.Next()}
	op, sent := OpCreate(key, value), time.Now()
	op.ttl, op.lease = ttl, l.id
	revision, err := one(bucket.commit(ctx, []Op{op}, nil))
	if err != nil {
		return nil, bucket.heldBy(ctx, key, err)
	}
	l.hold(revision, sent)
	return l, nil
}

// heldBy adds the holder to a refusal.
func (bucket *Bucket) heldBy(ctx context.Context, key string, err error) error {
	if !errors.Is(err, bus.ErrExists) {
		return err
	}
	rec, err2 := bucket.read(ctx, key)
	if err2 != nil || rec.deleted {
		return err
	}
	return &LeaseHeldError{Key: key, Holder: rec.Value, Since: rec.Time, Expires: rec.Time.Add(rec.ttl)}
}

// trust is the end of validity of a lease whose request was sent at that time.
func (l *Lease) trust(sent time.Time) time.Time { return sent.Add(l.ttl - l.ttl/10) }

// hold starts the renewals.
func (l *Lease) hold(revision uint64, sent time.Time) {
	ctx, cancel := context.WithCancel(context.Background())
	l.mu.Lock()
	defer l.mu.Unlock()
	l.revision, l.until, l.err = revision, l.trust(sent), nil
	l.lostCh, l.doneCh, l.stop = make(chan struct{}), make(chan struct{}), cancel
	l.timer = time.AfterFunc(time.Until(l.until), bus.Guard(l.expire))
	doneCh := l.doneCh
	bus.Go(func() { l.renewals(ctx, doneCh) })
}

// renewals runs until the lease is lost or released.
func (l *Lease) renewals(ctx context.Context, doneCh chan struct{}) {
	defer close(doneCh)
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.kv.b.Done():
			l.lose(bus.Errorf(bus.CodeClosed, "lease %s is lost: the bus is closed", l.key))
			return
		case <-time.After(l.ttl / 3):
		}
		if err := l.renew(ctx); err != nil && ctx.Err() == nil {
			l.lose(bus.Errorf(bus.CodeOf(err), "lease %s is lost: %w", l.key, err))
			return
		}
	}
}

// renew extends the lease. An answer after the end of validity does not count: the server may have been about to expire
// the key, and the deletion would remove the renewal.
func (l *Lease) renew(ctx context.Context) error {
	l.mu.Lock()
	revision, until := l.revision, l.until
	l.mu.Unlock()
	ctx, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	revision, sent, err := l.write(ctx, revision)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil || !before(time.Now(), until) {
		return bus.Errorf(bus.CodeTimedOut, "the renewal was answered too late")
	}
	l.revision, l.until = revision, l.trust(sent)
	l.timer.Reset(time.Until(l.until))
	return nil
}

// write replaces the lease's record at revision, with a new lifetime: an ordinary update would drop the lifetime.
func (l *Lease) write(ctx context.Context, revision uint64) (uint64, time.Time, error) {
	op, sent := OpUpdate(l.key, l.value, revision), time.Now()
	op.ttl, op.lease = l.ttl, l.id
	revision, err := one(l.kv.commit(ctx, []Op{op}, nil))
	return revision, sent, err
}

// expire runs when the timer fires: the lease ends, unless it was renewed just now.
func (l *Lease) expire() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.expireLocked()
}

func (l *Lease) expireLocked() {
	if l.err == nil && !before(time.Now(), l.until) {
		l.end(bus.Errorf(bus.CodeUnavailable, "lease %s is lost: it could not be renewed within %v", l.key, l.ttl))
	}
}

func (l *Lease) lose(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.end(err)
}

// end ends the lease; mu is held. It keeps the first reason, except that a release is final.
func (l *Lease) end(err error) {
	if l.err == nil {
		l.stop()
		l.timer.Stop()
		close(l.lostCh)
	}
	if l.err == nil || err == errReleased {
		l.err = err
	}
}

// before compares both clocks of this host: the monotonic one does not advance while the host is suspended.
func before(now, until time.Time) bool {
	return now.Before(until) && now.Round(0).Before(until.Round(0))
}

// Key is the lease's key.
func (l *Lease) Key() string { return l.key }

// Revision is the revision of the last renewal.
func (l *Lease) Revision() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.revision
}

// Valid reports whether no other process can hold the lease now. It uses only the clock.
func (l *Lease) Valid() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err == nil && before(time.Now(), l.until)
}

// Lost is closed when the lease is not held any more. Regain replaces the channel.
func (l *Lease) Lost() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lostCh
}

// Err is nil while the lease is held. Afterwards it is ErrConflict if the key has expired or belongs to another
// process; ErrUnavailable, ErrTimedOut or ErrOutcomeUnknown if the server was unreachable (and Regain may succeed);
// ErrClosed after Release or when the bus was closed.
func (l *Lease) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.expireLocked() // the timer may be late: a caller that finds it invalid also learns why
	return l.err
}

// Regain takes back a lease that was lost in an outage and has neither expired nor been taken: no other process has
// held it in between. Otherwise the error is ErrConflict. Only the holder calls it, and not concurrently with Release.
func (l *Lease) Regain(ctx context.Context) error {
	if err := l.Err(); err == nil || errors.Is(err, bus.ErrClosed) {
		return err
	}
	ctx, cancel := bounded(ctx)
	defer cancel()
	<-l.doneCh
	for {
		rec, err := l.kv.read(ctx, l.key)
		if err != nil {
			return err
		}
		if rec.deleted || rec.lease != l.id {
			return l.kv.conflict(bus.CodeConflict, l.key, rec.Revision, "the lease has expired or belongs to another process")
		}
		// The first renewal may have been too late, while the server was expiring the key; the second one tells.
		revision, _, err := l.write(ctx, rec.Revision)
		if err == nil {
			revision, sent, err2 := l.write(ctx, revision)
			if err = err2; err == nil {
				l.hold(revision, sent)
				return nil
			}
		}
		if !errors.Is(err, bus.ErrConflict) { // otherwise a delayed renewal of this lease may have been the cause
			return err
		}
	}
}

// Release ends the lease; watchers see the deletion at once. It works with a context that has ended, and may be called
// again. If the server is unreachable the lease expires.
func (l *Lease) Release(ctx context.Context) error {
	l.lose(errReleased)
	<-l.doneCh
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	rec, err := l.kv.read(ctx, l.key)
	if err != nil || rec.deleted || rec.lease != l.id {
		return err
	}
	op := OpDelete(l.key, rec.Revision)
	op.ttl = l.ttl + time.Second // the lease is over by then in any case
	if _, err := l.kv.commit(ctx, []Op{op}, nil); err != nil && !errors.Is(err, bus.ErrConflict) {
		return err
	}
	return nil
}

var errReleased error = bus.Errorf(bus.CodeClosed, "the lease was released")
