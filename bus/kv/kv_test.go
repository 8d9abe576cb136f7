package kv_test

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats-server/v2/server/ats"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/kv"
)

// openKV opens the bucket "test" on b, in memory unless cfg (at most one) says otherwise.
func openKV(t testing.TB, b *bus.Bus, cfg ...kv.Config) *kv.Bucket {
	t.Helper()
	c := kv.Config{Memory: true}
	if len(cfg) > 0 {
		c = cfg[0]
	}
	c.Bucket = cmp.Or(c.Bucket, "test")
	bucket, err := kv.Open(t.Context(), b, c)
	require.NoError(t, err)
	return bucket
}

// openLeases opens the bucket of leases "leases" on b, in memory.
func openLeases(t testing.TB, b *bus.Bus) *kv.Bucket {
	t.Helper()
	return openKV(t, b, kv.Config{Bucket: "leases", Memory: true, Leases: true})
}

// onVirtualTime runs a test in a synctest bubble, with a server and two connections: a faulty one and a good one.
func onVirtualTime(t *testing.T, test func(t *testing.T, f *bustest.Faults, bad, good *kv.Bucket)) {
	busBubble(t, func(t *testing.T, f *bustest.Faults, bad, good *bus.Bus) {
		test(t, f, openKV(t, bad), openKV(t, good))
	})
}

// leasesOnVirtualTime is onVirtualTime with a bucket of leases.
func leasesOnVirtualTime(t *testing.T, test func(t *testing.T, f *bustest.Faults, bad, good *kv.Bucket)) {
	busBubble(t, func(t *testing.T, f *bustest.Faults, bad, good *bus.Bus) {
		test(t, f, openLeases(t, bad), openLeases(t, good))
	})
}

func busBubble(t *testing.T, test func(t *testing.T, f *bustest.Faults, bad, good *bus.Bus)) {
	ats.Register() // outside the bubble, because it lasts as long as the process
	defer func() {
		ats.Unregister()
		emptyPools()
	}()
	emptyPools()
	synctest.Test(t, func(t *testing.T) {
		srv := bustest.StartServer(t, bustest.Options{})
		f := bustest.NewFaults(srv)
		test(t, f, bustest.Open(t, bus.Config{InProcess: f}), bustest.Open(t, bus.Config{InProcess: srv}))
	})
}

// writeAck matches the server's answers to writes.
func writeAck(m bustest.Message) bool {
	return m.Toward == bustest.ToClient && strings.Contains(string(m.Payload), `"stream":"KV_test"`)
}

// nextEvent describes the next event of a watch.
func nextEvent(t *testing.T, events <-chan kv.Event) string {
	t.Helper()
	select {
	case ev, ok := <-events:
		require.True(t, ok, "the watch has ended")
		switch ev.Kind {
		case kv.EventPut:
			return ev.Key + "=" + string(ev.Value)
		case kv.EventDelete:
			return "-" + ev.Key
		}
		return "complete"
	case <-time.After(2 * time.Minute):
		t.Fatal("no event")
		return ""
	}
}

func TestKVChecksEachWrite(t *testing.T) {
	ctx := t.Context()
	for _, cfg := range []kv.Config{{Memory: true}, {}} {
		bucket := openKV(t, bustest.Open(t), cfg)
		_, err := bucket.Get(ctx, "a.b")
		require.ErrorIs(t, err, bus.ErrNotFound)
		first, err := bucket.Create(ctx, "a.b", []byte("1"))
		require.NoError(t, err)
		_, err = bucket.Create(ctx, "a.b", []byte("x"))
		require.ErrorIs(t, err, bus.ErrExists)
		second, err := bucket.Update(ctx, "a.b", []byte("2"), first)
		require.NoError(t, err)
		require.Greater(t, second, first)

		_, err = bucket.Update(ctx, "a.b", []byte("x"), first)
		require.ErrorIs(t, err, bus.ErrConflict)
		now, ok := kv.RevisionOf(err)
		require.True(t, ok)
		require.Equal(t, second, now)
		require.ErrorIs(t, bucket.Delete(ctx, "a.b", first), bus.ErrConflict)

		e, err := bucket.Get(ctx, "a.b")
		require.NoError(t, err)
		require.Equal(t, "a.b=2", e.Key+"="+string(e.Value))
		require.NoError(t, bucket.Delete(ctx, "a.b", second))
		_, err = bucket.Get(ctx, "a.b")
		require.ErrorIs(t, err, bus.ErrNotFound)
		_, err = bucket.Update(ctx, "a.b", []byte("x"), second)
		require.ErrorIs(t, err, bus.ErrConflict)
		_, err = bucket.Create(ctx, "a.b", []byte("3")) // over the marker of the deletion
		require.NoError(t, err)
	}
}

func TestKVRefusesBadInput(t *testing.T) {
	ctx, b := t.Context(), bustest.Open(t)
	bucket := openKV(t, b)
	for _, key := range []string{"", ".", "a.", ".a", "a..b", "a b", "a.*", ">", "ä", strings.Repeat("k", 600)} {
		_, err := bucket.Put(ctx, key, nil)
		require.ErrorIs(t, err, bus.ErrInvalid, key)
		_, err = bucket.Get(ctx, key)
		require.ErrorIs(t, err, bus.ErrInvalid, key)
	}
	_, err := bucket.Put(ctx, "big", make([]byte, 2<<20))
	require.ErrorIs(t, err, bus.ErrInvalid)
	_, err = bucket.Update(ctx, "a", nil, 0)
	require.ErrorIs(t, err, bus.ErrInvalid)
	_, err = bucket.Watch(ctx, "a.*")
	require.ErrorIs(t, err, bus.ErrInvalid)
	_, err = kv.Open(ctx, b, kv.Config{Bucket: "a.b", Replicas: -2})
	require.ErrorContains(t, err, "bucket name")
	require.ErrorContains(t, err, "Replicas")
	_, err = kv.Open(ctx, b, kv.Config{Bucket: "test"})
	require.ErrorIs(t, err, bus.ErrExists, "a bucket in memory is not one on file")
	full, err := kv.Open(ctx, b, kv.Config{Bucket: "small", MaxBytes: 4096})
	require.NoError(t, err)
	_, err = full.Put(ctx, "k", make([]byte, 8192))
	require.ErrorIs(t, err, bus.ErrRefused)
	gone, cancel := context.WithCancel(ctx)
	cancel()
	_, err = bucket.Put(gone, "k", nil)
	require.ErrorIs(t, err, bus.ErrCancelled)
}

func TestKVListsInOrder(t *testing.T) {
	ctx, bucket := t.Context(), openKV(t, bustest.Open(t))
	none, err := bucket.List(ctx, "")
	require.NoError(t, err)
	require.Empty(t, none)
	var want []string
	for i := range 300 {
		want = append(want, fmt.Sprintf("role.a.%03d", i))
		_, err := bucket.Put(ctx, want[i], []byte(strconv.Itoa(i)))
		require.NoError(t, err)
	}
	for _, key := range []string{"role.a", "role.b", "role.ab", "role.a.000"} {
		_, err := bucket.Put(ctx, key, []byte("0"))
		require.NoError(t, err)
	}
	require.NoError(t, bucket.Delete(ctx, "role.a.299", 0))
	keys, err := bucket.Keys(ctx, "role.a")
	require.NoError(t, err)
	require.Equal(t, append([]string{"role.a"}, want[:299]...), keys)
	list, err := bucket.List(ctx, "role.a.007")
	require.NoError(t, err)
	require.Equal(t, "7", string(list[0].Value))
}

// Opening an existing bucket enables its atomic writes for all users and disables nothing.
func TestKVOpensWhatIsThere(t *testing.T) {
	ctx, b := t.Context(), bustest.Open(t)
	_, err := b.JetStream().CreateKeyValue(ctx, jetstream.KeyValueConfig{Bucket: "test"})
	require.NoError(t, err)
	for range 2 {
		bucket := openKV(t, b, kv.Config{})
		_, err = bucket.Apply(ctx, []kv.Op{kv.OpPut("a", nil), kv.OpPut("b", nil)})
		require.NoError(t, err)
	}
	s, err := b.JetStream().Stream(ctx, "KV_test")
	require.NoError(t, err)
	c := s.CachedInfo().Config
	require.True(t, c.AllowAtomicPublish && c.AllowMsgTTL && c.SubjectDeleteMarkerTTL > 0)
	require.Positive(t, c.MaxBytes)
	require.EqualValues(t, 1, c.MaxMsgsPerSubject)
}

// oldServer implements enough of the protocol to report its version.
type oldServer struct{}

func (oldServer) InProcessConn() (net.Conn, error) {
	here, there := net.Pipe()
	go func() {
		_, _ = fmt.Fprint(there, "INFO {\"version\":\"2.11.4\",\"max_payload\":1048576,\"headers\":true,\"proto\":1}\r\n")
		for lines := bufio.NewScanner(there); lines.Scan(); {
			if lines.Text() == "PING" {
				_, _ = fmt.Fprint(there, "PONG\r\n")
			}
		}
	}()
	return here, nil
}

// A bucket that is as wanted is not written again when it is opened.
func TestKVOpenChangesNothing(t *testing.T) {
	t.Parallel()
	b := bustest.Open(t, bus.Config{})
	cfg := kv.Config{Replicas: bus.AllReplicas, MaxBytes: 1 << 20}
	openKV(t, b, cfg)
	sub, err := b.Conn().SubscribeSync("$JS.API.STREAM.UPDATE.>")
	require.NoError(t, err)
	openKV(t, b, cfg)
	require.NoError(t, b.Flush(t.Context()))
	updates, _, err := sub.Pending()
	require.NoError(t, err)
	require.Zero(t, updates)
	cfg.MaxBytes *= 2
	openKV(t, b, cfg)
	_, err = sub.NextMsg(2 * time.Minute)
	require.NoError(t, err, "a change is one")
}

func TestKVNamesTheServerItCannotUse(t *testing.T) {
	_, err := kv.Open(t.Context(), bustest.Open(t, bus.Config{InProcess: oldServer{}}), kv.Config{Bucket: "test"})
	require.ErrorIs(t, err, bus.ErrVersion)
	require.ErrorContains(t, err, "version 2.11.4; key-value needs 2.12.1")
	plain, err := server.NewServer(&server.Options{DontListen: true, NoSigs: true, NoLog: true})
	require.NoError(t, err)
	plain.Start()
	t.Cleanup(func() { plain.Shutdown(); plain.WaitForShutdown() })
	_, err = kv.Open(t.Context(), bustest.Open(t, bus.Config{InProcess: plain}), kv.Config{Bucket: "test"})
	require.ErrorIs(t, err, bus.ErrUnavailable)
	require.ErrorContains(t, err, "no JetStream")
}

func TestKVOneCreatorWins(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{})
	kvs := []*kv.Bucket{openKV(t, bustest.Open(t, bus.Config{InProcess: srv})), openKV(t, bustest.Open(t, bus.Config{InProcess: srv}))}
	for round := range 20 {
		var wg sync.WaitGroup
		var won, lost atomic.Int32
		for i := range 8 {
			wg.Go(func() {
				switch _, err := kvs[i%2].Create(t.Context(), strconv.Itoa(round), []byte{byte(i)}); {
				case err == nil:
					won.Add(1)
				case bus.CodeOf(err) == bus.CodeExists:
					lost.Add(1)
				}
			})
		}
		wg.Wait()
		require.EqualValues(t, 1, won.Load())
		require.EqualValues(t, 7, lost.Load())
	}
}

// A request of which nothing is heard is repeated soon: a new leader opens several buckets before it can serve anybody.
func TestLostRequestsAreRepeated(t *testing.T) {
	busBubble(t, func(t *testing.T, f *bustest.Faults, bad, good *bus.Bus) {
		_, err := openKV(t, good).Put(t.Context(), "k", []byte("v"))
		require.NoError(t, err)
		for _, request := range []string{"$JS.API.INFO", "$JS.API.STREAM.INFO.", "$JS.API.CONSUMER.CREATE.", "$JS.API.STREAM.MSG.GET."} {
			lost := false
			f.SetRule(bustest.Once(bustest.Drop, func(m bustest.Message) bool {
				lost = lost || strings.HasPrefix(m.Subject, request)
				return strings.HasPrefix(m.Subject, request)
			}))
			began := time.Now()
			list, err := openKV(t, bad).List(t.Context(), "")
			require.NoError(t, err, request)
			require.Len(t, list, 1)
			require.Less(t, time.Since(began), 3*time.Second, request)
			require.True(t, lost, request)
		}
	})
}

// An update is never made over a revision that its writer has not seen, and never reported as failed when it was made.
func TestKVCountsEveryIncrement(t *testing.T) {
	onVirtualTime(t, func(t *testing.T, f *bustest.Faults, bad, good *kv.Bucket) {
		_, err := good.Put(t.Context(), "n", []byte("0"))
		require.NoError(t, err)
		f.SetRule(bustest.Random(1, 0.05, 0.05, 0.05, 0.05, nil))
		var made, unknown atomic.Int64
		var wg sync.WaitGroup
		for _, bucket := range []*kv.Bucket{bad, bad, bad, good} {
			wg.Go(func() {
				for range 100 {
					switch err := increment(t.Context(), bucket, "n"); bus.CodeOf(err) {
					case "":
						made.Add(1)
					case bus.CodeOutcomeUnknown:
						unknown.Add(1)
					case bus.CodeConflict, bus.CodeTimedOut:
					default:
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		e, err := good.Get(t.Context(), "n")
		require.NoError(t, err)
		n, _ := strconv.ParseInt(string(e.Value), 10, 64)
		require.GreaterOrEqual(t, n, made.Load())
		require.LessOrEqual(t, n, made.Load()+unknown.Load())
		require.Greater(t, made.Load(), int64(100))
	})
}

func increment(ctx context.Context, bucket *kv.Bucket, key string) error {
	e, err := bucket.Get(ctx, key)
	if errors.Is(err, bus.ErrNotFound) {
		_, err = bucket.Create(ctx, key, []byte("1"))
		return err
	}
	if err != nil {
		return err
	}
	n, _ := strconv.Atoi(string(e.Value))
	_, err = bucket.Update(ctx, key, []byte(strconv.Itoa(n+1)), e.Revision)
	return err
}

func TestKVFindsOutWhatBecameOfAWrite(t *testing.T) {
	onVirtualTime(t, func(t *testing.T, f *bustest.Faults, bad, good *kv.Bucket) {
		ctx := t.Context()
		f.SetRule(bustest.Once(bustest.Drop, writeAck)) // stored, without an answer
		revision, err := bad.Create(ctx, "landed", []byte("1"))
		require.NoError(t, err)
		e, err := good.Get(ctx, "landed")
		require.NoError(t, err)
		require.Equal(t, e.Revision, revision)

		f.SetRule(bustest.Once(bustest.Drop, func(m bustest.Message) bool { return m.Toward == bustest.ToServer })) // not stored
		_, err = bad.Update(ctx, "landed", []byte("2"), revision)
		require.NoError(t, err)

		overtake := func(m bustest.Message) bool { // stored, and replaced before recall
			if writeAck(m) {
				_, err := good.Put(context.Background(), "landed", []byte("theirs"))
				return err == nil
			}
			return false
		}
		e, err = good.Get(ctx, "landed")
		require.NoError(t, err)
		f.SetRule(bustest.Once(bustest.Drop, overtake))
		revision, err = bad.Update(ctx, "landed", []byte("ours"), e.Revision)
		require.NoError(t, err)
		e, err = good.Get(ctx, "landed")
		require.NoError(t, err)
		require.Equal(t, "theirs", string(e.Value))
		require.Equal(t, e.Revision, revision+1)

		f.SetRule(func(m bustest.Message) bustest.Verdict { // every answer is lost
			if writeAck(m) {
				return bustest.Drop
			}
			return bustest.Pass
		})
		_, err = bad.Put(ctx, "dark", nil)
		require.ErrorIs(t, err, bus.ErrOutcomeUnknown)
		f.Freeze()
		_, err = bad.Get(ctx, "dark")
		require.ErrorIs(t, err, bus.ErrTimedOut)
		f.Thaw()
	})
}

func TestKVWaitsOutARestart(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{})
	b := bustest.Open(t, bus.Config{InProcess: srv, OnError: func(error) {}}) // the connection breaks on purpose
	bucket := openKV(t, b, kv.Config{})
	first, err := bucket.Put(t.Context(), "a", []byte("1"))
	require.NoError(t, err)
	srv.Stop()
	require.Eventually(t, func() bool { // before that, a write may or may not have been sent
		short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		_, err = bucket.Put(short, "a", []byte("2"))
		return errors.Is(err, bus.ErrUnavailable)
	}, 2*time.Minute, time.Millisecond)
	doneCh := make(chan error)
	go func() {
		_, err := bucket.Update(context.Background(), "a", []byte("3"), first)
		doneCh <- err
	}()
	srv.Restart()
	require.NoError(t, <-doneCh)
}

// Nothing waits for a server that accepts a connection and says nothing: the outcome is known.
func TestKVBesideAHangingHandshake(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	b := bustest.Open(t, bus.Config{URLs: []string{srv.URL()}, OnError: func(error) {}})
	bucket := openKV(t, b, kv.Config{})
	address := b.Conn().ConnectedAddr()
	srv.Stop()
	mute, err := net.Listen("tcp", address)
	require.NoError(t, err)
	defer func() { _ = mute.Close() }()
	held, err := mute.Accept()
	require.NoError(t, err)
	defer func() { _ = held.Close() }()
	for _, do := range []func(ctx context.Context) error{
		func(ctx context.Context) error { _, err := bucket.Put(ctx, "a", []byte("1")); return err },
		func(ctx context.Context) error { _, err := bucket.Get(ctx, "a"); return err },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		require.ErrorIs(t, do(ctx), bus.ErrUnavailable)
		cancel()
	}
}

// Replicas lag behind each other and check a write twice.
func TestKVOnThreeReplicas(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	servers := bustest.StartCluster(t)
	f := bustest.NewFaults(servers[0])
	kvs := make([]*kv.Bucket, 3)
	var leases *kv.Bucket
	for i, way := range []nats.InProcessConnProvider{f, servers[1], servers[2]} {
		b := bustest.Open(t, bus.Config{InProcess: way, OnError: func(error) {}})
		require.Eventually(t, func() (ok bool) { // the last peers may still be on their way
			bucket, err := kv.Open(ctx, b, kv.Config{Bucket: "test", Replicas: 3})
			kvs[i] = bucket
			return err == nil
		}, 2*time.Minute, 20*time.Millisecond)
		leases = openKV(t, b, kv.Config{Bucket: "leases", Leases: true})
		require.Equal(t, 3, leases.Replicas(), "as many as the cluster offers")
	}
	for i := range 30 {
		revision, err := kvs[i%3].Put(ctx, "k."+strconv.Itoa(i), nil)
		require.NoError(t, err)
		e, err := kvs[(i+1)%3].Get(ctx, "k."+strconv.Itoa(i))
		require.NoError(t, err)
		require.Equal(t, revision, e.Revision, "a read that lags")
		list, err := kvs[(i+2)%3].List(ctx, "k")
		require.NoError(t, err)
		require.Len(t, list, i+1, "a list that lags")
	}
	var wg sync.WaitGroup
	for _, bucket := range kvs { // conflicts are reported, and nothing else fails
		wg.Go(func() {
			for done := 0; done < 20; {
				switch err := increment(ctx, bucket, "n"); bus.CodeOf(err) {
				case "":
					done++
				case bus.CodeConflict, bus.CodeExists:
				default:
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	e, err := kvs[0].Get(ctx, "n")
	require.NoError(t, err)
	require.Equal(t, "60", string(e.Value))

	f.SetRule(bustest.Once(bustest.Drop, writeAck))
	revisions, err := kvs[0].Apply(ctx, []kv.Op{kv.OpCreate("x", nil), kv.OpUpdate("n", nil, e.Revision)})
	require.NoError(t, err)
	e, err = kvs[1].Get(ctx, "n")
	require.NoError(t, err)
	require.Equal(t, revisions[1], e.Revision)

	leading, resign := context.WithCancel(ctx)
	c := stand(leading, side{kvs[0], leases}, "a")
	led := <-c.termCh
	for i := range 8 { // concurrent ones would be refused by replicas
		wg.Go(func() {
			for k := range 10 {
				if _, err := led.Put(ctx, fmt.Sprintf("%d.%d", i, k), nil); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	resign()
	require.ErrorIs(t, <-c.doneCh, context.Canceled)
}

func TestKVWatchConvergesOverARestart(t *testing.T) {
	for _, memory := range []bool{false, true} {
		t.Run(fmt.Sprintf("memory=%v", memory), func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			srv := bustest.StartServer(t, bustest.Options{Listen: true})
			f := bustest.NewFaults(bustest.Dial(srv.URL()))
			cfg := kv.Config{Memory: memory}
			bucket := openKV(t, bustest.Open(t, bus.Config{URLs: []string{srv.URL()}}), cfg)
			for _, key := range []string{"r.keep", "r.change", "r.drop", "other"} {
				_, err := bucket.Put(ctx, key, []byte("1"))
				require.NoError(t, err)
			}
			events, err := openKV(t, bustest.Open(t, bus.Config{InProcess: f}), cfg).Watch(ctx, "r")
			require.NoError(t, err)
			require.Equal(t, []string{"r.keep=1", "r.change=1", "r.drop=1", "complete"}, []string{nextEvent(t, events), nextEvent(t, events), nextEvent(t, events), nextEvent(t, events)})
			require.NoError(t, bucket.Delete(ctx, "r.keep", 0))
			require.Equal(t, "-r.keep", nextEvent(t, events))
			_, err = bucket.Create(ctx, "r.keep", []byte("2"))
			require.NoError(t, err)
			require.Equal(t, "r.keep=2", nextEvent(t, events))

			f.Freeze() // the watcher misses the following writes
			srv.Restart()
			require.NoError(t, bucket.Delete(ctx, "r.drop", 0))
			_, err = bucket.Put(ctx, "r.change", []byte("2"))
			require.NoError(t, err)
			f.Cut()
			f.Thaw()
			got := map[string]bool{}
			for ev := nextEvent(t, events); ev != "complete"; ev = nextEvent(t, events) {
				got[ev] = true
			}
			want := map[string]bool{"r.change=2": true, "-r.drop": true}
			if memory { // the restart has emptied the bucket
				want["-r.keep"] = true
			}
			require.Equal(t, want, got)
			_, err = bucket.Put(ctx, "r.new", []byte("1"))
			require.NoError(t, err)
			require.Equal(t, "r.new=1", nextEvent(t, events))
		})
	}
}

// A watch converges to the current state on a faulty connection.
func TestKVWatchConvergesOnABadLine(t *testing.T) {
	onVirtualTime(t, func(t *testing.T, f *bustest.Faults, bad, good *kv.Bucket) {
		ctx, cancel := context.WithCancel(t.Context())
		f.SetRule(bustest.Random(2, 0.05, 0.05, 0.05, 0.05, nil))
		events, err := bad.Watch(ctx, "")
		require.NoError(t, err)
		var seen sync.Map
		doneCh := make(chan struct{})
		go func() {
			defer close(doneCh)
			for ev := range events {
				time.Sleep(40 * time.Millisecond) // slower than the writer and a reconnect
				switch ev.Kind {
				case kv.EventPut:
					seen.Store(ev.Key, ev.Revision)
				case kv.EventDelete:
					seen.Delete(ev.Key)
				}
			}
		}()
		rng := rand.New(rand.NewPCG(1, 2))
		for i := range 300 {
			if i%30 == 29 {
				f.Cut()
			}
			key := strconv.Itoa(rng.IntN(100))
			if _, err = good.Put(ctx, key, nil); rng.IntN(3) == 0 {
				err = good.Delete(ctx, key, 0)
			}
			require.NoError(t, err)
			time.Sleep(time.Duration(rng.IntN(10)) * time.Millisecond)
		}
		f.SetRule(nil)
		time.Sleep(time.Minute)
		want, err := good.List(ctx, "")
		require.NoError(t, err)
		n := 0
		seen.Range(func(any, any) bool { n++; return true })
		require.Len(t, want, n)
		for _, e := range want {
			revision, _ := seen.Load(e.Key)
			require.Equal(t, e.Revision, revision)
		}
		cancel()
		<-doneCh
	})
}

func TestKVWatchKeepsWhatIsNotTaken(t *testing.T) {
	onVirtualTime(t, func(t *testing.T, f *bustest.Faults, bad, good *kv.Bucket) {
		_, err := good.Apply(t.Context(), []kv.Op{kv.OpPut("a", nil), kv.OpPut("b", nil)})
		require.NoError(t, err)
		events, err := bad.Watch(t.Context(), "")
		require.NoError(t, err)
		for range 3 { // interruptions before the first event is received
			time.Sleep(time.Second)
			f.Cut()
		}
		time.Sleep(time.Second)
		require.Equal(t, []string{"a=", "b=", "complete"}, []string{nextEvent(t, events), nextEvent(t, events), nextEvent(t, events)})
	})
}

func TestKVWatchEndsWithItsContext(t *testing.T) {
	bucket := openKV(t, bustest.Open(t))
	for i := range 500 {
		_, err := bucket.Put(t.Context(), strconv.Itoa(i), make([]byte, 1000))
		require.NoError(t, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	events, err := bucket.Watch(ctx, "")
	require.NoError(t, err)
	<-events // and stop reading
	cancel()
	for range events {
	}
}

// emptyPools empties the pools: nats.go pools timers, and those of a bubble cannot be used outside it, nor the reverse.
func emptyPools() {
	runtime.GC()
	runtime.GC()
}
