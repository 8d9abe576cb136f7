package kv

import (
	"context"
	"sync"
	"time"
)

// clockTrust is the lifetime of an estimate of the server's clock.
const clockTrust = 10 * time.Second

// serverClock estimates the server's clock from the last timestamp of the server. The estimate is never ahead of the
// server's clock, whatever the network delay, so no lease is judged expired too early.
type serverClock struct {
	mu         sync.Mutex // guards what follows
	stamp      time.Time  // by the server's clock
	received   time.Time  // by the local clock; zero: no timestamp yet
	reconnects uint64     // of the connection it came on
}

func (c *serverClock) set(stamp time.Time, reconnects uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stamp, c.received, c.reconnects = stamp, time.Now(), reconnects
}

// now is the estimate; ok is false when a new timestamp is needed.
func (c *serverClock) now(reconnects uint64) (now time.Time, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	age := time.Since(c.received)
	return c.stamp.Add(age), !c.received.IsZero() && age < clockTrust && c.reconnects == reconnects
}

// serverNow is a lower bound of the server's clock.
func (bucket *Bucket) serverNow(ctx context.Context) (time.Time, error) {
	reconnects := bucket.b.Reconnects()
	if now, ok := bucket.clock.now(reconnects); ok {
		return now, nil
	}
	info, err := bucket.info(ctx, "read the server's clock")
	if err != nil {
		return time.Time{}, err
	}
	bucket.clock.set(info.TimeStamp, reconnects)
	return info.TimeStamp, nil
}

// expired reports whether a lease has ended by the server's clock. The server may still serve it: for a moment after
// each start, and as a ghost.
func (rec record) expired(now time.Time) bool {
	return rec.ttl > 0 && !now.Before(rec.Time.Add(rec.ttl))
}
