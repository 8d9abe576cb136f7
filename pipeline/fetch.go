package pipeline

import (
	"sync"

	"github.com/nats-io/nats.go"

	"troupe/bus"
	"troupe/pipeline/flow"
	"troupe/pipeline/spec"
)

// bodiesInLine is how many large bodies of other processes may be in memory before one stream.
const maxFetchesPerStream = 2

// pulls are puts of other processes whose body is fetched, one for each producer.
type bodyFetches struct {
	mu       sync.Mutex // guards what follows
	inFlight map[string]*bodyFetch
	roomCh   map[string]chan struct{} // by stream
}

// pull is one put whose body is fetched. It is answered to who asked last: a producer repeats what takes long.
type bodyFetch struct {
	all *bodyFetches
	req putRequest

	mu  sync.Mutex // guards what follows
	msg *nats.Msg
}

// begin notes a put; nil: it is being fetched already.
func (ps *bodyFetches) begin(req putRequest, m *nats.Msg) (*bodyFetch, chan struct{}) {
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

// end answers the put.
func (u *bodyFetch) end(err error) {
	u.all.mu.Lock()
	if u.all.inFlight[u.req.Source] == u {
		delete(u.all.inFlight, u.req.Source)
	}
	u.all.mu.Unlock()
	u.mu.Lock()
	defer u.mu.Unlock()
	respond(u.msg, nil, err)
}

// receiveLarge takes a put of one item whose body has to be fetched from who puts it.
func (p *Pipeline) handleLargePut(req putRequest, m *nats.Msg) {
	s := p.flow.StreamNamed(req.Stream)
	switch {
	case s == nil:
		respond(m, nil, p.noStream(req.Stream))
		return
	case len(req.Items) != 1:
		respond(m, nil, bus.Errorf(bus.CodeMalformed, "put: a large body and %d items", len(req.Items)))
		return
	}
	it := req.Items[0].item()
	if err := p.flow.CheckSize(s, &it, int(req.Size)); err != nil {
		respond(m, nil, err)
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
		p.fetchPut(u, it, func(err error) { <-roomCh; u.end(err) })
	}))
}

// fetchPut fetches the body, unless it is stored already, and puts the item.
func (p *Pipeline) fetchPut(u *bodyFetch, it spec.Item, end func(error)) {
	known := false
	err := p.inLoop(p.ctx, func(p *Pipeline) {
		known = p.flow.WasAccepted(u.req.Source, u.req.Seq)
	})
	if err == nil && !known {
		it.Body, err = fetchBody(p.ctx, p.cfg.Bus.Conn(), u.req.From, u.req.Seq, 0, int(u.req.Size))
	}
	if err != nil {
		end(err)
		return
	}
	p.inbox.push(&putEvent{Put: flow.Put{Source: u.req.Source, Seq: u.req.Seq, Items: []spec.Item{it}}, name: u.req.Stream, end: end})
}
