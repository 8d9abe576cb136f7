package placement_test

import (
	"cmp"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/kv"
	"troupe/bus/wire"
	"troupe/gpu"
	agent "troupe/nodes"
	"troupe/nodes/protocol"
	"troupe/placement"
)

// fakeHost is a node whose running grants the test sets.
type fakeHost struct {
	mu      sync.Mutex
	running []protocol.RunningGrant
	ended   []protocol.KillOrder
	wakeCh  chan struct{}
}

// runs makes the host report the devices of these reservations as running, and nothing else.
func (h *fakeHost) runs(name string, records ...placement.Record) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.running = nil
	for _, r := range records {
		run := protocol.RunningGrant{Reservation: r.ID, Token: r.Token, Namespace: r.Namespace, SharesWith: r.SharesWith}
		for _, w := range r.Workers {
			for _, slot := range w.Slots {
				if slot.Node == name {
					run.Devices = append(run.Devices, protocol.DeviceShare{UUID: slot.UUID, Milli: int(slot.Share)})
				}
			}
		}
		h.running = append(h.running, run)
	}
	select {
	case h.wakeCh <- struct{}{}:
	default:
	}
}

func (h *fakeHost) killed() []protocol.KillOrder {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.ended)
}

// addHost starts a reporter of a node with two devices that reports what the returned host runs.
func (s *testCluster) addHost(name string) (*fakeHost, *bustest.Faults) {
	s.t.Helper()
	h, line, readyCh := &fakeHost{wakeCh: make(chan struct{}, 1)}, bustest.NewFaults(s.srv), make(chan struct{})
	r, err := agent.NewReporter(agent.Config{
		Bus: s.busAt(bus.Config{InProcess: line}), Name: name, CPUs: 4, Lease: s.lease, Beat: 50 * time.Millisecond,
		Inventory:   gpu.NewSims(gpu.SimSpec{Nodes: 1, Devices: 2}, name)[0],
		RunningFunc: func() []protocol.RunningGrant { h.mu.Lock(); defer h.mu.Unlock(); return slices.Clone(h.running) }, RunningCh: h.wakeCh,
		EndFunc:        func(all []protocol.KillOrder) { h.mu.Lock(); defer h.mu.Unlock(); h.ended = append(h.ended, all...) },
		RegisteredFunc: func() { close(readyCh) },
	})
	require.NoError(s.t, err)
	s.run(name, r.Run)
	<-readyCh
	return h, line
}

// marked waits until the watermark covers the whole journal.
func (s *testCluster) marked() {
	s.t.Helper()
	bucket, err := kv.Open(s.t.Context(), s.bus(), kv.Config{Bucket: "troupe_ledger_mark"})
	require.NoError(s.t, err)
	ledger, err := kv.Open(s.t.Context(), s.bus(), kv.Config{Bucket: "troupe_ledger"})
	require.NoError(s.t, err)
	s.eventually(func() bool {
		var mark struct {
			Round uint64 `msgpack:"round"`
		}
		entry, err := bucket.Get(s.t.Context(), "mark")
		if err != nil || wire.Unmarshal(entry.Value, &mark) != nil {
			return false
		}
		entries, err := ledger.List(s.t.Context(), "journal")
		require.NoError(s.t, err)
		for _, e := range entries {
			var round struct {
				N uint64 `msgpack:"n"`
			}
			if e.Key != "journal.done" && wire.Unmarshal(e.Value, &round) == nil && round.N > mark.Round {
				return false
			}
		}
		return mark.Round > 0
	}, "the mark is written")
}

// damaged is a server on a file store with two hosts, two reservations (one of them on both hosts), and a ledger that
// was damaged while the server was down. No service runs yet.
type damaged struct {
	*testCluster
	store  string
	c      *placement.Client
	op     *placement.Client
	near   *fakeHost
	far    *fakeHost
	farBus *bustest.Faults
	one    placement.Record
	both   placement.Record
}

func newDamaged(t *testing.T, harm func(stream string)) *damaged {
	store := t.TempDir()
	d := &damaged{testCluster: &testCluster{t: t, srv: bustest.StartServer(t, bustest.Options{StoreDir: store}), lease: 2 * time.Second}, store: store}
	service := d.service(placement.Config{})
	d.c, d.op = d.client("default"), d.client("")
	d.near, _ = d.addHost("near")
	d.far, d.farBus = d.addHost("far")
	d.ready(d.c, 2)
	ctx := within(t, 2*time.Minute)
	var err error
	d.one, err = d.c.Reserve(ctx, placement.Request{ID: "one", Bundles: []placement.Bundle{on("near", 1)}})
	require.NoError(t, err)
	d.both, err = d.c.Reserve(ctx, placement.Request{ID: "both", Bundles: []placement.Bundle{on("near", 1), on("far", 1)}})
	require.NoError(t, err)
	d.near.runs("near", d.one, d.both)
	d.far.runs("far", d.both)
	d.marked()
	service.stop()
	d.srv.Stop()
	streams, err := filepath.Glob(filepath.Join(store, "jetstream", "*", "streams", "KV_troupe_ledger"))
	require.NoError(t, err)
	require.Len(t, streams, 1)
	harm(streams[0])
	d.srv.Restart()
	return d
}

// emptied truncates the matching files of a stream, and removes its index.
func emptied(t *testing.T, stream string, patterns ...string) {
	_ = os.Remove(filepath.Join(stream, "msgs", "index.db")) // it does not always exist
	for _, pattern := range patterns {
		files, err := filepath.Glob(filepath.Join(stream, pattern))
		require.NoError(t, err)
		require.NotEmpty(t, files, pattern)
		for _, file := range files {
			require.NoError(t, os.Truncate(file, 0))
		}
	}
}

func (d *damaged) records() map[string]placement.Record {
	list, err := d.c.List(within(d.t, 20*time.Second))
	require.NoError(d.t, err)
	found := map[string]placement.Record{}
	for _, r := range list.Records {
		found[r.ID] = r
	}
	return found
}

// A ledger that has lost its messages is not trusted: nothing is granted until the nodes have reported what they run,
// which is adopted under its tokens.
func TestEmptyLedgerIsNotTrusted(t *testing.T) {
	t.Parallel()
	for name, patterns := range map[string][]string{"block": {"msgs/*.blk"}, "meta.inf": {"meta.inf"}, "meta.sum": {"meta.sum"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDamaged(t, func(stream string) { emptied(t, stream, patterns...) })
			d.farBus.Freeze()
			d.service(placement.Config{})
			ctx := within(t, 2*time.Minute)
			status, err := d.op.Ledger(ctx)
			require.NoError(t, err)
			if status.Doubt == "" && strings.HasPrefix(name, "meta") && len(d.records()) == 2 {
				t.Log("the store was recovered as it was")
				d.farBus.Thaw()
				d.ready(d.c, 2)
			} else {
				require.Contains(t, status.Doubt, "ledger")
				d.eventually(func() bool { return len(d.records()) == 2 }, "what runs on near is adopted")
				_, err = d.c.TryReserve(ctx, placement.Request{ID: "x", AwaitNodes: true, Bundles: []placement.Bundle{on("near", 1)}})
				require.ErrorIs(t, err, placement.ErrLedgerUntrusted)
				require.Equal(t, bus.CodeUnavailable, bus.CodeOf(err))
				require.ErrorContains(t, err, "missing: far")
				require.ErrorContains(t, err, "troupe ledger accept")
				x, err := d.c.Explain(ctx, gang("", 1, 1))
				require.NoError(t, err)
				require.False(t, x.Granted)
				d.farBus.Thaw()
				d.eventually(func() bool { s, err := d.op.Ledger(ctx); return err == nil && s.Doubt == "" }, "all nodes have reported")
			}
			d.ready(d.c, 2)
			d.eventually(func() bool { return len(d.records()["both"].Workers) == 2 }, "the gang is whole")
			found := d.records()
			require.Equal(t, d.one.Token, found["one"].Token)
			require.Equal(t, d.both.Token, found["both"].Token)
			require.Equal(t, d.one.Workers[0].Slots[0].UUID, found["one"].Workers[0].Slots[0].UUID)
			_, err = d.c.TryReserve(ctx, placement.Request{ID: "x", Bundles: []placement.Bundle{on("near", 1)}})
			require.ErrorIs(t, err, placement.ErrMustWait, "granted over what runs there")
			rest, err := d.c.Reserve(ctx, placement.Request{ID: "rest", Bundles: []placement.Bundle{on("far", 1)}})
			require.NoError(t, err, "what is free is granted")
			require.Greater(t, rest.Token, d.both.Token)
			require.Empty(t, d.near.killed())
			require.Empty(t, d.far.killed())

			d.near.runs("near", d.both)
			require.NoError(t, d.c.Release(ctx, "one", d.one.Token), "its holder releases it with its token")
			_, err = d.c.Reserve(ctx, placement.Request{ID: "x", Bundles: []placement.Bundle{on("near", 1)}})
			require.NoError(t, err)
		})
	}
}

// An operator may accept the loss. Devices of a node that has not reported are still not granted.
func TestAcceptLedger(t *testing.T) {
	t.Parallel()
	d := newDamaged(t, func(stream string) { emptied(t, stream, "msgs/*.blk") })
	d.farBus.Freeze()
	d.service(placement.Config{})
	ctx := within(t, 2*time.Minute)
	d.eventually(func() bool { return len(d.records()) == 2 }, "what runs on near is adopted")
	_, err := d.c.AcceptLedger(ctx)
	require.ErrorIs(t, err, bus.ErrRefused, "an operator's")
	waiting := d.waits(d.c, placement.Request{ID: "late", AwaitNodes: true, Bundles: []placement.Bundle{on("far", 2)}})
	status, err := d.op.AcceptLedger(ctx)
	require.NoError(t, err)
	require.Empty(t, status.Doubt)
	require.Empty(t, waiting)
	d.farBus.Thaw()
	d.eventually(func() bool { return len(d.records()["both"].Workers) == 2 }, "adopted when it has come")
	require.Empty(t, waiting)
	d.near.runs("near", d.one)
	d.far.runs("far")
	require.NoError(t, d.c.Release(ctx, "both", d.both.Token))
	require.NoError(t, <-waiting)
}

// A ledger that was replaced by an older copy is detected by its watermark: reservations released since are dropped,
// and those granted since are adopted.
func TestRolledBackLedger(t *testing.T) {
	t.Parallel()
	store := t.TempDir()
	s := &testCluster{t: t, srv: bustest.StartServer(t, bustest.Options{StoreDir: store}), lease: 2 * time.Second}
	service := s.service(placement.Config{})
	c, op := s.client("default"), s.client("")
	near, _ := s.addHost("near")
	s.ready(c, 1)
	ctx := within(t, 2*time.Minute)
	released, err := c.Reserve(ctx, placement.Request{ID: "released", Bundles: []placement.Bundle{on("near", 1)}})
	require.NoError(t, err)
	s.marked()
	service.stop()
	s.srv.Stop()
	streams, err := filepath.Glob(filepath.Join(store, "jetstream", "*", "streams", "KV_troupe_ledger"))
	require.NoError(t, err)
	old := filepath.Join(t.TempDir(), "old")
	require.NoError(t, os.CopyFS(old, os.DirFS(streams[0])))
	s.srv.Restart()

	service = s.service(placement.Config{})
	s.ready(c, 1)
	require.NoError(t, c.Release(ctx, "released", released.Token))
	kept, err := c.Reserve(ctx, placement.Request{ID: "kept", Bundles: []placement.Bundle{on("near", 1)}})
	require.NoError(t, err)
	require.Equal(t, released.Workers[0].Slots[0].UUID, kept.Workers[0].Slots[0].UUID, "the device is another's now")
	near.runs("near", kept)
	s.marked()
	service.stop()
	s.srv.Stop()
	require.NoError(t, os.RemoveAll(streams[0]))
	require.NoError(t, os.CopyFS(streams[0], os.DirFS(old)))
	s.srv.Restart()

	s.service(placement.Config{})
	s.ready(c, 1)
	s.eventually(func() bool { return state(t, c, "kept") == placement.StateGranted && state(t, c, "released") == "" }, "what runs, and no ghost")
	s.eventually(func() bool { st, err := op.Ledger(ctx); return err == nil && st.Doubt == "" }, "resolved")
	next, err := c.Reserve(ctx, placement.Request{ID: "next", Bundles: []placement.Bundle{on("near", 1)}})
	require.NoError(t, err)
	require.NotEqual(t, kept.Workers[0].Slots[0].UUID, next.Workers[0].Slots[0].UUID)
	require.Greater(t, next.Token, kept.Token, "tokens never go back")
	require.Empty(t, near.killed())
}

// A ledger without its watermark is trusted.
func TestLostWatermark(t *testing.T) {
	t.Parallel()
	s := &testCluster{t: t, srv: bustest.StartServer(t, bustest.Options{}), lease: 2 * time.Second}
	service := s.service(placement.Config{})
	c := s.client("default")
	s.addHost("near")
	s.ready(c, 1)
	ctx := within(t, 2*time.Minute)
	_, err := c.Reserve(ctx, placement.Request{ID: "a", Bundles: []placement.Bundle{on("near", 1)}})
	require.NoError(t, err)
	s.marked()
	service.stop()
	require.NoError(t, s.bus().JetStream().DeleteStream(ctx, "KV_troupe_ledger_mark"))
	s.service(placement.Config{})
	_, err = c.Reserve(ctx, placement.Request{ID: "b", Bundles: []placement.Bundle{on("near", 1)}})
	require.NoError(t, err)
	s.marked()
}

// loseIdentity removes the ledger's identity and its watermark.
func (s *testCluster) loseIdentity() {
	s.t.Helper()
	ctx := within(s.t, 20*time.Second)
	bucket, err := kv.Open(ctx, s.bus(), kv.Config{Bucket: "troupe_ledger"})
	require.NoError(s.t, err)
	entries, err := bucket.List(ctx, "")
	require.NoError(s.t, err)
	for _, e := range entries {
		if e.Key == "ledger" || strings.HasPrefix(e.Key, "journal.") && e.Key != "journal.done" {
			require.NoError(s.t, bucket.Delete(ctx, e.Key, 0))
		}
	}
	require.NoError(s.t, s.bus().JetStream().DeleteStream(ctx, "KV_troupe_ledger_mark"))
}

// After an operator has accepted a ledger without identity, stale reservations are dropped and those in use are kept.
func TestLedgerWithoutIdentity(t *testing.T) {
	t.Parallel()
	s := &testCluster{t: t, srv: bustest.StartServer(t, bustest.Options{}), lease: 2 * time.Second}
	service := s.service(placement.Config{})
	c := s.client("default")
	near, _ := s.addHost("near")
	far, _ := s.addHost("far")
	s.addNode(s.bus(), "mute", gpu.NewSims(gpu.SimSpec{Nodes: 1, Devices: 1}, "mute")[0]) // its agent does not report what it runs
	s.ready(c, 3)
	ctx := within(t, 2*time.Minute)
	held := map[string]placement.Record{}
	for id, node := range map[string]string{"ghost": "near", "runs": "near", "claimed": "far", "asked": "far", "unknown": "mute"} {
		r, err := c.Reserve(ctx, placement.Request{ID: id, Bundles: []placement.Bundle{on(node, 1)}})
		require.NoError(t, err)
		held[id] = r
	}
	s.marked()
	service.stop()
	s.loseIdentity()
	near.runs("near", held["runs"])
	far.runs("far")

	dropped := make(chan placement.Event, 8)
	require.NoError(t, c.Events(ctx, func(e placement.Event) {
		if e.Kind == placement.EventDropped {
			dropped <- e
		}
	}))
	s.service(placement.Config{})
	operator := s.client("")
	status, err := operator.Ledger(ctx)
	require.NoError(t, err)
	require.Contains(t, status.Doubt, "no identity")
	_, err = operator.AcceptLedger(ctx)
	require.NoError(t, err)
	unknown, err := c.Confirm(ctx, []placement.ReservationRef{{ID: "claimed", Token: held["claimed"].Token}, {ID: "gone", Token: 7}, {ID: "ghost", Token: 1}})
	require.NoError(t, err)
	require.Equal(t, []placement.ReservationRef{{ID: "gone", Token: 7}, {ID: "ghost", Token: 1}}, unknown)
	_, err = c.Reserve(ctx, placement.Request{ID: "asked", Bundles: []placement.Bundle{on("far", 1)}})
	require.NoError(t, err, "its driver asks for it again")

	ev := <-dropped
	require.Equal(t, "ghost", ev.ID)
	require.Empty(t, state(t, c, "ghost"))
	list, err := c.List(ctx)
	require.NoError(t, err)
	for _, r := range list.Records {
		require.Equal(t, held[r.ID].Token, r.Token)
		require.Equal(t, r.ID == "unknown", r.Unconfirmed != "", "%s: %s", r.ID, r.Unconfirmed)
	}
	require.Len(t, list.Records, 4)
	time.Sleep(2 * s.lease)
	require.Empty(t, dropped)
	require.Equal(t, placement.StateGranted, state(t, c, "unknown"), "what is not known is kept")
	require.Empty(t, cmp.Or(len(near.killed()), len(far.killed())))
}
