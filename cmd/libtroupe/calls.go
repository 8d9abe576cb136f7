package main

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/dispatch/plan"
)

// Flags of a callHead.
const (
	callStreams    = 1 // report answers as they arrive
	callNoCollect  = 2
	callCollectAll = 4
	callControl    = 8
	callMore       = 16  // the caller does not wait now: more calls may follow
	callNoWait     = 32  // fail at once if a rank is being restarted
	callKeep       = 64  // large answers stay with their workers
	callOnDevice   = 128 // tensors of the answers may stay on their device
)

// texts are the lengths of what follows a callHead, in its order.
func (h callHead) texts() [4]uint32 { return [...]uint32{h.Method, h.Object, h.Args, h.Inside} }

// bodies returns the bodies of the parts, the large ones among them, which belong to the call from now on even if it is
// malformed, and what follows the bodies.
func (c *core) bodies(rest []byte, parts int) (all [][]byte, large outgoing, after []byte, ok bool) {
	all = make([][]byte, parts)
	table := make([]callPart, parts)
	for i := range table {
		table[i], rest, _ = readRecord[callPart](rest)
	}
	for i, p := range table {
		if p.Address != 0 {
			if all[i] = c.memory.handOver(p.Address, int(p.Length)); all[i] == nil {
				return nil, large, nil, false
			}
			if p.Length > values.MaxInline {
				large = large.with(c.memory, parts, i, all[i])
			}
			continue
		}
		if p.Length > uint64(len(rest)) {
			return nil, large, nil, false
		}
		all[i], rest = rest[:p.Length:p.Length], rest[p.Length:]
	}
	return all, large, rest, true
}

// readList reads a list of references; no bytes: there are none.
func readList(b []byte) ([]wire.Reference, error) {
	if len(b) == 0 {
		return nil, nil
	}
	return wire.ReadReferences(b)
}

var errBlob = bus.Errorf(bus.CodeInvalid, "malformed call")

// call makes a call. It returns an error only for a malformed request; other failures are completions.
func (c *core) call(token, id uint64, blob []byte) error {
	h, rest, ok := readRecord[callHead](blob)
	var texts [4][]byte
	for i, n := range h.texts() {
		if ok = ok && uint64(n) <= uint64(len(rest)); ok {
			texts[i], rest = rest[:n], rest[n:]
		}
	}
	if !ok || 16*uint64(h.Parts) > uint64(len(rest)) {
		return errBlob
	}
	method, object := string(texts[0]), string(texts[1])
	arguments, err := readList(texts[2])
	if err != nil {
		return err
	}
	inside, err := readList(texts[3])
	if err != nil {
		return err
	}
	bodies, large, scope, ok := c.bodies(rest, int(h.Parts))
	if !ok {
		large.freeAll()
		return errBlob
	}
	on, err := c.cluster(id)
	var p *plan.Plan
	var world int
	if err == nil {
		p, world, err = on.planOf(int(h.Plan))
	}
	r := &callReport{core: c, token: token, need: int(h.Need), large: large, keep: h.Flags&callKeep != 0}
	if errors.Is(err, errResized) { // the caller plans again
		large.freeAll()
		return err
	}
	r.limits = limits{ctx: context.Background(), timeout: time.Duration(h.Timeout) * time.Microsecond}
	if err == nil && method != actors.VerbInfo { // a timeout error describes what the ranks do, also after the deadline
		r.limits, err = c.nested(scope, r.limits.timeout)
	}
	if err != nil {
		r.refused(err)
		return nil
	}
	if h.Flags&callNoCollect == 0 {
		r.collect = p.Collect
	}
	call := dispatch.Call{
		Method: method, Object: object, Encoded: &dispatch.Encoded{Plan: p, World: world, Bodies: bodies}, Need: int(h.Need),
		Timeout: r.limits.timeout, NoCollect: h.Flags&callNoCollect != 0,
		CollectAll: h.Flags&callCollectAll != 0, Control: h.Flags&callControl != 0, NoWait: h.Flags&callNoWait != 0,
		OverFunc: r.over, Memory: c.memory, Keep: r.keep, Counted: true, Arguments: arguments, Inside: inside, OnDevice: h.Flags&callOnDevice != 0,
	}
	r.refs = on.References()
	if r.keep {
		c.addReport(r)
	}
	if large != nil {
		call.Encoded.DoneFunc = large.free
	}
	if h.Flags&callStreams != 0 {
		call.ArrivedFunc = r.arrived
	}
	var f *dispatch.Future
	c.outbox.together(func() bool {
		f, err = on.Go(c.scopeOf(r.limits.ctx, scope), call)
		return h.Flags&callMore == 0
	})
	if errors.Is(err, errResized) {
		r.core.removeReport(r)
		large.freeAll()
		return err
	}
	if err != nil {
		r.refused(err)
		return nil
	}
	r.begun(f.Cancel)
	return nil
}

// callReport turns the progress of one call into completions.
type callReport struct {
	core  *core
	token uint64
	need  int
	large outgoing
	keep  bool // it is registered, so that references to its answers can be made
	refs  *values.References
	// collect are the collected ranks, in the order of the result.
	collect []int
	limits  limits

	mu   sync.Mutex // guards what follows
	sent int        // number of reported answers
	done bool
	// promises are references to answers that have not arrived, by rank.
	promises map[int]wire.Reference
	reported map[int]bool // ranks whose answer was reported; nil: none, or all
}

// begun makes the call cancellable, unless it is over.
func (r *callReport) begun(cancel func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.done {
		r.core.begin(r.token, cancel)
	}
}

// refused reports a call that was not made. If its end was reported before, it may have been sent and its arguments are
// still in use.
func (r *callReport) refused(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.done {
		r.done = true
		r.core.removeReport(r)
		r.large.freeAll()
		r.core.report(r.token, completion{kind: kindOver, flags: flagFailed | flagLast, token: r.token, rank: -1, body: encodeError(err)})
	}
}

func (r *callReport) arrived(g *calls.Gather) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.done {
		return
	}
	answers := g.ArrivedSince(r.sent)
	r.sent += len(answers)
	out := make([]completion, len(answers))
	if r.reported == nil {
		r.reported = map[int]bool{}
	}
	for i := range answers {
		r.reported[answers[i].Rank] = true
		out[i] = r.answer(&answers[i])
	}
	r.core.report(r.token, out...)
}

// over reports the remaining answers and the end. The cause of a failure is the first that no other failure caused.
func (r *callReport) over(g *calls.Gather) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.done {
		return
	}
	r.done = true
	r.core.end(r.token)
	r.core.removeReport(r)
	all := g.Arrived()
	cause, good := causeOf(all)
	failed := cause >= 0 && (r.need == 0 || good < r.need)
	if body, ok := r.combined(g, all); ok {
		r.core.report(r.token, completion{kind: kindOver, flags: flagLast | flagCombined, token: r.token, rank: -1, body: body})
		return
	}
	out := make([]completion, 0, len(all)-r.sent+1)
	for i := r.sent; i < len(all); i++ {
		out = append(out, r.answer(&all[i]))
	}
	if len(all) == 1 && len(out) == 1 {
		out[0].flags |= flagLast
		if failed {
			out[0].flags |= flagCause
		}
		r.core.report(r.token, out...)
		return
	}
	end := completion{kind: kindOver, flags: flagLast, token: r.token, rank: -1}
	if failed {
		end.flags |= flagFailed
		end.rank, end.body = all[cause].Rank, encodeError(r.limits.explain(all[cause].Err))
	}
	r.core.report(r.token, append(out, end)...)
}

// combinedLimit bounds the total size of answers in one completion. Arrays in larger answers are used in place and must
// be aligned.
const combinedLimit = 8 << 10

// combined returns the answers of a call as one completion, if none was reported and all are successful and short: a
// completion costs Python more than decoding it.
func (r *callReport) combined(g *calls.Gather, all []calls.Answer) ([]byte, bool) {
	if r.sent > 0 || len(all) < 2 || !g.AllGood() {
		return nil, false
	}
	if len(r.promises) > 0 || slices.ContainsFunc(all, func(a calls.Answer) bool { // also of ranks that are not collected
		return len(a.Body) > combinedLimit || !a.Kept().IsZero() || len(a.References()) > 0
	}) {
		return nil, false
	}
	values, size := make([]wire.Raw, len(r.collect)), 0
	for i, rank := range r.collect {
		values[i] = g.Answer(rank).Body
		if size += len(values[i]); len(values[i]) == 0 || size > combinedLimit {
			return nil, false
		}
	}
	body, err := wire.Marshal(values)
	return body, err == nil // a malformed answer: each is reported on its own
}

// causeOf returns the index of the failure that caused the others, -1 if there is none, and the number of successful
// answers.
func causeOf(all []calls.Answer) (cause, good int) {
	cause = -1
	for i := range all {
		switch err := all[i].Err; {
		case err == nil:
			good++
		case cause < 0 || bus.CodeOf(all[cause].Err) == bus.CodeCancelled && bus.CodeOf(err) != bus.CodeCancelled:
			cause = i
		}
	}
	return cause, good
}

func (r *callReport) answer(a *calls.Answer) completion {
	out := completion{kind: kindAnswer, token: r.token, rank: a.Rank, body: a.Body}
	kept := a.Kept()
	if promise, ok := r.promises[a.Rank]; ok {
		r.refs.Fulfil(promise, a.Result())
		if !kept.IsZero() {
			kept = promise
		}
	}
	switch {
	case !kept.IsZero():
		out.flags, out.meta = flagKept, wire.AppendReferences(nil, []wire.Reference{kept})
	case len(a.References()) > 0:
		out.meta = wire.AppendReferences(nil, a.References())
	}
	switch {
	case !kept.IsZero():
	case a.Err != nil:
		out.flags, out.body = flagFailed, encodeError(r.limits.explain(a.Err))
	case a.Body == nil:
		out.flags = flagNone
	}
	return out
}
