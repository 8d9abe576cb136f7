package rollouts

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/pipeline/groups"
)

// handle runs a request. Its answer waits until everything that was changed before is stored.
func (e *engine) handle(m *bus.Msg) {
	p := &parked{m: m, verb: lastToken(m.Subject), until: time.Now().Add(parkedFor)}
	if p.verb == "replaced" {
		if string(m.Data) != e.id {
			e.enqueued++
			e.checkpoint = true // it is refused if another engine has taken the log over
		}
		return
	}
	if err := wire.Unmarshal(m.Data, &p.req); err != nil {
		e.reply(m, nil, bus.Errorf(bus.CodeMalformed, "%s: %w", p.verb, err))
		return
	}
	if !e.try(p) {
		if len(e.parked) >= maxParked {
			e.reply(m, nil, errBusy)
			return
		}
		e.parked = append(e.parked, p)
	}
}

var errBusy = bus.Errorf(bus.CodeBusy, "nothing is ready yet")

// try runs a request; false: nothing can serve it yet.
func (e *engine) try(p *parked) bool {
	result, err := e.execute(p.verb, &p.req)
	if groups.Waits(err) {
		return false
	}
	e.note()
	e.reply(p.m, result, err)
	return true
}

// retryParked tries requests that wait, in order. When one waits on, those like it do.
func (e *engine) retryParked() {
	e.dirty = false
	type like struct {
		verb, field string
		count       int
	}
	stuck := map[like]bool{}
	left := e.parked[:0]
	for _, p := range e.parked {
		k := like{p.verb, p.req.Field, p.req.Count}
		if stuck[k] || e.full() || !e.try(p) {
			stuck[k] = true
			left = append(left, p)
		}
	}
	clear(e.parked[len(left):])
	e.parked = left
}

func (e *engine) expireParked() {
	left := e.parked[:0]
	for _, p := range e.parked {
		if e.state.Now.Before(p.until) {
			left = append(left, p)
			continue
		}
		e.reply(p.m, nil, errBusy)
	}
	clear(e.parked[len(left):])
	e.parked = left
}

func (e *engine) reply(m *bus.Msg, result func() any, err error) {
	e.replies = append(e.replies, reply{m, e.enqueued, result, err})
}

// answer sends the answers whose changes are stored.
func (e *engine) answer() {
	n := 0
	for n < len(e.replies) && e.replies[n].after <= e.stored {
		e.respond(e.replies[n])
		n++
	}
	clear(e.replies[:n])
	e.replies = e.replies[n:]
}

func (e *engine) respond(r reply) {
	if r.m.Reply == "" {
		return
	}
	var out response
	if r.err == nil && r.result != nil {
		out.Result, r.err = wire.Marshal(r.result())
		if len(out.Result) > e.cfg.Bus.MaxPayload()-4096 {
			r.err = bus.Errorf(bus.CodeInvalid, "the answer has %d bytes, more than fit into a message; ask for fewer", len(out.Result))
		}
	}
	if r.err != nil {
		out = response{Code: bus.AsError(r.err).Code, Message: bus.AsError(r.err).Message}
	}
	body, _ := wire.Marshal(out)     // cannot fail
	_ = e.cfg.Bus.Respond(r.m, body) // a lost answer is requested again
}

// execute lets the state decide. The result is encoded when the changes are stored, because it says where they lie.
func (e *engine) execute(verb string, r *request) (func() any, error) {
	s := e.state
	keep := func(ev *groups.Event, err error) (func() any, error) {
		if ev != nil && len(r.Data) > 0 {
			e.data[ev] = r.Data
			e.bytes += len(r.Data)
		}
		return nil, err
	}
	switch verb {
	case "put":
		r.Put.Body = r.Body
		if err := bus.CheckName("group", r.Put.Name); err != nil {
			return nil, err
		}
		return keep(s.Put(r.Put))
	case "take":
		g, m, err := s.Take(r.Ticket)
		return func() any { return sampleOf(g, m, s.Version) }, err
	case "finish":
		return keep(s.Finish(groups.NewTurn{Of: r.Of, Turn: r.Turn, Last: r.Last, Version: r.Version, Body: r.Body}))
	case "set":
		return keep(s.Set(r.Of, r.Body))
	case "name":
		name, err := s.NameOf(r.Group)
		return func() any { return name }, err
	case "scoring":
		pairs, err := s.Scoring(r.Field, r.Count, r.Ticket)
		return func() any {
			out := make([]Sample, len(pairs))
			for i, p := range pairs {
				out[i] = sampleOf(p.Group, p.Sample, s.Version)
			}
			return out
		}, err
	case "batch":
		got, err := s.Batch(r.Count, r.Ticket)
		return func() any { return e.groupsOf(got) }, err
	case "done":
		return nil, s.Done(r.Ticket, r.Groups)
	case "release":
		s.Release(r.Ticket)
		e.dirty = true
		return nil, nil
	case "redispatch":
		n := s.Redispatch(r.Group)
		e.dirty = true
		return func() any { return n }, nil
	case "version":
		return nil, s.SetVersion(r.Version)
	case "status":
		st := s.Status()
		st.By = e.cfg.By
		text, err := json.Marshal(st)
		return func() any { return string(text) }, err
	}
	return nil, bus.Errorf(bus.CodeInvalid, "rollouts have no verb %q", verb)
}

func (e *engine) groupsOf(got []*groups.Group) []Group {
	out := make([]Group, len(got))
	for i, g := range got {
		samples := g.Complete()
		out[i] = Group{ID: g.ID, Name: g.Name, Prompt: *g.Prompt, Version: groups.Oldest(samples)}
		for _, m := range samples {
			out[i].Samples = append(out[i].Samples, sampleOf(g, m, e.state.Version))
		}
	}
	return out
}

// tidy deletes what ended groups have stored, in the background. What is not deleted is deleted by a later engine, and so is what
// a killed server restores.
func (e *engine) tidy() {
	if e.tidying || time.Since(e.tidied) < tidyInterval {
		return
	}
	floor := e.record // of what has to stay
	var dead []uint64
	for seq, in := range e.kept {
		in = slices.DeleteFunc(in, e.ended.Contains)
		if e.kept[seq] = in; len(in) > 0 {
			floor = min(floor, seq)
		} else if seq != e.record {
			dead = append(dead, seq)
		}
	}
	behind := slices.DeleteFunc(slices.Clone(dead), func(seq uint64) bool { return seq < floor })
	below := len(dead) > len(behind)
	if len(behind) <= maxDead {
		behind = nil
	}
	names := e.garbage
	if !below && len(behind) == 0 && len(names) == 0 {
		return
	}
	for _, seq := range dead {
		if seq < floor || behind != nil {
			delete(e.kept, seq)
		}
	}
	e.garbage, e.tidying = nil, true
	e.group.Go(bus.Guard(func() {
		err := e.log.Purge(e.ctx, "", floor)
		if len(behind) > 0 {
			err = errors.Join(err, e.log.DeleteMessages(e.ctx, behind))
		}
		for _, name := range names {
			ctx, cancel := context.WithTimeout(e.ctx, attemptTimeout)
			err = errors.Join(err, e.bodies.Purge(ctx, e.at.body(name), 0))
			cancel()
		}
		if err != nil && e.ctx.Err() == nil {
			e.cfg.Logger.Warn("rollouts: ended groups were not deleted; the next engine deletes them", "rollouts", e.at.name, "error", err)
		}
		e.tidyCh <- struct{}{}
	}))
}
