package timeline_test

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/recorder"
)

const world = 8

// TestMain runs the tests, or a worker process if the environment names a rank.
func TestMain(m *testing.M) {
	if rank := os.Getenv("TIMELINE_TEST_RANK"); rank != "" {
		n, err := strconv.Atoi(rank)
		if err == nil {
			err = runWorker(os.Getenv("TIMELINE_TEST_URL"), n)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// trainer has a method in which rank 5 sleeps before a collective.
type trainer struct {
	bus  *bus.Bus
	rank int
	all  chan struct{} // closed when every rank has reached the collective
}

const barrierSubject = "test.barrier"

// stepResult is when a rank began its method, by the wall clock of its process, which is that of the machine.
type stepResult struct {
	Began int64 `msgpack:"began"`
}

// Step sleeps for some milliseconds on rank 5; all ranks meet in the collective then.
func (t *trainer) Step(ctx context.Context, ms int) (stepResult, error) {
	out := stepResult{Began: time.Now().UnixNano()}
	if t.rank == 5 {
		load := recorder.Begin(recorder.ScopeOf(ctx), "", "load")
		time.Sleep(time.Duration(ms) * time.Millisecond)
		load.End(false)
	}
	reduce := recorder.Begin(recorder.ScopeOf(ctx), "", "allreduce")
	defer reduce.End(false)
	if err := t.bus.Publish(barrierSubject, nil); err != nil {
		return out, err
	}
	select {
	case <-t.all:
		return out, nil
	case <-ctx.Done():
		return out, ctx.Err()
	}
}

func runWorker(url string, rank int) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	b, err := bus.Open(ctx, bus.Config{URLs: []string{url}})
	if err != nil {
		return err
	}
	t := &trainer{bus: b, rank: rank, all: make(chan struct{})}
	var mu sync.Mutex
	arrived := 0
	if _, err := b.Subscribe(barrierSubject, func(*bus.Msg) {
		mu.Lock()
		defer mu.Unlock()
		if arrived++; arrived == world {
			close(t.all)
		}
	}); err != nil {
		return err
	}
	if err := b.Flush(ctx); err != nil { // before another rank reaches the barrier
		return err
	}
	class := actors.NewClass("trainer", func(context.Context, actors.Setup) (*trainer, error) { return t, nil })
	actors.Method(class, "step", (*trainer).Step)
	ep, err := calls.Open(b, "test")
	if err != nil {
		return err
	}
	host, err := actors.NewHost(ep, actors.HostConfig{Classes: []*actors.Class{class.Class}, Node: "node", OwnProcess: true})
	if err != nil {
		return err
	}
	address := bus.Address{Namespace: "test", Role: "train", Incarnation: "i1"}
	if _, err := host.Start(ctx, actors.WorkerSpec{Address: address, Class: "trainer", Rank: rank, World: world}); err != nil {
		return err
	}
	fmt.Println("ready")
	<-ctx.Done()
	closing, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	return host.Close(closing)
}
