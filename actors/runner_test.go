package actors

import (
	"context"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"troupe/bus/wire"

	"github.com/stretchr/testify/require"
)

// unansweredHandler is a handler whose calls are not answered, so that it needs no bus.
type unansweredHandler struct{ method func() }

func (s unansweredHandler) Handle(ctx context.Context, _ string, _ []byte) ([]byte, error) {
	c := ctx.Value(callKey{}).(*callContext).call
	c.worker.mu.Lock()
	c.dropped = true
	c.worker.mu.Unlock()
	s.method()
	return nil, nil
}

// busFreeWorker is a ready worker without a bus.
func busFreeWorker(method func()) *Worker {
	w := newWorker(&Host{}, WorkerSpec{}, &Class{})
	w.state = Ready
	w.objects[""], w.classes[""] = unansweredHandler{method}, &Class{Open: true}
	return w
}

// start runs a call of the method on the host's runners.
func (w *Worker) start(q *queue) {
	c := &call{worker: w, caller: &callerState{calls: map[uint64]*call{}}, header: &wire.Header{Method: "m"}, bodyHere: true}
	c.binding = &binding{queue: q, handle: func(ctx context.Context, body []byte) ([]byte, error) { return w.objects[""].Handle(ctx, "m", body) }}
	w.mu.Lock()
	defer w.mu.Unlock()
	q.waiting.push(c)
	w.startReady(q, instantOf(time.Now()))
}

func (rs *runners) idleCount() int {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	return len(rs.idle)
}

func TestRunnersAreReusedAndEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var running atomic.Int32
		releaseCh := make(chan struct{})
		w := busFreeWorker(func() { running.Add(1); <-releaseCh })
		rs, q := &w.host.runners, &queue{lane: Concurrent(100)}
		atOnce := func(n int) {
			for range n {
				w.start(q)
			}
			synctest.Wait()
			require.EqualValues(t, n, running.Swap(0))
			for range n {
				releaseCh <- struct{}{}
			}
			synctest.Wait()
		}
		atOnce(5)
		require.Equal(t, 5, rs.idleCount())

		rs.trim()
		require.Equal(t, 5, rs.idleCount(), "they have worked since the last trim")
		atOnce(3)
		require.Equal(t, 5, rs.idleCount(), "no new one was needed")
		rs.trim()
		synctest.Wait()
		require.Equal(t, 3, rs.idleCount(), "two had nothing to do since the last trim")
		rs.trim()
		require.Zero(t, rs.idleCount())
		atOnce(1)
		require.Equal(t, 1, rs.idleCount())
		rs.close(time.Second)
		require.Zero(t, rs.idleCount())
	})
}

func TestRunnersCloseIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		releaseCh := make(chan struct{})
		w := busFreeWorker(func() { <-releaseCh })
		w.start(&queue{lane: Serial})
		began := time.Now()
		w.host.runners.close(time.Second)
		require.Equal(t, time.Second, time.Since(began))
		close(releaseCh)
	})
}

// TestGoexitInAMethod: runtime.Goexit in a method ends a goroutine; the lane continues.
func TestGoexitInAMethod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ran atomic.Int32
		w := busFreeWorker(func() {
			if ran.Add(1)%2 == 1 {
				runtime.Goexit()
			}
		})
		q := &queue{lane: Serial}
		for range 10 {
			w.start(q)
		}
		synctest.Wait()
		require.EqualValues(t, 10, ran.Load())
		require.Empty(t, w.active)
		require.Zero(t, q.running)
		w.host.runners.close(time.Second)
	})
}
