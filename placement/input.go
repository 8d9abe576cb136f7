package placement

import (
	"context"
	"sync"
	"time"

	"troupe/nodes/protocol"
)

// inputQueue is the input of the leader, in the order of arrival. Subscriptions add to it; the loop takes everything at
// once, so the requests that arrive while a round is committed form the next round.
type inputQueue struct {
	wakeCh chan struct{}

	mu    sync.Mutex // guards the fields below
	items []input
	calls int // number of requests in items
	want  int // number of requests at which the loop is woken
}

// input is one of: a request, a heartbeat, a change of a lease, a reconnection.
type input struct {
	call      *call
	heartbeat *protocol.Heartbeat
	lease     *leaseChange

	reconnected bool // the connection to the server was down and is up again
}

// leaseChange is an event of the watch on the nodes' leases.
type leaseChange struct {
	report   *protocol.Report // taken or renewed
	gone     string           // node whose lease has ended
	complete bool             // all leases that existed at the start have been seen
}

func newInputQueue() *inputQueue { return &inputQueue{wakeCh: make(chan struct{}, 1)} }

// put reports false if the queue is full. Only requests are refused.
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
		q.wake()
	}
	return !full
}

// wake has the loop look at what the desk has changed.
func (q *inputQueue) wake() {
	select {
	case q.wakeCh <- struct{}{}:
	default:
	}
}

// take empties the queue; spare is a slice to reuse.
func (q *inputQueue) take(spare []input) []input {
	q.mu.Lock()
	defer q.mu.Unlock()
	items := q.items
	q.items, q.calls, q.want = spare[:0], 0, 0
	return items
}

func (q *inputQueue) callCount() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.calls
}

// awaitCalls makes put wake the loop only at n requests, until the next take. It reports whether there are as many
// already.
func (q *inputQueue) awaitCalls(n int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.want = n
	return q.calls >= n
}

// maxBatchWait bounds how long a round waits for further requests, however slow the disk is.
const maxBatchWait = 2 * time.Millisecond

// batchWindow lets the requests of clients that call repeatedly share one write. A client that has just been answered
// is likely to send its next request soon; without the window, requests that arrived during the last write would be
// written alone, and clients would split into two groups that wait for each other's writes. The next round waits for as
// many requests as the last one had, for no longer than the last write took. The loop owns it.
type batchWindow struct {
	inputs  *inputQueue
	timer   *time.Timer
	expect  int // requests that are queued or were just answered
	maxWait time.Duration
}

func newBatchWindow(q *inputQueue) *batchWindow {
	w := &batchWindow{inputs: q, timer: time.NewTimer(time.Hour)}
	w.timer.Stop()
	return w
}

// roundDone records a round: its requests, whether it was written, and the duration.
func (w *batchWindow) roundDone(calls int, written bool, took time.Duration) {
	w.expect, w.maxWait = 0, 0
	if written {
		w.expect, w.maxWait = calls+w.inputs.callCount(), min(took, maxBatchWait)
	}
}

// wait returns when the expected requests are there or the time is over. It reports whether there are any requests.
func (w *batchWindow) wait(ctx context.Context) bool {
	if w.expect < 2 { // nothing to batch
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
