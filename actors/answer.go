package actors

import (
	"time"

	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/recorder"
	"troupe/bus/values"
	"troupe/bus/wire"
)

// answerLocked sends the answer, unless the caller has cancelled the call, and keeps it until the caller acknowledges
// it. A result is in c.buf or in body.
func (w *Worker) answerLocked(c *call, body []byte, err error, now time.Time) {
	buf := c.buf
	w.dropArguments(c) // those that the handler did not take
	c.free(c.body)     // set only if the call did not start
	c.body, c.buf = nil, nil
	if c.dropped {
		if c.started != 0 && !c.binding.controlVerb {
			w.recordRun(c, recorder.TextOf(c.header.Method), recorder.At(now), true)
		}
		c.freeResult(body)
		c.dropReferences()
		c.phase = forgotten
		c.caller.retire(c)
		w.releaseBuffer(buf)
		return
	}
	if buf == nil { // the call did not start
		buf = w.takeBuffer()
	}
	h := wire.Header{Rank: w.spec.Rank, Gen: w.spec.Gen}
	if c.started != 0 {
		h.Queued, h.Ran = c.started.sub(c.arrived), instantOf(now).sub(c.started)
	}
	failed := err != nil
	c.caller.lastSeen = now
	if w.cause != nil && bus.CodeOf(err) == bus.CodeCancelled { // the calls were cancelled because the worker ends
		err = w.cause
	}
	if err != nil {
		h.Code, body = w.encodeError(err, max(int(c.header.Inline), minErrorRoom))
		buf = buf[:calls.ReplyRoom]
		c.dropReferences()
	} else if !c.header.Collected(w.spec.Rank) {
		c.freeResult(body)
		c.dropReferences()
		buf, body = buf[:calls.ReplyRoom], nil
	}
	h.References = c.refs.List
	n := int64(len(buf) - calls.ReplyRoom + len(body))
	held := err == nil && n > int64(c.header.Inline)
	refs := w.host.ep.References()
	h.Keep = held && c.mayStay() && (c.spilled != nil || refs.ReserveKept(int(n)))
	var onDone func()
	if held {
		memory := c.resultMemory()
		h.Location = values.Locate(memory, body)
		switch {
		case !h.Keep:
			w.unfetched += n
			onDone = func() {
				values.FreeBody(memory, body)
				w.fetched(n)
			}
		case c.spilled != nil:
			onDone = func() { values.FreeBody(memory, body) }
		default:
			onDone = func() {
				values.FreeBody(memory, body)
				refs.UnreserveKept(int(n))
			}
		}
	}
	more := w.host.running.Load() > 0
	var batch bus.WriteBatch
	if !more && w.writesAnswer(c) {
		batch = w.host.ep.Bus().BatchWrites()
	}
	c.reply = w.host.ep.Reply(c.caller.inbox, c.header, &h, buf, body, c.refs, more, onDone)
	batch.Flush(true)
	if h.Keep {
		c.refs = values.RetainedReferences{} // they belong to the kept body
	}
	if !held && err == nil {
		c.freeResult(body)
	}
	if c.started != 0 && !c.binding.controlVerb { // after the answer was sent: the caller does not wait for it
		w.recordRun(c, w.stats.add(c.header.Method, h.Ran, failed), recorder.At(now), failed)
	}
	c.phase = answered
	w.keepAnswer(c)
}

// writesAnswer reports whether this goroutine should write the answer to the socket, which saves the wake-up of NATS's
// flushing goroutine. It should not if other answers follow soon, because one write then sends them all; nor in a role
// of one worker, where nothing else is to be done meanwhile: a woken thread polls the network, and sees the next message
// sooner.
func (w *Worker) writesAnswer(c *call) bool {
	return w.spec.World > 1 && c.binding != nil && c.binding.queue.waiting.len() == 0 && len(w.host.workCh) == 0
}

// boundedError is the error with texts short enough for a frame.
func (w *Worker) boundedError(err error) *bus.Error {
	e := bus.AsError(err)
	out := &bus.Error{
		Code: bus.Code(truncate(string(e.Code), maxWord)), AppCode: bus.Code(truncate(string(e.AppCode), maxWord)), Rank: -1, Node: w.host.cfg.Node,
		Message: truncate(e.Message, maxMessage), Stack: truncate(e.Stack, maxStack),
	}
	for k, v := range e.Details {
		if out.Details == nil {
			out.Details = map[string]string{}
		}
		out.Details[truncate(k, maxWord)] = truncate(v, maxMessage)
	}
	return out
}

// encodeError encodes an error in at most room bytes, shortened if it has to be.
func (w *Worker) encodeError(err error, room int) (bus.Code, []byte) {
	e := w.boundedError(err)
	body, encErr := wire.Marshal(e)
	if encErr != nil || len(body) > room { // a shortened error always fits
		short := bus.Error{Code: e.Code, AppCode: e.AppCode, Rank: -1, Node: truncate(e.Node, room/8), Message: truncate(e.Message, room/2), Stack: truncate(e.Stack, room/8)}
		body, _ = wire.Marshal(&short)
	}
	return e.Code, body
}

// fetched records that a large answer is no longer held, which may let calls start.
func (w *Worker) fetched(n int64) {
	bus.Go(func() { // the bus may call this inside Reply, with w.mu held
		w.mu.Lock()
		defer w.mu.Unlock()
		w.unfetched -= n
		w.signalIdle()
		now := instantOf(time.Now())
		for _, q := range w.queues {
			w.startReady(q, now)
		}
	})
}

// keepAnswer keeps the answer of a call within the bounds of what a worker keeps: the oldest answers are dropped, and
// their calls remembered as tombstones.
func (w *Worker) keepAnswer(c *call) {
	w.unacked.push(c)
	w.unackedBytes += c.reply.Size()
	for w.unacked.n > maxUnacked || w.unackedBytes > maxUnackedBytes && w.unacked.n > 1 {
		old := w.unacked.oldest
		w.forget(old)
		old.caller.retire(old)
	}
}

// forget drops a call's answer.
func (w *Worker) forget(c *call) {
	if c.phase != answered {
		return
	}
	c.dropReferences()
	w.unacked.remove(c)
	w.unackedBytes -= c.reply.Size()
	w.releaseBuffer(w.host.ep.ForgetReply(&c.reply))
	c.phase = forgotten
}

// bodyArrived gives a queued call its body, or the error of the fetch.
func (w *Worker) bodyArrived(c *call, body []byte, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if c.phase != queued { // the call was cancelled or refused meanwhile
		c.free(body)
		return
	}
	c.body, c.bodyErr, c.bodyHere = body, err, true
	if c.binding != nil {
		w.startReady(c.binding.queue, instantOf(time.Now()))
	}
}

// statusAsked answers a caller that misses an answer: with the answer again, or with the state of the call.
func (w *Worker) statusAsked(h *wire.Header, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	answer := wire.Header{Seq: h.Seq, Rank: w.spec.Rank, Gen: w.spec.Gen, State: wire.StateNever}
	s := w.callers[h.Session]
	if s == nil {
		s = &callerState{unknownBefore: w.lastPurge}
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
	w.sendTo(h.Session, &wire.Frame{Kind: wire.KindStatus, Header: answer})
}

func (w *Worker) sendUnknown(h *wire.Header) {
	w.sendTo(h.Session, &wire.Frame{Kind: wire.KindStatus, Header: wire.Header{Seq: h.Seq, Rank: w.spec.Rank, Gen: w.spec.Gen, State: wire.StateUnknown}})
}
