package direct

import (
	"context"
	"errors"
	"sync"

	"troupe/bus"
)

// pull is one body that arrives over one or several streams. Each stream takes the next range, and asks for it before the one before has arrived.
type pull struct {
	client *Client
	ticket *Ticket
	body   []byte
	moved  func(n int)
	fail   context.CancelFunc // ends all streams

	mu    sync.Mutex // guards what follows
	next  int        // range
	there []bool     // by range
	err   error      // the first one; the others end too
}

// take is the next range; -1: there is none.
func (p *pull) take() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.next == len(p.there) || p.err != nil {
		return -1
	}
	p.next++
	return p.next - 1
}

func (p *pull) bounds(i int) (from, to int) { return i * chunkSize, min((i+1)*chunkSize, len(p.body)) }

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
	request := func(i int) error {
		if i < 0 {
			return nil
		}
		from, to := p.bounds(i)
		_, err := s.conn.Write(appendRequest(nil, p.ticket, s.nonce[:], s.number, uint64(from), uint64(to-from)))
		s.number++
		return err // the next read sends it
	}
	i := p.take()
	if err := request(i); err != nil {
		return err
	}
	for i >= 0 {
		ahead := p.take()
		if err := request(ahead); err != nil {
			return err
		}
		from, to := p.bounds(i)
		if err := readPieces(s.conn, p.body[from:to], p.moved); err != nil {
			return err
		}
		p.mu.Lock()
		p.there[i] = true
		p.mu.Unlock()
		i = ahead
	}
	return s.end(p.ticket)
}

// end tells the server that no more of a body is needed.
func (s *stream) end(t *Ticket) error {
	_, err := s.conn.Write(appendRequest(nil, t, s.nonce[:], s.number, 0, 0))
	s.number++
	return errors.Join(err, s.progress.flush())
}

// prefix is how many bytes from the beginning are there.
func (p *pull) prefix() int {
	for i, there := range p.there {
		if !there {
			from, _ := p.bounds(i)
			return from
		}
	}
	return len(p.body)
}
