package kv_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/kv"
)

// openCrashable opens a bus to a server that will be killed.
func openCrashable(t testing.TB, c *bustest.Crashable) *bus.Bus {
	t.Helper()
	return bustest.Open(t, bus.Config{URLs: []string{c.URL}, OnError: func(error) {}})
}

// expiredMarkers waits until the markers that Compact wrote have expired: only then can a rebuild restore the values
// before them.
func expiredMarkers(t *testing.T, b *bus.Bus, stream string, most uint64) {
	t.Helper()
	require.Eventually(t, func() bool {
		s, err := b.JetStream().Stream(t.Context(), stream)
		return err == nil && s.CachedInfo().State.Msgs <= most
	}, 2*time.Minute, 50*time.Millisecond)
}

// storedValue is the server's own value of a key, ghost or not.
func storedValue(t *testing.T, b *bus.Bus, key string) (revision uint64, marker, found bool) {
	t.Helper()
	s, err := b.JetStream().Stream(t.Context(), "KV_test")
	require.NoError(t, err)
	m, err := s.GetLastMsgForSubject(t.Context(), "$KV.test."+key)
	if err != nil {
		require.ErrorIs(t, err, jetstream.ErrMsgNotFound)
		return 0, false, false
	}
	return m.Sequence, m.Header.Get("KV-Operation") != "", true
}

// forget removes a key so that only its old value remains in the store, as the server's compaction of a block does to a
// deletion marker. The next crash restores the old value.
func forget(ctx context.Context, b *bus.Bus, key string) error {
	_, err := b.JetStream().PublishMsg(ctx, &nats.Msg{Subject: "$KV.test." + key, Header: nats.Header{
		"KV-Operation": {"PURGE"}, jetstream.MsgTTLHeader: {"1s"},
	}})
	return err
}

// A key that was deleted stays deleted after the server was killed.
func TestDeletedKeysStayDeletedAfterACrash(t *testing.T) {
	t.Parallel()
	ctx, srv := t.Context(), bustest.StartCrashable(t)
	b := openCrashable(t, srv)
	bucket := openKV(t, b, kv.Config{})
	kept, err := bucket.Put(ctx, "kept", []byte("1"))
	require.NoError(t, err)
	var old uint64
	for i := range 3 {
		old, err = bucket.Put(ctx, "gone", []byte(strconv.Itoa(i)))
		require.NoError(t, err)
	}
	require.NoError(t, forget(ctx, b, "gone"))
	require.NoError(t, bucket.Delete(ctx, "other", 0))
	done, err := bucket.Compact(ctx, true)
	require.NoError(t, err)
	require.Equal(t, kv.Compaction{Live: 1, Markers: 1, Removed: 1}, done)
	expiredMarkers(t, b, "KV_test", 3) // kept, the checkpoint and its part
	srv.Kill()
	srv.Start()

	other := openKV(t, openCrashable(t, srv), kv.Config{}) // a new handle
	ghost, marker, found := storedValue(t, openCrashable(t, srv), "gone")
	require.True(t, found && !marker && ghost == old, "the server has restored the old value, otherwise this test checks nothing")
	for name, bucket := range map[string]*kv.Bucket{"before": bucket, "after": other} {
		_, err = bucket.Get(ctx, "gone")
		require.ErrorIs(t, err, bus.ErrNotFound, name)
		keys, err := bucket.Keys(ctx, "")
		require.NoError(t, err)
		require.Equal(t, []string{"kept"}, keys, name)
		_, err = bucket.Update(ctx, "gone", []byte("deposed"), ghost)
		require.ErrorIs(t, err, bus.ErrConflict, name)
		require.ErrorIs(t, bucket.Delete(ctx, "gone", ghost), bus.ErrConflict, name)
		watching, stop := context.WithCancel(ctx)
		events, err := bucket.Watch(watching, "")
		require.NoError(t, err)
		require.Equal(t, "kept=1", nextEvent(t, events), name)
		require.Equal(t, "complete", nextEvent(t, events), name)
		stop()
	}
	revision, err := other.Create(ctx, "gone", []byte("anew"))
	require.NoError(t, err, "a ghost does not prevent a creation")
	e, err := bucket.Get(ctx, "gone")
	require.NoError(t, err)
	require.Equal(t, revision, e.Revision)
	_, err = bucket.Update(ctx, "kept", []byte("2"), kept)
	require.NoError(t, err, "a key in the checkpoint is live")
}

// Compact removes ghosts, which count against the bucket's limit.
func TestGhostsAreRemoved(t *testing.T) {
	t.Parallel()
	ctx, srv := t.Context(), bustest.StartCrashable(t)
	b := openCrashable(t, srv)
	bucket := openKV(t, b, kv.Config{})
	for i := range 50 {
		key := fmt.Sprintf("k%d", i)
		_, err := bucket.Put(ctx, key, nil)
		require.NoError(t, err)
		require.NoError(t, forget(ctx, b, key))
	}
	require.NoError(t, bucket.Delete(ctx, "other", 0))
	_, err := bucket.Compact(ctx, true)
	require.NoError(t, err)
	expiredMarkers(t, b, "KV_test", 1)
	srv.Kill()
	srv.Start()
	maintained, stop := context.WithCancel(ctx)
	defer stop()
	_, marker, found := storedValue(t, openCrashable(t, srv), "k7")
	require.True(t, found && !marker)
	go bucket.Maintain(maintained)
	expiredMarkers(t, openCrashable(t, srv), "KV_test", 2) // the checkpoint, and the marker of "other"
}

// Compaction bounds the number of markers, so that the size of a bucket depends on its live keys only.
func TestMarkersAreCompacted(t *testing.T) {
	t.Parallel()
	ctx, b := t.Context(), bustest.Open(t)
	bucket := openKV(t, b, kv.Config{})
	live := map[string]uint64{}
	for i := range 1300 {
		key := fmt.Sprintf("k.%d", i)
		revision, err := bucket.Put(ctx, key, nil)
		require.NoError(t, err)
		if i%13 == 0 {
			live[key] = revision
			continue
		}
		require.NoError(t, bucket.Delete(ctx, key, revision))
	}
	done, err := bucket.Compact(ctx, false)
	require.NoError(t, err)
	require.Equal(t, kv.Compaction{Live: 100, Markers: 1200, Removed: 1200}, done)
	expiredMarkers(t, b, "KV_test", 102)
	list, err := bucket.List(ctx, "")
	require.NoError(t, err)
	got := map[string]uint64{}
	for _, e := range list {
		got[e.Key] = e.Revision
	}
	require.Equal(t, live, got)
	done, err = bucket.Compact(ctx, false)
	require.NoError(t, err)
	require.Equal(t, kv.Compaction{Live: 100}, done)
}

// A checkpoint larger than one message is stored in parts.
func TestCheckpointInParts(t *testing.T) {
	t.Parallel()
	ctx, b := t.Context(), bustest.Open(t)
	bucket := openKV(t, b, kv.Config{})
	const keys = 9000
	for batch := range slices.Chunk(slices.Collect(func(yield func(int) bool) {
		for i := range keys {
			if !yield(i) {
				return
			}
		}
	}), 500) {
		ops := make([]kv.Op, len(batch))
		for i, n := range batch {
			ops[i] = kv.OpPut(fmt.Sprintf("a-rather-long-name-of-a-reservation.%d", n), nil)
		}
		_, err := bucket.Apply(ctx, ops)
		require.NoError(t, err)
	}
	for round := range 3 {
		require.NoError(t, bucket.Delete(ctx, fmt.Sprintf("a-rather-long-name-of-a-reservation.%d", round), 0))
		_, err := bucket.Compact(ctx, true)
		require.NoError(t, err)
		s, err := b.JetStream().Stream(ctx, "KV_test")
		require.NoError(t, err)
		_, err = s.GetLastMsgForSubject(ctx, fmt.Sprintf("$KV.test.=kv.live.%d.1", 1-round%2))
		require.NoError(t, err, "there are several parts, in two sets by turns")
		list, err := openKV(t, b, kv.Config{}).Keys(ctx, "")
		require.NoError(t, err)
		require.Len(t, list, keys-round-1)
	}
}

// A bucket that is full of markers can still be compacted.
func TestFullBucketIsCompacted(t *testing.T) {
	t.Parallel()
	ctx, b := t.Context(), bustest.Open(t)
	bucket := openKV(t, b, kv.Config{MaxBytes: 64 << 10})
	var refused error
	for i := 0; refused == nil; i++ {
		key := fmt.Sprintf("k.%d", i)
		if _, refused = bucket.Put(ctx, key, make([]byte, 300)); refused == nil {
			require.NoError(t, bucket.Delete(ctx, key, 0))
		}
		require.Less(t, i, 10000)
	}
	_, err := bucket.Compact(ctx, true)
	require.NoError(t, err)
	expiredMarkers(t, b, "KV_test", 1)
	_, err = bucket.Put(ctx, "k", nil)
	require.NoError(t, err)
	s, err := b.JetStream().Stream(ctx, "KV_test")
	require.NoError(t, err)
	require.EqualValues(t, 64<<10, s.CachedInfo().Config.MaxBytes)
}

// A lease that ended before a crash does not block its successor after it.
func TestEndedLeasesStayEndedAfterACrash(t *testing.T) {
	t.Parallel()
	ctx, srv := t.Context(), bustest.StartCrashable(t)
	b := openCrashable(t, srv)
	leases := openKV(t, b, kv.Config{Bucket: "leases", Leases: true})
	released, err := leases.Lease(ctx, "released", nil, time.Second)
	require.NoError(t, err)
	require.NoError(t, released.Release(ctx))
	_, err = b.JetStream().PublishMsg(ctx, leaseMessage("expired")) // of a dead holder
	require.NoError(t, err)
	_, err = b.JetStream().PublishMsg(ctx, leaseMessage("alive", "1h"))
	require.NoError(t, err)
	expiredMarkers(t, b, "KV_leases", 2) // one that is alive, and for a minute the server's marker of the one that expired
	srv.Kill()
	srv.Start()
	for range 20 {
		keys, err := openKV(t, openCrashable(t, srv), kv.Config{Bucket: "leases", Leases: true}).Keys(ctx, "")
		require.NoError(t, err)
		require.Equal(t, []string{"alive"}, keys)
	}
	for _, key := range []string{"released", "expired"} {
		again, err := leases.Lease(ctx, key, nil, time.Second)
		require.NoError(t, err, key)
		require.NoError(t, again.Release(ctx))
	}
}

// crashRestarts is the number of kills in the model test; TROUPE_CRASH_RESTARTS sets another one for a long run.
func crashRestarts(most int) int {
	if n, err := strconv.Atoi(os.Getenv("TROUPE_CRASH_RESTARTS")); err == nil {
		return n
	}
	return most
}

// modelKey is the possible state of a key, as its one writer knows it: several values when outcomes are unknown.
type modelKey struct {
	may   map[string]bool // values; "" for none
	stale []uint64        // former revisions
	// forgotten is the number of the compaction at which the marker of its deletion was removed; 0: the marker exists.
	// A later compaction has to hide values that a crash restores.
	forgotten int64
}

// modelWriter writes keys of its own.
type modelWriter struct {
	b         *bus.Bus
	kv        *kv.Bucket
	keys      map[string]*modelKey
	began     *atomic.Int64 // compactions
	completed *atomic.Int64 // the number of the latest that has written a checkpoint
}

// TestNoWriteComesBackAfterACrash kills the server repeatedly while four writers and a compactor run. Each key has one
// writer, which knows its possible values.
func TestNoWriteComesBackAfterACrash(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	srv := bustest.StartCrashable(t)
	const writers, keysEach = 4, 12
	var began, completed, ghosts atomic.Int64
	var all []*modelWriter
	for n := range writers {
		b := openCrashable(t, srv)
		w := &modelWriter{b: b, kv: openKV(t, b, kv.Config{}), keys: map[string]*modelKey{}, began: &began, completed: &completed}
		for k := range keysEach {
			w.keys[fmt.Sprintf("w%d.%d", n, k)] = &modelKey{may: map[string]bool{"": true}}
		}
		all = append(all, w)
	}
	compactor := openKV(t, openCrashable(t, srv), kv.Config{})
	rng := rand.New(rand.NewPCG(seed, 1))
	for round := range crashRestarts(4) {
		ctx, stop := context.WithCancel(t.Context())
		writing, rest := context.WithCancel(ctx)
		var group sync.WaitGroup
		for n, w := range all {
			rng := rand.New(rand.NewPCG(seed, uint64(round*writers+n+2)))
			group.Go(func() { w.write(writing, rng) })
		}
		group.Go(func() {
			for ctx.Err() == nil {
				n := began.Add(1)
				done, err := compactor.Compact(ctx, true)
				if err == nil && done.Markers > 0 {
					completed.Store(n)
				}
				ghosts.Add(int64(done.Ghosts))
			}
		})
		time.Sleep(time.Duration(100+rng.IntN(900)) * time.Millisecond)
		if round%2 == 0 { // every other crash happens after the expiring markers have expired
			rest()
			time.Sleep(1500 * time.Millisecond)
		}
		srv.Kill()
		rest()
		stop()
		group.Wait()
		srv.Start()
		for _, w := range all {
			w.check(t)
		}
	}
	t.Logf("%d ghosts were hidden", ghosts.Load())
}

func (w *modelWriter) write(ctx context.Context, rng *rand.Rand) {
	keys := slices.Sorted(maps.Keys(w.keys))
	for n := 0; ctx.Err() == nil; n++ {
		key := keys[rng.IntN(len(keys))]
		m, value := w.keys[key], ""
		var err error
		switch rng.IntN(8) {
		case 0, 1, 2, 3:
			value = fmt.Sprintf("%s at %d.%d", key, rng.Uint32(), n)
			var revision uint64
			if revision, err = w.kv.Put(ctx, key, []byte(value)); err == nil {
				m.stale = append(m.stale[max(0, len(m.stale)-5):], revision)
				m.forgotten = 0
			}
		case 4:
			began := w.began.Load() + 1
			if forget(ctx, w.b, key) == nil {
				m.forgotten = began
			}
			m.may[""] = true
			continue
		default:
			if err = w.kv.Delete(ctx, key, 0); err == nil {
				m.forgotten = 0
			}
		}
		if err != nil { // it may have happened
			m.may[value] = true
			m.forgotten = 0
			continue
		}
		m.may = map[string]bool{value: true}
	}
}

// check compares the bucket with the model, and removes the uncertainty of the model.
func (w *modelWriter) check(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	list, err := w.kv.List(ctx, slices.Sorted(maps.Keys(w.keys))[0][:2])
	require.NoError(t, err)
	listed := map[string]string{}
	for _, e := range list {
		listed[e.Key] = string(e.Value)
	}
	for key, m := range w.keys {
		value, revision := "", uint64(0)
		if e, err := w.kv.Get(ctx, key); err == nil {
			value, revision = string(e.Value), e.Revision
		} else {
			require.ErrorIs(t, err, bus.ErrNotFound)
		}
		if m.forgotten != 0 && m.forgotten < w.completed.Load() {
			m.may = map[string]bool{"": true}
		}
		require.True(t, m.may[value], "key %s has %q; it may have %q", key, value, m.may)
		require.Equal(t, value, listed[key], "key %s in the list", key)
		m.may, m.forgotten = map[string]bool{value: true}, 0
		for _, old := range m.stale {
			if old != revision {
				_, err := w.kv.Update(ctx, key, []byte("deposed"), old)
				require.ErrorIs(t, err, bus.ErrConflict, "key %s at revision %d", key, old)
			}
		}
	}
}

// leaseMessage is a lease of a holder that does not renew it.
func leaseMessage(key string, ttl ...string) *nats.Msg {
	life := "1s"
	if len(ttl) > 0 {
		life = ttl[0]
	}
	return &nats.Msg{Subject: "$KV.leases." + key, Header: nats.Header{jetstream.MsgTTLHeader: {life}, "Troupe-Lease": {"x"}}}
}
