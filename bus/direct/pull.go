package direct

import (
	"context"
	"errors"
	"sync"

	"troupe/bus"
)

// pull is one body that arrives over one or several streams. Each stream takes the next range, and asks for it before the one before has arrived.
type pull struct {
	client  *Client
	ticket  *Ticket
	body    []byte
	arrived *Arrived
	moved   func(n int)
	fail    context.CancelFunc // ends all streams

	mu   sync.Mutex // guards what follows
	next int        // where the next range begins
	err  error      // the first one; the others end too
}

// take is the next range, or what is missing of it; empty: there is none.
func (p *pull) take() (from, to int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.next < len(p.body) && p.err == nil {
		to := min(p.next+chunkSize, len(p.body))
		from := p.arrived.missing(p.next, to)
		if p.next = to; from < to {
			return from, to
		}
	}
	return 0, 0
}

// run pulls ranges over a stream until there are none.
func (p *pull) run(ctx context.Context, s *stream) {
	watching := context.AfterFunc(ctx, bus.Guard(s.close))
	err := p.ranges(s)
	whole := watching()
	if err == nil && whole {
		p.client.keep(s)
		return
	}
	s.close()
	if err == nil {
		err = context.Cause(ctx)
	}
	p.mu.Lock()
	first := p.err == nil
	if first {
		p.err = err
	}
	p.mu.Unlock()
	if first {
		p.fail()
	}
}

func (p *pull) ranges(s *stream) error {
	request := func(from, to int) error {
		if from == to {
			return nil
		}
		_, err := s.conn.Write(appendRequest(nil, p.ticket, s.nonce[:], s.number, uint64(from), uint64(to-from)))
		s.number++
		return err // the next read sends it
	}
	from, to := p.take()
	if err := request(from, to); err != nil {
		return err
	}
	for from < to {
		nextFrom, nextTo := p.take()
		if err := request(nextFrom, nextTo); err != nil {
			return err
		}
		at := from
		err := readPieces(s.conn, p.body[from:to], func(n int) {
			p.arrived.mark(from, at+n)
			at += n
			if p.moved != nil {
				p.moved(n)
			}
		})
		if err != nil {
			return err
		}
		from, to = nextFrom, nextTo
	}
	return s.end(p.ticket)
}

// end tells the server that no more of a body is needed.
func (s *stream) end(t *Ticket) error {
	_, err := s.conn.Write(appendRequest(nil, t, s.nonce[:], s.number, 0, 0))
	s.number++
	return errors.Join(err, s.progress.flush())
}
