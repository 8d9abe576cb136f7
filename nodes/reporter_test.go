package nodes_test

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/kv"
	"troupe/bus/wire"
	"troupe/gpu"
	"troupe/nodes"
	"troupe/nodes/protocol"
)

func TestMain(m *testing.M) { bustest.Main(m) }

// report runs a reporter until the returned function is called, which waits for the end of Run.
func report(t *testing.T, b *bus.Bus, sim gpu.Inventory, own func(int) bool) (stop func()) {
	t.Helper()
	thereCh := make(chan struct{})
	r, err := nodes.NewReporter(nodes.Config{
		Bus: b, Name: "host", Inventory: sim, OwnFunc: own, Beat: 20 * time.Millisecond, RegisteredFunc: func() { close(thereCh) },
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	doneCh := make(chan error, 1)
	go func() { doneCh <- r.Run(ctx) }()
	select {
	case <-thereCh:
	case err := <-doneCh:
		t.Fatal(err)
	}
	ended := false
	stop = func() {
		if cancel(); !ended {
			ended = true
			require.NoError(t, <-doneCh)
		}
	}
	t.Cleanup(stop)
	return stop
}

// beats receives the node's heartbeats.
func beats(t *testing.T, b *bus.Bus) <-chan protocol.Heartbeat {
	t.Helper()
	ch := make(chan protocol.Heartbeat, 1024)
	sub, err := b.Subscribe(bus.NodeBeats(), func(m *bus.Msg) {
		var beat protocol.Heartbeat
		if err := wire.Unmarshal(m.Data, &beat); err != nil {
			t.Error(err)
		}
		ch <- beat
	})
	require.NoError(t, err)
	t.Cleanup(func() { _ = sub.Unsubscribe() })
	require.NoError(t, b.Flush(t.Context()))
	return ch
}

// next is the next matching heartbeat.
func next(t *testing.T, ch <-chan protocol.Heartbeat, want func(protocol.Heartbeat) bool) protocol.Heartbeat {
	t.Helper()
	late := time.After(2 * time.Minute)
	for {
		select {
		case beat := <-ch:
			if want(beat) {
				return beat
			}
		case <-late:
			t.Fatal("no such heartbeat")
		}
	}
}

func TestReporter(t *testing.T) {
	b := bustest.Open(t)
	ch := beats(t, b)
	sim := gpu.NewSims(gpu.SimSpec{Nodes: 1, Devices: 2}, "")[0]
	stop := report(t, b, sim, func(pid int) bool { return pid == 7 })

	first := next(t, ch, func(beat protocol.Heartbeat) bool { return beat.Report != nil })
	require.Equal(t, "host", first.Node)
	require.Len(t, first.Report.Devices, 2)
	require.Positive(t, first.Report.CPUs)
	require.Positive(t, first.Report.Memory)
	for range 10 { // every fifth has it if one has
		quiet := next(t, ch, func(protocol.Heartbeat) bool { return true })
		require.Nil(t, quiet.Report, "no reading has changed")
	}

	bucket, err := kv.Open(t.Context(), b, kv.Config{Bucket: protocol.LeaseBucket, Memory: true, Leases: true})
	require.NoError(t, err)
	entry, err := bucket.Get(t.Context(), protocol.LeaseKey("host"))
	require.NoError(t, err)
	var leased protocol.Report
	require.NoError(t, wire.Unmarshal(entry.Value, &leased))
	require.Equal(t, first.Session, leased.Session)

	uuid := first.Report.Devices[0].UUID
	require.NoError(t, sim.AddProcess(uuid, gpu.Process{PID: 7, Kind: gpu.Compute}))
	require.NoError(t, sim.AddProcess(uuid, gpu.Process{PID: 8, Kind: gpu.Compute}))
	dirty := next(t, ch, func(beat protocol.Heartbeat) bool { return beat.Report != nil && len(beat.Report.Foreign) > 0 })
	require.Equal(t, []gpu.Process{{PID: 8, Kind: gpu.Compute}}, dirty.Report.Foreign[uuid], "own processes are not foreign")
	require.NoError(t, sim.Recover(uuid))
	next(t, ch, func(beat protocol.Heartbeat) bool { return beat.Report != nil && len(beat.Report.Foreign) == 0 })

	stop()
	next(t, ch, func(beat protocol.Heartbeat) bool { return beat.Bye })
	_, err = bucket.Get(t.Context(), protocol.LeaseKey("host"))
	require.ErrorIs(t, err, bus.ErrNotFound, "the lease is released")
}

// broken is a device driver that stops answering.
type broken struct {
	gpu.Inventory
	fails chan struct{}
}

func (b broken) Devices(ctx context.Context) ([]gpu.Device, error) {
	select {
	case <-b.fails:
		return nil, errors.New("it hangs")
	default:
		return b.Inventory.Devices(ctx)
	}
}

// This must not happen: devices that cannot be read are granted.
func TestBrokenDriverMakesDevicesUnfit(t *testing.T) {
	b := bustest.Open(t)
	ch := beats(t, b)
	driver := broken{gpu.NewSims(gpu.SimSpec{Nodes: 1, Devices: 1}, "")[0], make(chan struct{})}
	report(t, b, driver, nil)
	close(driver.fails)
	unfit := next(t, ch, func(beat protocol.Heartbeat) bool {
		return beat.Report != nil && len(beat.Report.Devices[0].Unfit()) > 0
	})
	require.Contains(t, unfit.Report.Devices[0].Unfit()[0], "it hangs")
}

// This must not happen: two agents register one name.
func TestNameIsUnique(t *testing.T) {
	b := bustest.Open(t)
	sim := gpu.NewSims(gpu.SimSpec{Nodes: 1, Devices: 1}, "")[0]
	stop := report(t, b, sim, nil)
	registered := make(chan struct{})
	second, err := nodes.NewReporter(nodes.Config{Bus: b, Name: "host", RegisteredFunc: func() { close(registered) }})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	doneCh := make(chan error, 1)
	go func() { doneCh <- second.Run(ctx) }()
	select {
	case <-registered:
		t.Fatal("two agents of one name")
	case <-time.After(200 * time.Millisecond):
	}
	stop()
	<-registered
	cancel()
	require.NoError(t, <-doneCh)
}

func TestBadConfig(t *testing.T) {
	_, err := nodes.NewReporter(nodes.Config{Name: "a.b", CPUs: -1, Lease: time.Millisecond, Labels: map[string]string{"x y": ""}})
	require.ErrorIs(t, err, bus.ErrInvalid)
	for _, word := range []string{"a.b", "Bus", "-1", "1ms", "x y"} {
		require.ErrorContains(t, err, word)
	}
}

// A restarted server has lost the leases: the reporter acquires its lease again long before the renewal.
func TestLeaseAfterServerRestart(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{})
	b := bustest.Open(t, bus.Config{InProcess: srv})
	report(t, b, gpu.NewSims(gpu.SimSpec{Nodes: 1, Devices: 1}, "")[0], nil)
	for range 3 {
		bustest.Reconnected(t, b.Conn(), srv.Restart)
		bucket, err := kv.Open(t.Context(), b, kv.Config{Bucket: protocol.LeaseBucket, Memory: true, Leases: true})
		require.NoError(t, err)
		require.Eventually(t, func() bool {
			_, err := bucket.Get(t.Context(), protocol.LeaseKey("host"))
			return err == nil
		}, 2*time.Minute, 10*time.Millisecond, "the lease is renewed every five seconds only")
	}
}

// This must not happen: a reporter on a server without JetStream retries without a delay and floods the log.
func TestServerWithoutJetStream(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{NoJetStream: true})
	var warnings atomic.Int64
	b := bustest.Open(t, bus.Config{InProcess: srv, Logger: slog.New(warningCounter{slog.DiscardHandler, &warnings})})
	r, err := nodes.NewReporter(nodes.Config{Bus: b, Name: "host"})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	require.NoError(t, r.Run(ctx))
	require.Positive(t, warnings.Load())
	require.Less(t, warnings.Load(), int64(20))
}

// warningCounter counts log records of the level warning.
type warningCounter struct {
	slog.Handler
	n *atomic.Int64
}

func (c warningCounter) Enabled(context.Context, slog.Level) bool { return true }

func (c warningCounter) Handle(_ context.Context, r slog.Record) error {
	if r.Level == slog.LevelWarn {
		c.n.Add(1)
	}
	return nil
}
