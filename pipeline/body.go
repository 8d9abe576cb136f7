package pipeline

import (
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
)

const (
	bodyApart     = 16 << 10 // from here on a body is stored apart
	bodiesAtOnce  = 64       // on their way to the server
	bytesAtOnce   = 8 << 20
	bodyStallWait = time.Second
)

// bodyQueue is where bodies wait to be stored. The flow bounds it: it hands nothing out while much waits here.
type bodyQueue struct {
	wakeCh chan struct{} // holds one

	mu      sync.Mutex // guards what follows
	entries []*entry
}

func newBodyQueue() *bodyQueue { return &bodyQueue{wakeCh: make(chan struct{}, 1)} }

func (q *bodyQueue) push(entries []*entry) {
	q.mu.Lock()
	q.entries = append(q.entries, entries...)
	q.mu.Unlock()
	select {
	case q.wakeCh <- struct{}{}:
	default:
	}
}

// take returns the next to store, in order.
func (q *bodyQueue) take() []*entry {
	q.mu.Lock()
	defer q.mu.Unlock()
	n, bytes := 0, 0
	for n < len(q.entries) && n < bodiesAtOnce && (n == 0 || bytes+len(q.entries[n].Body) <= bytesAtOnce) {
		bytes += len(q.entries[n].Body)
		n++
	}
	out := q.entries[:n:n]
	q.entries = q.entries[n:]
	if len(q.entries) == 0 {
		q.entries = nil
	}
	return out
}

// bodyLoop stores large bodies ahead of the commits that name them, in the order of the commits: letting go of those
// that are done goes by that order.
func (p *Pipeline) bodyLoop() {
	js, err := jetstream.New(p.cfg.Bus.Conn(), jetstream.WithPublishAsyncMaxPending(2*bodiesAtOnce), jetstream.WithPublishAsyncTimeout(attemptLimit))
	if err != nil {
		p.cancel(bus.Errorf(bus.CodeInternal, "pipeline %s: %w", p.at.Name, err))
		return
	}
	var flying []bodyFlight
	for {
		if len(flying) < 2*bodiesAtOnce/3 {
			for _, e := range p.bodies.take() {
				flying = append(flying, bodyFlight{entry: e, ack: p.sendBody(js, e)})
			}
		}
		if len(flying) == 0 {
			select {
			case <-p.ctx.Done():
				return
			case <-p.bodies.wakeCh:
			}
			continue
		}
		n := min(len(flying), bodiesAtOnce/4)
		stored, ok := p.awaitBodies(flying[:n])
		flying = flying[stored:]
		if !ok && !p.resendBodies(js, flying) {
			return
		}
	}
}

type bodyFlight struct {
	entry *entry
	ack   jetstream.PubAckFuture // nil: it could not be sent
}

func (p *Pipeline) sendBody(js jetstream.JetStream, e *entry) jetstream.PubAckFuture {
	m := &nats.Msg{Subject: p.at.Bodies(e.lane.stream.spec.Name, e.lane.priority), Data: e.Body}
	ack, err := js.PublishMsgAsync(m, jetstream.WithStallWait(bodyStallWait))
	if err != nil {
		return nil // sent again with the others
	}
	return ack
}

// awaitBodies waits for the first bodies and tells the loop of them; it reports false when one was not stored.
func (p *Pipeline) awaitBodies(flying []bodyFlight) (stored int, ok bool) {
	seqs := make([]uint64, 0, len(flying))
	entries := make([]*entry, 0, len(flying))
	ok = true
	for _, b := range flying {
		seq, good := p.awaitBody(b)
		if ok = good; !ok {
			break
		}
		seqs, entries = append(seqs, seq), append(entries, b.entry)
	}
	if len(entries) > 0 {
		p.inbox.push(eventFunc(func(p *Pipeline) { p.flow.bodiesStored(entries, seqs) }))
	}
	return len(entries), ok
}

func (p *Pipeline) awaitBody(b bodyFlight) (seq uint64, ok bool) {
	if b.ack == nil {
		return 0, false
	}
	select {
	case a := <-b.ack.Ok():
		return a.Sequence, true
	case <-b.ack.Err():
	case <-p.ctx.Done():
	}
	return 0, false
}

// resendBodies sends again what was not stored, and all behind it: their order must stay. What is stored twice is in
// nobody's way, and is let go of with its neighbours. It reports false when the pipeline ends.
func (p *Pipeline) resendBodies(js jetstream.JetStream, flying []bodyFlight) bool {
	for _, b := range flying { // the last answers to come
		p.awaitBody(b)
	}
	if wait(p.ctx, longestPause/4) != nil {
		return false
	}
	for i, b := range flying {
		flying[i].ack = p.sendBody(js, b.entry)
	}
	return true
}
