package pipeline

import (
	"context"
	"sync"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/pipeline/flow"
	"troupe/pipeline/spec"
)

// maxFetchesPerStream bounds the large bodies of other processes in memory that wait for room in one stream.
const maxFetchesPerStream = 2

// bodyFetches is the puts of other processes whose body is being fetched, one per producer.
type bodyFetches struct {
	mu       sync.Mutex // guards the following fields
	inFlight map[string]*bodyFetch
	roomCh   map[string]chan struct{} // by stream
}

// bodyFetch is one put whose body is being fetched. The last request gets the answer: a producer repeats a request that
// takes long.
type bodyFetch struct {
	all *bodyFetches
	req putRequest

	mu  sync.Mutex // guards the following fields
	msg *bus.Msg
}

// begin registers a fetch; nil: the same put is being fetched already.
func (ps *bodyFetches) begin(req putRequest, m *bus.Msg) (*bodyFetch, chan struct{}) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if u := ps.inFlight[req.Source]; u != nil && u.req.Seq == req.Seq {
		u.mu.Lock()
		u.msg = m
		u.mu.Unlock()
		return nil, nil
	}
	u := &bodyFetch{all: ps, req: req, msg: m}
	ps.inFlight[req.Source] = u
	roomCh := ps.roomCh[req.Stream]
	if roomCh == nil {
		roomCh = make(chan struct{}, maxFetchesPerStream)
		ps.roomCh[req.Stream] = roomCh
	}
	return u, roomCh
}

func (u *bodyFetch) end(p *Pipeline, err error) {
	u.all.mu.Lock()
	if u.all.inFlight[u.req.Source] == u {
		delete(u.all.inFlight, u.req.Source)
	}
	u.all.mu.Unlock()
	u.mu.Lock()
	defer u.mu.Unlock()
	respond(p.cfg.Bus, u.msg, nil, err)
}

// handleLargePut handles a put of one item whose body has to be fetched from the producer.
func (p *Pipeline) handleLargePut(req putRequest, m *bus.Msg) {
	s := p.flow.StreamNamed(req.Stream)
	switch {
	case s == nil:
		respond(p.cfg.Bus, m, nil, p.noStream(req.Stream))
		return
	case len(req.Items) != 1:
		respond(p.cfg.Bus, m, nil, bus.Errorf(bus.CodeMalformed, "put: a large body with %d items", len(req.Items)))
		return
	}
	it := req.Items[0].item()
	if err := p.flow.CheckSize(s, &it, int(req.Body.Len)); err != nil {
		respond(p.cfg.Bus, m, nil, err)
		return
	}
	u, roomCh := p.fetches.begin(req, m)
	if u == nil {
		return
	}
	p.group.Go(bus.Guard(func() {
		select {
		case roomCh <- struct{}{}:
		case <-p.ctx.Done():
			return
		}
		p.fetchPut(u, it, func(err error) { <-roomCh; u.end(p, err) })
	}))
}

// fetchPut fetches the body, unless the put was accepted before, and puts the item.
func (p *Pipeline) fetchPut(u *bodyFetch, it spec.Item, end func(error)) {
	known := false
	err := p.inLoop(p.ctx, func(p *Pipeline) {
		known = p.flow.WasAccepted(u.req.Source, u.req.Seq)
	})
	if err == nil && !known {
		it.Body, err = pull(p.ctx, p.exchange, u.req.Body)
	}
	if err != nil {
		end(err)
		return
	}
	p.inbox.push(&putEvent{Put: flow.Put{Source: u.req.Source, Seq: u.req.Seq, Items: []spec.Item{it}}, name: u.req.Stream, end: end})
}

// pull obtains a large body from the process that offers it.
func pull(ctx context.Context, x *values.Exchange, ref wire.BodyRef) ([]byte, error) {
	store, err := x.Store()
	if err != nil {
		return nil, err
	}
	body, err := store.Pull(ctx, ref)
	if err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "fetch a body of %d bytes: %w", ref.Len, err)
	}
	return body, nil
}
