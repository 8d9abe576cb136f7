package kv_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/kv"
)

func TestLeaseIsRenewedWithItsLifetime(t *testing.T) {
	leasesOnVirtualTime(t, func(t *testing.T, f *bustest.Faults, bad, good *kv.Bucket) {
		ctx := t.Context()
		l, err := bad.Lease(ctx, "node.a", []byte("me"), 3*time.Second)
		require.NoError(t, err)
		_, err = good.Lease(ctx, "node.a", []byte("you"), 3*time.Second)
		require.ErrorIs(t, err, bus.ErrExists)
		var held *kv.LeaseHeldError
		require.ErrorAs(t, err, &held)
		require.Equal(t, "node.a is held by me", held.Key+" is held by "+string(held.Holder))
		require.Equal(t, 3*time.Second, held.Expires.Sub(held.Since))

		events, err := good.Watch(ctx, "node")
		require.NoError(t, err)
		time.Sleep(time.Minute + time.Second/2) // virtual, and between two renewals
		require.True(t, l.Valid())
		stream, err := bustest.Open(t, bus.Config{InProcess: f}).JetStream().Stream(ctx, "KV_leases")
		require.NoError(t, err)
		raw, err := stream.GetLastMsgForSubject(ctx, "$KV.leases.node.a")
		require.NoError(t, err)
		require.Equal(t, "3s", raw.Header.Get(jetstream.MsgTTLHeader))
		require.Equal(t, l.Revision(), raw.Sequence)

		cut := time.Now()
		f.Freeze()
		for ev := nextEvent(t, events); ev != "-node.a"; ev = nextEvent(t, events) {
		}
		require.InDelta(t, 3, time.Since(cut).Seconds(), 1.3) // it was renewed up to a second before the cut, expires up to 0.25 s late
		require.False(t, l.Valid())
		f.Thaw()
		require.NoError(t, l.Release(ctx))
	})
}

func TestLeaseIsReleasedOnce(t *testing.T) {
	ctx, bucket := t.Context(), openLeases(t, bustest.Open(t))
	_, err := bucket.Lease(ctx, "k", nil, 900*time.Millisecond)
	require.ErrorIs(t, err, bus.ErrInvalid)
	l, err := bucket.Lease(ctx, "k", nil, time.Minute)
	require.NoError(t, err)
	require.NoError(t, l.Release(ctx))
	<-l.Lost()
	require.ErrorIs(t, l.Err(), bus.ErrClosed)
	require.ErrorIs(t, l.Regain(ctx), bus.ErrClosed)
	other, err := bucket.Lease(ctx, "k", nil, time.Minute)
	require.NoError(t, err)
	require.NoError(t, l.Release(ctx)) // the lease of another holder stays
	require.True(t, other.Valid())
	_, err = bucket.Get(ctx, "k")
	require.NoError(t, err)
	require.NoError(t, bucket.Delete(ctx, "k", 0))
	require.NoError(t, other.Release(ctx))
}

// At most one holder considers the lease valid.
func TestLeaseIsGivenUpBeforeItExpires(t *testing.T) {
	leasesOnVirtualTime(t, func(t *testing.T, f *bustest.Faults, bad, good *kv.Bucket) {
		ctx, ttl := t.Context(), 4*time.Second
		l, err := bad.Lease(ctx, "k", nil, ttl)
		require.NoError(t, err)
		f.Freeze()
		<-l.Lost()
		require.False(t, l.Valid())
		require.Error(t, l.Err())
		_, err = good.Lease(ctx, "k", nil, ttl)
		require.ErrorIs(t, err, bus.ErrExists, "the server still holds it for us")

		f.Thaw() // in time: the lease is still valid
		require.NoError(t, l.Regain(ctx))
		require.True(t, l.Valid())
		time.Sleep(2 * ttl)
		require.True(t, l.Valid(), "and is renewed as before")

		f.Freeze()
		time.Sleep(2 * ttl)
		other, err := good.Lease(ctx, "k", nil, ttl)
		require.NoError(t, err)
		f.Thaw() // too late
		require.ErrorIs(t, l.Regain(ctx), bus.ErrConflict)
		require.True(t, other.Valid())
		require.NoError(t, l.Release(ctx))
		require.NoError(t, other.Release(ctx))
	})
}

// A lease is not valid any more and says why, from the same moment on: its timer may fire later.
func TestALeaseThatIsNotValidSaysWhy(t *testing.T) {
	leasesOnVirtualTime(t, func(t *testing.T, f *bustest.Faults, bad, _ *kv.Bucket) {
		for i := range 50 {
			l, err := bad.Lease(t.Context(), fmt.Sprint("k", i), nil, 2*time.Second)
			require.NoError(t, err)
			f.Freeze()
			for l.Valid() {
				time.Sleep(100 * time.Millisecond) // it ends at such a moment
			}
			require.Error(t, l.Err())
			f.Thaw()
			require.NoError(t, l.Release(t.Context()))
		}
	})
}

// The same with dropped, duplicated, delayed and swapped messages.
func TestLeaseHasOneBeliever(t *testing.T) {
	leasesOnVirtualTime(t, func(t *testing.T, f *bustest.Faults, bad, good *kv.Bucket) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		f.SetRule(bustest.Random(3, 0.1, 0.1, 0.1, 0.1, nil))
		var held [3]atomic.Pointer[kv.Lease]
		var wg sync.WaitGroup
		var tenures atomic.Int64
		for i, bucket := range []*kv.Bucket{bad, bad, good} {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(4, uint64(i)))
				for ctx.Err() == nil {
					if l, err := bucket.Lease(ctx, "k", nil, time.Second); err == nil {
						held[i].Store(l)
						tenures.Add(1)
						select {
						case <-l.Lost():
						case <-time.After(time.Duration(rng.IntN(5000)) * time.Millisecond):
						}
						_ = l.Release(ctx) // or it expires
					}
					time.Sleep(time.Duration(rng.IntN(500)) * time.Millisecond)
				}
			})
		}
		for ctx.Err() == nil {
			believers := 0
			for i := range held {
				if l := held[i].Load(); l != nil && l.Valid() {
					believers++
				}
			}
			require.LessOrEqual(t, believers, 1)
			if time.Sleep(5 * time.Millisecond); rand.N(400) == 0 {
				f.Freeze()
				time.AfterFunc(2*time.Second, f.Thaw)
			}
		}
		f.SetRule(nil)
		f.Thaw()
		wg.Wait()
		require.Greater(t, tenures.Load(), int64(8))
	})
}

func TestLeaseIsLostWhenItsKeyIsTaken(t *testing.T) {
	leasesOnVirtualTime(t, func(t *testing.T, f *bustest.Faults, bad, good *kv.Bucket) {
		l, err := bad.Lease(t.Context(), "k", nil, 3*time.Second)
		require.NoError(t, err)
		_, err = good.Put(t.Context(), "k", []byte("mine"))
		require.NoError(t, err)
		<-l.Lost()
		require.ErrorIs(t, l.Err(), bus.ErrConflict)
		require.ErrorIs(t, l.Regain(t.Context()), bus.ErrConflict)
		require.NoError(t, l.Release(t.Context()))
	})
}

func TestLeaseOutlivesARestart(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{})
	bucket := openKV(t, bustest.Open(t, bus.Config{InProcess: srv, OnError: func(error) {}}), kv.Config{Leases: true})
	l, err := bucket.Lease(t.Context(), "k", nil, 1500*time.Millisecond)
	require.NoError(t, err)
	before := l.Revision()
	srv.Restart()
	require.Eventually(t, func() bool { return l.Revision() > before }, 2*time.Minute, 10*time.Millisecond, "renewed after the restart")
	require.True(t, l.Valid())
	srv.Stop()
	<-l.Lost() // by the local clock, without a server
	srv.Restart()
	require.NoError(t, l.Release(t.Context()))
}

// A lost answer to a renewal does not end the lease.
func TestLeaseToleratesLostAnswers(t *testing.T) {
	leasesOnVirtualTime(t, func(t *testing.T, f *bustest.Faults, bad, good *kv.Bucket) {
		l, err := bad.Lease(t.Context(), "k", nil, 5*time.Second)
		require.NoError(t, err)
		n := 0
		f.SetRule(func(m bustest.Message) bustest.Verdict {
			if writeAck(m) {
				if n++; n%3 == 1 {
					return bustest.Drop
				}
			}
			return bustest.Pass
		})
		time.Sleep(time.Minute)
		require.True(t, l.Valid())
		require.NoError(t, l.Release(t.Context()))
	})
}
