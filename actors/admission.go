package actors

import (
	"time"

	"troupe/bus"
	"troupe/bus/wire"
)

// arrive takes a call from the wire, and whatever calls were waiting for it. It returns those whose body must be
// fetched. A repeat of a call is answered from memory and never run again.
// With lend set, one call that may start at once is left to the caller to run. With alone set, the delivery is for no
// other worker.
func (w *Worker) arrive(d *delivery, body []byte, now time.Time, lend, alone bool) (fetch []*call, lent job) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lend, w.alone, w.spare = lend, alone, nil
	if d.first.worker == nil {
		w.spare = d
	}
	fetch = w.take(&d.frame.Header, body, now)
	lent, w.lend, w.lent, w.spare = w.lent, false, job{}, nil
	return fetch, lent
}

// newCall is memory for a call: that of the delivery it came with, if no other rank's call has it. Whoever fetches its
// body keeps the call for as long as that takes, so such a one is not used again.
func (w *Worker) newCall(h *wire.Header) *call {
	d := w.spare
	if d == nil || h != &d.frame.Header {
		return new(call)
	}
	w.spare = nil
	if w.alone && h.Ref.Owner == "" {
		d.first.delivery = d
	}
	return &d.first
}

// nextDelivery is memory for the next message: that of a call that is forgotten, or new. Whatever was forgotten in an
// earlier turn of the lock is referred to by nobody.
func (w *Worker) nextDelivery() *delivery {
	w.mu.Lock()
	defer w.mu.Unlock()
	last := len(w.forgotten) - 1
	if last < 0 {
		return new(delivery)
	}
	d := w.forgotten[last].delivery
	w.forgotten[last] = nil
	w.forgotten = w.forgotten[:last]
	*d = delivery{}
	return d
}

func (w *Worker) take(h *wire.Header, body []byte, now time.Time) (fetch []*call) {
	s := w.sessionOf(h, now)
	s.acknowledge(h.Acked, w.forget, w.giveUp)
	st := w.streamOf(s, h, now)
	prev := h.PrevFor(w.spec.Rank)
	switch st.Take(h.Order, prev) {
	case bus.TooEarly:
		if st.Buffer(h.Order, prev, &arrival{header: h, body: body, at: now}) {
			w.reportGap(streamOf(h), st)
		}
		return nil
	case bus.Passed:
		s.pass(h.Seq)
	}
	if c := w.admit(s, h, body, now); c != nil && !c.bodyHere {
		fetch = append(fetch, c)
	}
	return append(fetch, w.admitReleased(st)...)
}

// admitReleased admits the calls whose turn has come because an earlier one was taken or skipped.
func (w *Worker) admitReleased(st *stream) (fetch []*call) {
	for a, ok := st.Release(); ok; a, ok = st.Release() {
		if c := w.admit(w.sessionOf(a.header, a.at), a.header, a.body, a.at); c != nil && !c.bodyHere {
			fetch = append(fetch, c)
		}
	}
	return fetch
}

// sessionOf returns what is remembered of the caller. It may have been known before and forgotten: then nobody knows
// what became of the calls it sent before that.
func (w *Worker) sessionOf(h *wire.Header, now time.Time) *session {
	if s := w.lastSession; s != nil && s.id == h.Session {
		s.lastSeen = now
		return s
	}
	s := w.sessions[h.Session]
	if s == nil {
		if len(w.sessions) >= maxSessions {
			w.purgeLocked(now)
		}
		s = &session{id: h.Session, inbox: w.host.ep.Inbox(h.Session), calls: map[uint64]*call{}, blankUntil: w.lastPurge}
		w.sessions[h.Session] = s
	}
	s.lastSeen, w.lastSession = now, s
	return s
}

// streamOf returns the stream in which a call of the session has its place.
func (w *Worker) streamOf(s *session, h *wire.Header, now time.Time) *stream {
	if h.Stream != "" {
		return w.streamNamed(streamOf(h), now)
	}
	if s.stream == nil {
		s.stream = w.streamNamed(streamOf(h), now)
	}
	s.stream.lastSeen = now
	return s.stream
}

func (w *Worker) streamNamed(id streamID, now time.Time) *stream {
	st := w.streams[id]
	if st == nil {
		if id.sequencer {
			w.dropHeld()
		}
		st = &stream{}
		w.streams[id] = st
	}
	st.lastSeen = now
	return st
}

// dropHeld gives up what waits for a sequencer that has been replaced: its callers ask, and send it to the new one.
func (w *Worker) dropHeld() {
	for id, st := range w.streams {
		if id.sequencer {
			st.Clear()
		}
	}
}

// admit queues a call whose turn has come, or answers it at once if it is a repeat or cannot be taken.
func (w *Worker) admit(s *session, h *wire.Header, body []byte, now time.Time) *call {
	if known, over := s.find(h, now); known != nil || over {
		if known != nil && known.phase == answered {
			w.host.ep.Repeat(s.inbox, &known.reply)
		} else if over && h.Age > 0 {
			w.sayUnknown(h)
		}
		return nil
	}
	c := w.newCall(h)
	c.worker, c.session, c.header, c.body = w, s, h, body
	c.arrived, c.bodyHere = instantOf(now), h.Ref.Owner == ""
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
	case w.state != Ready && (w.state != Stopping || q.lane != Control): // control is taken to the end
		return bus.Errorf(bus.CodeRefused, "the worker is %s and takes no calls", w.state)
	}
	if n := q.waiting.len(); n >= w.spec.QueueLimit {
		return bus.Errorf(bus.CodeBusy, "lane %q is full: %d calls wait in it; try again later", q.lane.Name, n)
	}
	c.binding = b
	q.waiting.push(c)
	w.kick(q, c.arrived)
	return nil
}

// kick starts what may start. w.mu is held.
func (w *Worker) kick(q *queue, now instant) {
	for c := w.nextLocked(q, now); c != nil; c = w.nextLocked(q, now) {
		j := job{worker: w, queue: q, call: c}
		if w.lends(q, c) {
			w.lent = j
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
		c.phase, c.started, c.buf = running, now, w.buffer()
		c.ctx = &callContext{worker: w, call: c, deadline: c.deadline}
		c.slot = len(w.active)
		w.active = append(w.active, c)
		w.host.running.Add(1)
	}
	return c
}

// inactive takes a call that has ended out of the active ones.
func (w *Worker) inactive(c *call) {
	last := len(w.active) - 1
	moved := w.active[last]
	w.active[c.slot], moved.slot = moved, c.slot
	w.active[last] = nil
	w.active = w.active[:last]
	c.binding.queue.running--
	w.host.running.Add(-1)
}
