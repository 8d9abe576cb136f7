package actors

import (
	"time"

	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// accept admits a call from the wire and the calls that waited for it, and returns those whose body has to be fetched.
// A repeat is answered from memory and does not run again. begin is a call that may start, if the receiver should start it itself,
// which saves the hand-over to another goroutine: one of an AsyncHandler, because Begin does not block, or any if the
// delivery says so.
func (w *Worker) accept(d *delivery, body []byte, now time.Time) (fetch []*call, begin job) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.accepting, w.mayRun = true, d.mayRun
	if d.first.worker == nil {
		w.unusedDelivery = d
	}
	fetch = w.acceptLocked(&d.frame.Header, body, now)
	begin, w.accepting, w.begin, w.unusedDelivery = w.begin, false, job{}, nil
	return fetch, begin
}

// newCall returns memory for a call: that of its delivery, unless another rank's call uses it.
func (w *Worker) newCall(h *wire.Header) *call {
	d := w.unusedDelivery
	if d == nil || h != &d.frame.Header {
		return new(call)
	}
	w.unusedDelivery = nil
	if d.alone {
		d.first.delivery = d
	}
	return &d.first
}

func (w *Worker) acceptLocked(h *wire.Header, body []byte, now time.Time) (fetch []*call) {
	s := w.callerOf(h, now)
	s.acknowledge(h.Acked, w.forget, w.cancelCall)
	st := w.orderOf(s, h, now)
	prev := h.PrevFor(w.spec.Rank)
	switch st.Take(h.Order, prev) {
	case calls.TooEarly:
		if st.Buffer(h.Order, prev, &earlyCall{header: h, body: body, at: now}) {
			w.reportGap(orderOf(h), st)
		}
		return nil
	case calls.Passed:
		s.markOver(h.Seq)
	}
	if c := w.admit(s, h, body, now); c != nil && c.phase == queued && !c.ready() {
		fetch = append(fetch, c)
	}
	return append(fetch, w.admitReleased(st)...)
}

// admit queues a call whose turn has come. A repeat, or a call that cannot be queued, is answered at once.
func (w *Worker) admit(s *callerState, h *wire.Header, body []byte, now time.Time) *call {
	if known, over := s.find(h, now); known != nil || over {
		if known != nil && known.phase == answered {
			w.host.ep.Repeat(s.inbox, &known.reply)
		} else if over && h.Age > 0 {
			w.sendUnknown(h)
		}
		return nil
	}
	c := w.newCall(h)
	c.worker, c.caller, c.header, c.body = w, s, h, body
	c.arrived, c.bodyHere, c.args = instantOf(now), h.Ref.Owner == "", newArguments(h)
	if h.Timeout > 0 {
		c.deadline = c.arrived + instant(h.Timeout)
	}
	s.calls[h.Seq] = c
	if err := w.enqueue(c); err != nil {
		c.bodyHere = true
		w.answerLocked(c, nil, err, now)
	}
	return c
}

func (w *Worker) enqueue(c *call) error {
	b, err := w.bindingOf(c.header)
	if err != nil {
		return err
	}
	q := b.queue
	switch {
	case w.cause != nil:
		return w.cause
	case w.state != Ready && (w.state != Stopping || q.lane != Control): // a stopping worker still takes control calls
		return bus.Errorf(bus.CodeRefused, "the worker is %s and accepts no calls", w.state)
	}
	if n := q.waiting.len(); n >= w.spec.QueueLimit {
		return bus.Errorf(bus.CodeBusy, "lane %q is full: %d calls are queued; try again later", q.lane.Name, n)
	}
	c.binding = b
	q.waiting.push(c)
	w.startReady(q, c.arrived)
	return nil
}

// startReady starts the calls of a lane that may start. w.mu is held.
func (w *Worker) startReady(q *queue, now instant) {
	for c := w.nextLocked(q, now); c != nil; c = w.nextLocked(q, now) {
		j := job{worker: w, queue: q, call: c}
		if w.accepting && w.begin.call == nil && (c.binding.async != nil || w.mayRun) {
			w.begin = j
			continue
		}
		w.host.runners.start(j)
	}
}

func (w *Worker) nextLocked(q *queue, now instant) *call {
	if w.cause != nil || w.unfetched > maxUnfetched && q.lane != Control {
		return nil
	}
	c := q.next()
	if c != nil {
		c.phase, c.started, c.buf = running, now, w.takeBuffer()
		c.ctx = &callContext{worker: w, call: c, deadline: c.deadline}
		c.slot = len(w.active)
		w.active = append(w.active, c)
		w.host.running.Add(1)
	}
	return c
}

// inactive removes an ended call from the active ones.
func (w *Worker) inactive(c *call) {
	last := len(w.active) - 1
	moved := w.active[last]
	w.active[c.slot], moved.slot = moved, c.slot
	w.active[last] = nil
	w.active = w.active[:last]
	c.binding.queue.running--
	w.host.running.Add(-1)
}
