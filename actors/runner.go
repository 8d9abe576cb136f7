package actors

import (
	"slices"
	"sync"
	"time"

	"troupe/bus"
)

const (
	maxIdleRunners = 1024
	runnerIdle     = 10 * time.Second
)

// runners are goroutines that run calls, kept for a while when they have nothing to do: a fresh goroutine has a small
// stack, and growing it in every call costs more than the rest of a short one.
type runners struct {
	mu     sync.Mutex
	idle   []*runner // the last one to become idle is the first to be used again
	closed bool
	group  sync.WaitGroup
}

type runner struct{ jobCh chan job }

type job struct {
	worker *Worker
	queue  *queue
	call   *call
}

// start runs the job on an idle runner, or on a new one. It does not block.
func (rs *runners) start(j job) {
	rs.mu.Lock()
	if n := len(rs.idle); n > 0 {
		r := rs.idle[n-1]
		rs.idle[n-1] = nil
		rs.idle = rs.idle[:n-1]
		rs.mu.Unlock()
		r.jobCh <- j // holds one, and an idle runner's is empty
		return
	}
	rs.mu.Unlock()
	r := &runner{jobCh: make(chan job, 1)}
	rs.group.Go(bus.Guard(func() { rs.loop(r, j) }))
}

func (rs *runners) loop(r *runner, j job) {
	t := time.NewTimer(runnerIdle)
	defer t.Stop()
	for {
		j.worker.run(j.queue, j.call)
		j = job{}
		if !rs.rest(r) {
			return
		}
		t.Reset(runnerIdle)
		select {
		case j = <-r.jobCh:
		case <-t.C:
			if rs.leave(r) {
				return
			}
			j = <-r.jobCh // chosen in the last moment
		}
		if j.call == nil {
			return // closed
		}
	}
}

// rest puts the runner among the idle ones; false: it is not needed any more.
func (rs *runners) rest(r *runner) bool {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if rs.closed || len(rs.idle) >= maxIdleRunners {
		return false
	}
	rs.idle = append(rs.idle, r)
	return true
}

// leave takes an idle runner out; false: somebody has just chosen it.
func (rs *runners) leave(r *runner) bool {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	for i, q := range rs.idle {
		if q == r {
			rs.idle = slices.Delete(rs.idle, i, i+1)
			return true
		}
	}
	return false
}

// close ends the idle runners and waits for those that run, up to limit: a method that never returns is its worker's
// to report.
func (rs *runners) close(limit time.Duration) {
	rs.mu.Lock()
	rs.closed = true
	for _, r := range rs.idle {
		r.jobCh <- job{}
	}
	rs.idle = nil
	rs.mu.Unlock()
	doneCh := make(chan struct{})
	bus.Go(func() { rs.group.Wait(); close(doneCh) })
	select {
	case <-doneCh:
	case <-time.After(limit):
	}
}
