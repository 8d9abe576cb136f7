package pipeline

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"troupe/bus"
)

const (
	defaultLoan = 30 * time.Second
	lendAtMost  = 100 // items
	lookEvery   = 500 * time.Millisecond
	missedAfter = 4 * time.Second // so long a connection may take to come back
)

// loan is a batch for another process, on the wire.
type loan struct {
	ID    uint64     `json:"id"`
	For   int64      `json:"for_ms"` // how long, unless it is prolonged
	Items []LentItem `json:"items"`
}

// LentItem is an item of a sink, as another process sees it.
type LentItem struct {
	ID       string  `json:"id"`
	Key      string  `json:"key,omitempty"`
	Group    string  `json:"group,omitempty"`
	Of       int     `json:"of,omitempty"`
	Priority int     `json:"priority,omitempty"`
	Version  Version `json:"version"`
	Body     []byte  `json:"body,omitempty"`
	Apart    int     `json:"apart,omitempty"` // on the wire: the bytes of a body that is fetched apart
}

// loans are what other processes have of the sinks.
type loans struct {
	mu   sync.Mutex // guards what follows
	byID map[uint64]*lending
}

type lending struct {
	batch  *Batch
	holder string        // the subject that who has it listens to; empty: it does not say
	keptCh chan struct{} // holds one: it was prolonged
	overCh chan struct{} // closed when it is over
}

func (l *loans) find(id uint64) *lending {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.byID[id]
}

// remove takes a loan out; nil: it is over.
func (l *loans) remove(id uint64) *lending {
	l.mu.Lock()
	defer l.mu.Unlock()
	o := l.byID[id]
	if o != nil {
		delete(l.byID, id)
		close(o.overCh)
	}
	return o
}

// lend takes items out of a sink for another process; none is no error.
func (p *Pipeline) lend(ctx context.Context, stream string, n int, holder string) (loan, error) {
	ctx, cancel := context.WithTimeout(ctx, verbLimit/5)
	defer cancel()
	b, err := p.Take(ctx, stream, max(1, min(n, lendAtMost)))
	if errors.Is(err, bus.ErrTimedOut) {
		return loan{}, nil
	}
	if err != nil {
		return loan{}, err
	}
	o := &lending{batch: b, holder: holder, keptCh: make(chan struct{}, 1), overCh: make(chan struct{})}
	p.loans.mu.Lock()
	p.loans.byID[b.id] = o
	p.loans.mu.Unlock()
	p.group.Go(bus.Guard(func() { p.callIn(o) }))
	return p.loanOf(b), nil
}

// loanOf is a batch on the wire: what does not fit into one message with the others is fetched apart.
func (p *Pipeline) loanOf(b *Batch) loan {
	l := loan{ID: b.id, For: p.cfg.Loan.Milliseconds()}
	room := int(p.cfg.Bus.Conn().MaxPayload()) / 2
	for _, it := range b.Items {
		lent := LentItem{ID: it.ID, Key: it.Key, Group: it.Group, Of: it.Of, Priority: it.Priority, Version: it.Version}
		if room -= 4*len(it.Body)/3 + 1024; room > 0 {
			lent.Body = it.Body
		} else {
			lent.Apart = len(it.Body)
			room += 4 * len(it.Body) / 3
		}
		l.Items = append(l.Items, lent)
	}
	return l
}

// callIn puts a loan's items back when nobody has said for too long that he still has them, or the server has known of nobody
// who holds them for longer than a connection takes to come back.
func (p *Pipeline) callIn(o *lending) {
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	kept, heard := time.Now(), time.Now()
	for time.Since(kept) < p.cfg.Loan && time.Since(heard) < missedAfter {
		select {
		case <-p.ctx.Done():
			return
		case <-o.overCh:
			return
		case <-o.keptCh:
			kept = time.Now()
		case <-time.After(time.Until(kept.Add(p.cfg.Loan))):
		case <-look.C:
			if !p.missing(o.holder) {
				heard = time.Now()
			}
		}
	}
	if p.loans.remove(o.batch.id) != nil {
		_ = o.batch.Return(p.ctx) // it fails only with the pipeline
	}
}

// missing reports whether the server says that nobody listens there. One who listens and does not answer may be busy.
func (p *Pipeline) missing(holder string) bool {
	if holder == "" {
		return false
	}
	ctx, cancel := context.WithTimeout(p.ctx, lookEvery)
	defer cancel()
	_, err := p.cfg.Bus.Conn().RequestWithContext(ctx, holder, nil)
	return errors.Is(err, nats.ErrNoResponders)
}

// keep prolongs loans, and settle ends them: their items are done, or go back.
func (p *Pipeline) keep(ids []uint64) error {
	for _, id := range ids {
		o := p.loans.find(id)
		if o == nil {
			return errLoanOver
		}
		select {
		case o.keptCh <- struct{}{}:
		default:
		}
	}
	return nil
}

var errLoanOver = bus.Errorf(bus.CodeNotFound, "the items have gone back to their sink: nobody said in time that he still had them, or the pipeline was opened anew")

func (p *Pipeline) settle(ctx context.Context, ids []uint64, done bool) error {
	for _, id := range ids {
		o := p.loans.remove(id)
		if o == nil {
			return errLoanOver
		}
		if err := o.batch.end(ctx, done); err != nil {
			return err
		}
	}
	return nil
}

// servePart gives a part of a body that is on loan.
func (p *Pipeline) servePart(m *nats.Msg) {
	servePart(m, func(of uint64, item int) []byte {
		if o := p.loans.find(of); o != nil && item >= 0 && item < len(o.batch.Items) {
			return o.batch.Items[item].Body
		}
		return nil
	})
}

// Loan is items of a sink that this process has, however long it takes: while it lives, it says so to the pipeline. Done
// or Return ends it; when the process dies, the items go back within seconds, or half a minute if its host is gone with it.
type Loan struct {
	Items []LentItem

	c      *Client
	id     uint64
	holds  *nats.Subscription // by which the pipeline knows that we are there
	cancel context.CancelFunc
	over   sync.WaitGroup
}

// Lend takes up to n items out of a sink, 100 at most; nil when there were none within a second.
func (c *Client) Lend(ctx context.Context, stream string, n int) (*Loan, error) {
	nc := c.b.Conn()
	holds, err := nc.Subscribe(nc.NewInbox(), bus.GuardMsg(func(m *nats.Msg) { _ = m.Respond(nil) })) // asked again if it is lost
	if err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "take from %s: %w", stream, err)
	}
	var w loan
	if err := c.verb(ctx, "take", Order{ID: stream, Workers: n, Holder: holds.Subject}, &w); err != nil || w.ID == 0 {
		_ = holds.Unsubscribe() // fails only on a closed connection, as below
		return nil, err
	}
	l := &Loan{Items: w.Items, c: c, id: w.ID, holds: holds}
	keeping, cancel := context.WithCancel(context.WithoutCancel(ctx))
	l.cancel = cancel
	l.over.Go(bus.Guard(func() { l.keep(keeping, time.Duration(w.For)*time.Millisecond/3) }))
	for i := range l.Items {
		it := &l.Items[i]
		if it.Apart == 0 {
			continue
		}
		body, err := pullBody(ctx, c.b.Conn(), c.at.Ask("part"), w.ID, i, it.Apart)
		if err != nil {
			return nil, errors.Join(err, l.Return(context.WithoutCancel(ctx)))
		}
		it.Body, it.Apart = body, 0
	}
	return l, nil
}

// keep says that the items are still in hand. An answer that does not come is no reason to stop: the pipeline's process
// may be restarted, and then says so. A connection that is closed for good is.
func (l *Loan) keep(ctx context.Context, every time.Duration) {
	for wait(ctx, every) == nil {
		err := l.c.verb(ctx, "keep", Order{Seqs: []uint64{l.id}}, nil)
		if errors.Is(err, errLoanOver) || l.c.b.Conn().IsClosed() {
			return
		}
	}
}

// Done says that the items are dealt with. It fails with bus.ErrNotFound when they have gone back.
func (l *Loan) Done(ctx context.Context) error { return l.end(ctx, "taken") }

// Return puts the items back.
func (l *Loan) Return(ctx context.Context) error { return l.end(ctx, "given-back") }

func (l *Loan) end(ctx context.Context, verb string) error {
	l.cancel()
	l.over.Wait()
	defer func() { _ = l.holds.Unsubscribe() }()
	return l.c.verb(ctx, verb, Order{Seqs: []uint64{l.id}}, nil)
}
