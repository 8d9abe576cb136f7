package actors

import (
	"slices"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
)

// answerLocked sends the answer, unless the caller gave up, and keeps it until the caller acknowledges it. A good
// answer is in c.buf, or is body.
func (w *Worker) answerLocked(c *call, body []byte, err error, now time.Time) {
	buf := c.buf
	c.free(c.body) // it was not begun
	c.body, c.buf = nil, nil
	if c.dropped {
		c.free(body)
		c.phase = forgotten
		c.session.leave(c)
		w.reuse(buf)
		return
	}
	if buf == nil { // it never ran
		buf = w.buffer()
	}
	h := wire.Header{Rank: w.spec.Rank, Gen: w.spec.Gen}
	if c.started != 0 {
		h.Queued, h.Ran = c.started.sub(c.arrived), instantOf(now).sub(c.started)
		if !isQuiet(c.header.Method) {
			w.stats.add(c.header.Method, h.Ran, err != nil)
		}
	}
	c.session.lastSeen = now
	if w.cause != nil && bus.CodeOf(err) == bus.CodeCancelled { // the worker's end is why
		err = w.cause
	}
	if err != nil {
		h.Code, body = w.encodeError(err, max(int(c.header.Inline), minErrorRoom))
		buf = buf[:bus.ReplyRoom]
	} else if !c.header.Collected(w.spec.Rank) {
		c.free(body)
		buf, body = buf[:bus.ReplyRoom], nil
	}
	n := int64(len(buf) - bus.ReplyRoom + len(body))
	held := err == nil && n > int64(c.header.Inline)
	var onDone func()
	if held {
		w.unfetched += n
		b := c.binding
		h.Location = bus.Locate(b.memory, body)
		onDone = func() {
			bus.FreeBody(b.memory, body)
			w.fetched(n)
		}
	}
	c.reply = w.host.ep.Reply(c.session.inbox, c.header, &h, buf, body, w.host.running.Load() > 0, onDone)
	if !held && err == nil {
		c.free(body)
	}
	c.phase = answered
	w.keep(c)
}

// sayable is an error that a frame can carry.
func (w *Worker) sayable(err error) *bus.Error {
	e := bus.AsError(err)
	out := &bus.Error{
		Code: bus.Code(cut(string(e.Code), maxWord)), AppCode: bus.Code(cut(string(e.AppCode), maxWord)), Rank: -1, Node: w.host.cfg.Node,
		Message: cut(e.Message, maxMessage), Stack: cut(e.Stack, maxStack),
	}
	for k, v := range e.Details {
		if out.Details == nil {
			out.Details = map[string]string{}
		}
		out.Details[cut(k, maxWord)] = cut(v, maxMessage)
	}
	return out
}

// encodeError says an error in the room the caller has made for the answer: as much of it as fits.
func (w *Worker) encodeError(err error, room int) (bus.Code, []byte) {
	e := w.sayable(err)
	body, encErr := wire.Marshal(e)
	if encErr != nil || len(body) > room { // an error can always be said
		short := bus.Error{Code: e.Code, AppCode: e.AppCode, Rank: -1, Node: cut(e.Node, room/8), Message: cut(e.Message, room/2), Stack: cut(e.Stack, room/8)}
		body, _ = wire.Marshal(&short)
	}
	return e.Code, body
}

// fetched notes that a large answer is no longer held, which may let lanes go on.
func (w *Worker) fetched(n int64) {
	bus.Go(func() { // may be called from inside Reply, with the lock held
		w.mu.Lock()
		defer w.mu.Unlock()
		w.unfetched -= n
		w.signalIdle()
		now := instantOf(time.Now())
		for _, q := range w.queues {
			w.kick(q, now)
		}
	})
}

// keep bounds the answers that are kept: the oldest go first, and are remembered only as having run.
func (w *Worker) keep(c *call) {
	w.kept.push(c)
	w.keptBytes += c.reply.Size()
	for w.kept.n > maxKept || w.keptBytes > maxKeptBytes && w.kept.n > 1 {
		old := w.kept.oldest
		w.forget(old)
		old.session.leave(old)
	}
}

// forget lets go of a call's answer.
func (w *Worker) forget(c *call) {
	if c.phase != answered {
		return
	}
	w.kept.remove(c)
	w.keptBytes -= c.reply.Size()
	w.reuse(w.host.ep.ForgetReply(&c.reply))
	c.phase = forgotten
	if c.delivery != nil && len(w.forgotten) < maxSpare {
		w.forgotten = append(w.forgotten, c)
	}
}

// bodyArrived gives a queued call its body, or the reason why there is none.
func (w *Worker) bodyArrived(c *call, body []byte, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if c.phase != queued { // cancelled or refused in the meantime
		c.free(body)
		return
	}
	c.body, c.bodyErr, c.bodyHere = body, err, true
	if c.binding != nil {
		w.kick(c.binding.queue, instantOf(time.Now()))
	}
}

// asked answers a caller that misses an answer.
func (w *Worker) asked(h *wire.Header, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	answer := wire.Header{Seq: h.Seq, Rank: w.spec.Rank, Gen: w.spec.Gen, State: wire.StateNever}
	s := w.sessions[h.Session]
	if s == nil {
		s = &session{blankUntil: w.lastPurge}
	}
	s.lastSeen = now
	c, over := s.find(h, now)
	switch {
	case c == nil:
		if a := w.heldCall(h); a != nil {
			answer.State, answer.Queued = wire.StateQueued, now.Sub(a.at)
		} else if over {
			answer.State = wire.StateUnknown
		}
	case c.phase == answered:
		w.host.ep.Repeat(s.inbox, &c.reply)
		return
	case c.phase == running:
		answer.State, answer.Ran = wire.StateRunning, instantOf(now).sub(c.started)
	case c.phase == queued:
		answer.State, answer.Queued = wire.StateQueued, instantOf(now).sub(c.arrived)
	default:
		answer.State = wire.StateUnknown
	}
	w.tell(h.Session, &wire.Frame{Kind: wire.KindStatus, Header: answer})
}

// heldCall finds a call that waits for an earlier one.
func (w *Worker) heldCall(h *wire.Header) *arrival {
	for _, st := range w.streams {
		for a := range st.Buffered {
			if a.header.Session == h.Session && a.header.Seq == h.Seq {
				return a
			}
		}
	}
	return nil
}

func (w *Worker) sayUnknown(h *wire.Header) {
	w.tell(h.Session, &wire.Frame{Kind: wire.KindStatus, Header: wire.Header{Seq: h.Seq, Rank: w.spec.Rank, Gen: w.spec.Gen, State: wire.StateUnknown}})
}

func (w *Worker) tell(session string, f *wire.Frame) {
	_ = w.host.ep.Tell(session, f) // the caller asks again if it is lost
}

// purge forgets callers that have been silent for long and have nothing under way.
func (w *Worker) purge(now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.purgeLocked(now)
}

// purgeLocked also makes room when there are too many callers: those that have been silent longest go.
func (w *Worker) purgeLocked(now time.Time) {
	var silent []string
	for id, s := range w.sessions {
		if !s.busy() {
			silent = append(silent, id)
		}
	}
	slices.SortFunc(silent, func(a, b string) int { return w.sessions[a].lastSeen.Compare(w.sessions[b].lastSeen) })
	tooMany := 0
	if len(w.sessions) >= maxSessions {
		tooMany = len(w.sessions) - maxSessions*3/4
	}
	for i, id := range silent {
		if s := w.sessions[id]; i < tooMany || now.Sub(s.lastSeen) >= sessionTTL {
			w.forgetAll(s)
			delete(w.sessions, id)
			delete(w.streams, streamID{session: id})
			w.lastPurge, w.lastSession = now, nil
		}
	}
	for _, st := range w.streams {
		if now.Sub(st.lastSeen) >= sessionTTL { // a sequencer that is gone: what it was to send will not come
			st.Clear()
		}
	}
}

func (w *Worker) forgetAll(s *session) {
	for _, c := range s.calls {
		if c.phase == answered {
			w.forget(c)
			s.leave(c) // its memory is used again
		}
	}
}
