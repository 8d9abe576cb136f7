package actors

import (
	"slices"
	"sync"
	"time"

	"troupe/bus"
)

const maxIdleRunners = 1024

// runners is a pool of goroutines for calls. A new goroutine has a small stack, and growing it in every call costs more
// than the rest of a short call. A runner waits on its channel alone: with a timer as well, a call of 64 ranks of one
// process took a tenth longer.
type runners struct {
	mu     sync.Mutex
	idle   []*runner // used last in, first out
	unused int       // number of runners at the start of idle that no call has needed since the last trim
	closed bool
	group  sync.WaitGroup
}

type runner struct{ jobCh chan job }

type job struct {
	worker *Worker
	queue  *queue
	call   *call
}

// start runs the job on an idle runner or on a new one. It does not block.
func (rs *runners) start(j job) {
	rs.mu.Lock()
	if n := len(rs.idle); n > 0 {
		r := rs.idle[n-1]
		rs.idle[n-1] = nil
		rs.idle = rs.idle[:n-1]
		rs.unused = min(rs.unused, n-1)
		rs.mu.Unlock()
		r.jobCh <- j // does not block: it has room for one, and an idle runner's is empty
		return
	}
	rs.mu.Unlock()
	r := &runner{jobCh: make(chan job, 1)}
	rs.group.Go(bus.Guard(func() { rs.loop(r, j) }))
}

func (rs *runners) loop(r *runner, j job) {
	for j.call != nil { // nil: trim or close has ended it
		j.worker.run(j.queue, j.call)
		j = job{}
		if !rs.addIdle(r) {
			return
		}
		j = <-r.jobCh
	}
}

// addIdle makes the runner idle; it reports false if the runner should end.
func (rs *runners) addIdle(r *runner) bool {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if rs.closed || len(rs.idle) >= maxIdleRunners {
		return false
	}
	rs.idle = append(rs.idle, r)
	return true
}

// trim ends the runners that have been idle since the last trim.
func (rs *runners) trim() {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	for _, r := range rs.idle[:rs.unused] {
		r.jobCh <- job{}
	}
	rs.idle = slices.Delete(rs.idle, 0, rs.unused)
	rs.unused = len(rs.idle)
}

// close ends the idle runners and waits for the busy ones, up to limit. A method that never returns is reported by its
// worker.
func (rs *runners) close(limit time.Duration) {
	rs.mu.Lock()
	rs.closed = true
	for _, r := range rs.idle {
		r.jobCh <- job{}
	}
	rs.idle, rs.unused = nil, 0
	rs.mu.Unlock()
	doneCh := make(chan struct{})
	bus.Go(func() { rs.group.Wait(); close(doneCh) })
	select {
	case <-doneCh:
	case <-time.After(limit):
	}
}
