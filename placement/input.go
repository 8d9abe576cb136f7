package placement

import (
	"context"
	"sync"
	"time"

	"troupe/nodes/protocol"
)

// inbox is everything that reaches the leader, in the order of arrival. Subscriptions put in, the loop takes all there
// is at once: so what waits while one round is committed makes up the next.
type inputQueue struct {
	wakeCh chan struct{}

	mu    sync.Mutex // guards what follows
	items []input
	calls int // of them, requests
	want  int // requests that must be there before one more wakes the loop
}

// item is one of: a request, a beat, news of a lease.
type input struct {
	call      *call
	heartbeat *protocol.Heartbeat
	lease     *leaseChange
}

// leaseNews is what the watch of the nodes' leases has seen.
type leaseChange struct {
	report   *protocol.Report // taken or renewed
	gone     string           // the node whose lease is over
	complete bool             // those that there are have been seen
}

func newInputQueue() *inputQueue { return &inputQueue{wakeCh: make(chan struct{}, 1)} }

// put reports false if there is no room; only requests are refused.
func (q *inputQueue) put(it input) bool {
	q.mu.Lock()
	full := len(q.items) >= maxInputs && it.call != nil
	if !full {
		q.items = append(q.items, it)
	}
	if !full && it.call != nil {
		q.calls++
	}
	wake := !full && q.calls >= q.want
	q.mu.Unlock()
	if wake {
		select {
		case q.wakeCh <- struct{}{}:
		default:
		}
	}
	return !full
}

// take empties the inbox; spare is a slice to fill next.
func (q *inputQueue) take(spare []input) []input {
	q.mu.Lock()
	defer q.mu.Unlock()
	items := q.items
	q.items, q.calls, q.want = spare[:0], 0, 0
	return items
}

// waiting is how many requests are there.
func (q *inputQueue) callCount() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.calls
}

// gather lets the loop sleep until so many requests are there, and reports whether they are already. The next take ends
// that.
func (q *inputQueue) awaitCalls(n int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.want = n
	return q.calls >= n
}

// gatherMost bounds how long a round is held up for those who are about to ask, however slow the disk is.
const maxBatchWait = 2 * time.Millisecond

// gathering lets those who ask again and again be written together. Whoever has just been answered is likely to ask next;
// without it the others, who came while the round was written, would be written by themselves, and everybody would wait
// for two writes instead of one. So the next round waits for as many as it knows of, for no longer than the last took
// to be written. The loop owns it.
type batchWindow struct {
	inputs  *inputQueue
	timer   *time.Timer
	expect  int // requests that are there, or answered just now
	maxWait time.Duration
}

func newBatchWindow(q *inputQueue) *batchWindow {
	w := &batchWindow{inputs: q, timer: time.NewTimer(time.Hour)}
	w.timer.Stop()
	return w
}

// after is the end of a round: so many requests were in it, and writing it, if anything was written, took so long.
func (w *batchWindow) roundDone(calls int, written bool, took time.Duration) {
	w.expect, w.maxWait = 0, 0
	if written {
		w.expect, w.maxWait = calls+w.inputs.callCount(), min(took, maxBatchWait)
	}
}

// wait returns when all that are expected are there, or it is time. It reports whether anybody is.
func (w *batchWindow) wait(ctx context.Context) bool {
	if w.expect < 2 { // it comes when it comes
		return w.inputs.callCount() > 0
	}
	w.timer.Reset(w.maxWait)
	defer w.timer.Stop()
	for !w.inputs.awaitCalls(w.expect) {
		select {
		case <-w.inputs.wakeCh:
		case <-w.timer.C:
			w.inputs.awaitCalls(0)
			return w.inputs.callCount() > 0
		case <-ctx.Done():
			return false
		}
	}
	return true
}
