package pipeline

import (
	"sync"

	"github.com/nats-io/nats.go"

	"troupe/bus"
)

// bodiesInLine is how many large bodies of other processes may be in memory before one stream.
const bodiesInLine = 2

// pulls are puts of other processes whose body is fetched, one for each producer.
type pulls struct {
	mu     sync.Mutex // guards what follows
	under  map[string]*pull
	roomCh map[string]chan struct{} // by stream
}

// pull is one put whose body is fetched. It is answered to who asked last: a producer repeats what takes long.
type pull struct {
	all *pulls
	req putRequest

	mu  sync.Mutex // guards what follows
	msg *nats.Msg
}

// begin notes a put; nil: it is being fetched already.
func (ps *pulls) begin(req putRequest, m *nats.Msg) (*pull, chan struct{}) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if u := ps.under[req.Source]; u != nil && u.req.Seq == req.Seq {
		u.mu.Lock()
		u.msg = m
		u.mu.Unlock()
		return nil, nil
	}
	u := &pull{all: ps, req: req, msg: m}
	ps.under[req.Source] = u
	roomCh := ps.roomCh[req.Stream]
	if roomCh == nil {
		roomCh = make(chan struct{}, bodiesInLine)
		ps.roomCh[req.Stream] = roomCh
	}
	return u, roomCh
}

// end answers the put.
func (u *pull) end(err error) {
	u.all.mu.Lock()
	if u.all.under[u.req.Source] == u {
		delete(u.all.under, u.req.Source)
	}
	u.all.mu.Unlock()
	u.mu.Lock()
	defer u.mu.Unlock()
	respond(u.msg, nil, err)
}

// receiveLarge takes a put of one item whose body has to be fetched from who puts it.
func (p *Pipeline) receiveLarge(req putRequest, m *nats.Msg) {
	s := p.flow.streamOf(req.Stream)
	switch {
	case s == nil:
		respond(m, nil, p.noStream(req.Stream))
		return
	case len(req.Items) != 1:
		respond(m, nil, bus.Errorf(bus.CodeMalformed, "put: a large body and %d items", len(req.Items)))
		return
	}
	it := req.Items[0].item()
	if err := s.checkSize(&it, int(req.Size), p.flow.maxBody); err != nil {
		respond(m, nil, err)
		return
	}
	u, roomCh := p.pulls.begin(req, m)
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
func (p *Pipeline) fetchPut(u *pull, it Item, end func(error)) {
	known := false
	err := p.do(p.ctx, func(p *Pipeline) {
		src := p.flow.sources[u.req.Source]
		known = src != nil && u.req.Seq <= src.accepted
	})
	if err == nil && !known {
		it.Body, err = pullBody(p.ctx, p.cfg.Bus.Conn(), u.req.From, u.req.Seq, 0, int(u.req.Size))
	}
	if err != nil {
		end(err)
		return
	}
	p.inbox.push(&putEvent{put: put{source: u.req.Source, seq: u.req.Seq, items: []Item{it}}, name: u.req.Stream, end: end})
}
