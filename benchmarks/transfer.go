package benchmarks

import (
	"context"
	"fmt"
	"hash/crc32"
	"runtime"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"

	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/values"
	"troupe/bus/wire"
)

// TransferConfig configures Transfer: the rate at which a large value of one process reaches another over the bus.
type TransferConfig struct {
	Bytes   int           // of the value; zero: 64 MiB
	Each    time.Duration // for both ways together; zero: 5 s
	URL     string        // of a NATS server to use; empty: an embedded one, reached by TCP on loopback
	Version string        // of the program, for the results
}

// TransferResult compares the two ways. Rates are of the median transfer.
type TransferResult struct {
	Bytes     int       `json:"bytes"`
	Transfers int       `json:"transfers"`
	MBps      float64   `json:"mb_s"`
	FloorMBps float64   `json:"floor_mb_s"`
	Ratio     float64   `json:"ratio"`     // ours / bare NATS: the median of the pairs of neighbours
	CPU       float64   `json:"cpu_s_gib"` // seconds of CPU for each GiB, both ends and an embedded server together
	FloorCPU  float64   `json:"floor_cpu_s_gib"`
	Version   string    `json:"version,omitempty"`
	CPUs      int       `json:"cpus"`
	At        time.Time `json:"at"`
}

// The chunks of the floor are those of the bus.
const (
	transferChunk  = 512 << 10
	transferWindow = 4 << 20
	transferAcks   = 1 << 20
)

// Transfer sends a value by reference and with bare nats.go, in turns, on two connections of each.
func Transfer(ctx context.Context, cfg TransferConfig) (r TransferResult, err error) {
	if cfg.Bytes == 0 {
		cfg.Bytes = 64 << 20
	}
	if cfg.Each == 0 {
		cfg.Each = 5 * time.Second
	}
	if cfg.URL == "" {
		server, err := bus.Open(ctx, bus.Config{Server: bus.ServerConfig{Listen: "127.0.0.1:0"}})
		if err != nil {
			return r, err
		}
		defer func() { _ = server.Close() }() // what was measured is known
		cfg.URL = server.URL()
	}
	body := make([]byte, cfg.Bytes)
	for i := range body {
		body[i] = byte(i) ^ byte(i>>11)
	}
	ours, stop, err := troupeTransfer(ctx, cfg.URL, body)
	if err != nil {
		return r, err
	}
	defer stop()
	floor, stop, err := floorTransfer(cfg.URL, body)
	if err != nil {
		return r, err
	}
	defer stop()
	return compareTransfers(ctx, cfg, ours, floor)
}

func compareTransfers(ctx context.Context, cfg TransferConfig, ours, floor func(context.Context) error) (r TransferResult, err error) {
	var took, cpu [2][]float64
	var ratios []float64
	began := time.Time{}
	for round := -2; round < 3 || time.Since(began) < cfg.Each; round++ {
		if round == 0 { // the first ones warm up
			began = time.Now()
		}
		var pair [2]float64
		for i, do := range []func(context.Context) error{ours, floor} {
			at, spent := time.Now(), cpuSeconds()
			if err := do(ctx); err != nil {
				return r, err
			}
			pair[i] = time.Since(at).Seconds()
			if round >= 0 {
				cpu[i] = append(cpu[i], cpuSeconds()-spent)
			}
		}
		if round >= 0 {
			took[0], took[1], ratios = append(took[0], pair[0]), append(took[1], pair[1]), append(ratios, pair[1]/pair[0])
		}
	}
	rate := func(seconds []float64) float64 { return float64(cfg.Bytes) / 1e6 / median(seconds) }
	perGiB := func(seconds []float64) float64 { return median(seconds) * (1 << 30) / float64(cfg.Bytes) }
	return TransferResult{
		CPU: perGiB(cpu[0]), FloorCPU: perGiB(cpu[1]),
		Bytes: cfg.Bytes, Transfers: len(ratios), MBps: rate(took[0]), FloorMBps: rate(took[1]), Ratio: median(ratios),
		Version: cfg.Version, CPUs: runtime.NumCPU(), At: time.Now().UTC(),
	}, nil
}

// cpuSeconds is the CPU time of this process.
func cpuSeconds() float64 {
	var use syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &use) != nil {
		return 0
	}
	return time.Duration(use.Utime.Nano() + use.Stime.Nano()).Seconds()
}

// oneBuffer is a values.Memory that has the same pages for each body, as workers' memory does.
type oneBuffer struct{ free chan []byte }

func (m oneBuffer) Make(n int) []byte {
	select {
	case body := <-m.free:
		return body[:n]
	default:
		return make([]byte, n)
	}
}

func (m oneBuffer) Free(body []byte) {
	select {
	case m.free <- body:
	default:
	}
}

// troupeTransfer gets a value of another session.
func troupeTransfer(ctx context.Context, url string, body []byte) (do func(context.Context) error, stop func(), err error) {
	var eps [2]*calls.Endpoint
	var buses []*bus.Bus
	stop = func() {
		for _, b := range buses {
			_ = b.Close() // what was measured is known
		}
	}
	for i := range eps {
		b, err := bus.Open(ctx, bus.Config{URLs: []string{url}})
		if err != nil {
			stop()
			return nil, nil, err
		}
		buses = append(buses, b)
		if eps[i], err = calls.Open(b, "bench"); err != nil {
			stop()
			return nil, nil, err
		}
	}
	ref, err := eps[0].References().Put(body, nil, nil)
	if err != nil {
		stop()
		return nil, nil, err
	}
	eps[1].References().Retain(ref)
	memory, want, checked := oneBuffer{make(chan []byte, 1)}, crc32.ChecksumIEEE(body), false
	return func(ctx context.Context) error {
		got, err := getValue(ctx, eps[1], ref, memory)
		if err != nil {
			return err
		}
		defer memory.Free(got)
		if !checked && crc32.ChecksumIEEE(got) != want {
			return fmt.Errorf("wrong bytes have arrived")
		}
		checked = true
		return nil
	}, stop, nil
}

func getValue(ctx context.Context, ep *calls.Endpoint, ref wire.Reference, memory values.Memory) ([]byte, error) {
	type outcome struct {
		body []byte
		err  error
	}
	ch := make(chan outcome, 1)
	cancel := ep.References().Get(ref, memory, func(v values.Value, err error) { ch <- outcome{v.Body, err} })
	select {
	case o := <-ch:
		return o.body, o.err
	case <-ctx.Done():
		cancel()
		return nil, ctx.Err()
	}
}

// floorTransfer publishes the chunks of a body, at most a window ahead of the receiver's messages. The receiver counts the bytes, and keeps none.
func floorTransfer(url string, body []byte) (do func(context.Context) error, stop func(), err error) {
	sender, err := nats.Connect(url)
	if err != nil {
		return nil, nil, err
	}
	receiver, err := nats.Connect(url)
	if err != nil {
		sender.Close()
		return nil, nil, err
	}
	stop = func() { sender.Close(); receiver.Close() }
	const chunks, acks = "floor.chunks", "floor.acks"
	var got, confirmed atomic.Int64
	movedCh := make(chan struct{}, 1)
	_, err = receiver.Subscribe(chunks, func(m *nats.Msg) {
		before := got.Load()
		after := got.Add(int64(len(m.Data)))
		if before/transferAcks != after/transferAcks || after == int64(len(body)) {
			_ = receiver.Publish(acks, nil) // the loss of one would be seen as an end of the context
		}
	})
	if err == nil {
		_, err = sender.Subscribe(acks, func(*nats.Msg) {
			confirmed.Store(got.Load())
			select {
			case movedCh <- struct{}{}:
			default:
			}
		})
	}
	if err == nil {
		err = receiver.Flush()
	}
	if err == nil {
		err = sender.Flush()
	}
	if err != nil {
		stop()
		return nil, nil, err
	}
	until := func(ctx context.Context, least int64) error {
		for confirmed.Load() < least {
			select {
			case <-movedCh:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return nil
	}
	return func(ctx context.Context) error {
		got.Store(0)
		confirmed.Store(0)
		for off := 0; off < len(body); off += transferChunk {
			if err := until(ctx, int64(off-transferWindow+transferChunk)); err != nil {
				return err
			}
			if err := sender.Publish(chunks, body[off:min(off+transferChunk, len(body))]); err != nil {
				return err
			}
		}
		return until(ctx, int64(len(body)))
	}, stop, nil
}

func median(values []float64) float64 {
	slices.Sort(values)
	return (values[(len(values)-1)/2] + values[len(values)/2]) / 2
}
