package kv

import (
	"context"
	"time"

	"troupe/bus"
)

// HeldLease is a lease of a bucket as an observer sees it.
type HeldLease struct {
	Key       string
	Value     []byte
	Lifetime  time.Duration
	Remaining time.Duration // unless it is renewed; by the server's clock
}

// Leases lists the leases of a bucket that have not expired, by key.
func (bucket *Bucket) Leases(ctx context.Context) ([]HeldLease, error) {
	if !bucket.cfg.Leases {
		return nil, bus.Errorf(bus.CodeInvalid, "bucket %s is not a bucket of leases", bucket.cfg.Bucket)
	}
	entries, err := bucket.List(ctx, "")
	if err != nil {
		return nil, err
	}
	now, err := bucket.serverNow(ctx)
	if err != nil {
		return nil, err
	}
	var out []HeldLease
	for _, e := range entries {
		if e.Lifetime > 0 {
			out = append(out, HeldLease{Key: e.Key, Value: e.Value, Lifetime: e.Lifetime, Remaining: e.Time.Add(e.Lifetime).Sub(now)})
		}
	}
	return out, nil
}
