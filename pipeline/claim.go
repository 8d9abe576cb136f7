package pipeline

import (
	"context"
	"errors"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/pipeline/spec"
)

const (
	defaultClaimTimeout = 30 * time.Second
	maxClaimItems       = 100
	holderCheckInterval = 500 * time.Millisecond
	holderTimeout       = 4 * time.Second // time for a connection to come back
)

// claimResponse is claimed items on the wire.
type claimResponse struct {
	ID    uint64        `json:"id"`
	For   int64         `json:"for_ms"` // timeout in milliseconds, unless it is extended
	Items []ClaimedItem `json:"items"`
}

// ClaimedItem is an item of a sink that another process has claimed.
type ClaimedItem struct {
	ID       string       `json:"id"`
	Key      string       `json:"key,omitempty"`
	Group    string       `json:"group,omitempty"`
	Of       int          `json:"of,omitempty"`
	Priority int          `json:"priority,omitempty"`
	Version  spec.Version `json:"version"`
	Body     []byte       `json:"body,omitempty"`
	// BodyRef names a body that does not fit into the message, on the wire alone.
	BodyRef *wire.BodyRef `json:"body_ref,omitempty"`
}

// openClaims is the claims of other processes.
type openClaims struct {
	mu   sync.Mutex // guards the following fields
	byID map[uint64]*openClaim
}

type openClaim struct {
	batch      *Batch
	offered    []wire.BodyRef // bodies that do not fit into a message
	holder     string         // subject that the holder answers on while it lives; empty: none
	extendedCh chan struct{}  // capacity one: the holder extended the claim
	doneCh     chan struct{}  // closed when the claim has ended
}

func (l *openClaims) find(id uint64) *openClaim {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.byID[id]
}

// remove removes a claim; nil: it has ended.
func (l *openClaims) remove(id uint64) *openClaim {
	l.mu.Lock()
	defer l.mu.Unlock()
	o := l.byID[id]
	if o != nil {
		delete(l.byID, id)
		close(o.doneCh)
	}
	return o
}

// endClaim removes a claim and withdraws its bodies; nil: it has ended.
func (p *Pipeline) endClaim(id uint64) *openClaim {
	o := p.claims.remove(id)
	if o == nil || len(o.offered) == 0 {
		return o
	}
	if store, err := p.exchange.Store(); err == nil { // it was opened when they were offered
		for _, ref := range o.offered {
			store.Withdraw(ref)
		}
	}
	return o
}

// claimItems takes items from a sink for another process; none is no error.
func (p *Pipeline) claimItems(ctx context.Context, stream string, n int, holder string) (claimResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout/5)
	defer cancel()
	b, err := p.Take(ctx, stream, max(1, min(n, maxClaimItems)))
	if errors.Is(err, bus.ErrTimedOut) {
		return claimResponse{}, nil
	}
	if err != nil {
		return claimResponse{}, err
	}
	o := &openClaim{batch: b, holder: holder, extendedCh: make(chan struct{}, 1), doneCh: make(chan struct{})}
	response, err := p.encodeClaim(o)
	if err != nil {
		return claimResponse{}, errors.Join(err, b.Nak(context.WithoutCancel(ctx)))
	}
	p.claims.mu.Lock()
	p.claims.byID[b.id] = o
	p.claims.mu.Unlock()
	p.group.Go(bus.Guard(func() { p.watchClaim(o) }))
	return response, nil
}

// encodeClaim encodes a batch, and offers the bodies that do not fit into one message.
func (p *Pipeline) encodeClaim(o *openClaim) (claimResponse, error) {
	l := claimResponse{ID: o.batch.id, For: p.cfg.ClaimTimeout.Milliseconds()}
	room := p.cfg.Bus.MaxPayload() / 2
	for _, it := range o.batch.Items {
		lent := ClaimedItem{ID: it.ID, Key: it.Key, Group: it.Group, Of: it.Of, Priority: it.Priority, Version: it.Version}
		if room -= 4*len(it.Body)/3 + 1024; room > 0 {
			lent.Body = it.Body
		} else {
			store, err := p.exchange.Store()
			if err != nil {
				return claimResponse{}, err
			}
			ref := store.OfferKept(it.Body, nil)
			o.offered, lent.BodyRef = append(o.offered, ref), &ref
			room += 4 * len(it.Body) / 3
		}
		l.Items = append(l.Items, lent)
	}
	return l, nil
}

// watchClaim returns the items of a claim that was not extended in time, or whose holder has had no subscription for
// longer than a reconnect takes.
func (p *Pipeline) watchClaim(o *openClaim) {
	look := time.NewTicker(holderCheckInterval)
	defer look.Stop()
	kept, heard := time.Now(), time.Now()
	for time.Since(kept) < p.cfg.ClaimTimeout && time.Since(heard) < holderTimeout {
		select {
		case <-p.ctx.Done():
			return
		case <-o.doneCh:
			return
		case <-o.extendedCh:
			kept = time.Now()
		case <-time.After(time.Until(kept.Add(p.cfg.ClaimTimeout))):
		case <-look.C:
			if !p.isGone(o.holder) {
				heard = time.Now()
			}
		}
	}
	if p.endClaim(o.batch.id) != nil {
		_ = o.batch.Nak(p.ctx) // fails only if the pipeline ends
	}
}

// isGone reports whether the holder has no subscription. A holder that does not answer may be busy.
func (p *Pipeline) isGone(holder string) bool {
	if holder == "" {
		return false
	}
	ctx, cancel := context.WithTimeout(p.ctx, holderCheckInterval)
	defer cancel()
	_, err := p.cfg.Bus.Request(ctx, holder, nil)
	return errors.Is(err, bus.ErrNoResponders)
}

// extendClaims extends the timeout of claims.
func (p *Pipeline) extendClaims(ids []uint64) error {
	for _, id := range ids {
		o := p.claims.find(id)
		if o == nil {
			return errClaimExpired
		}
		select {
		case o.extendedCh <- struct{}{}:
		default:
		}
	}
	return nil
}

var errClaimExpired = bus.Errorf(bus.CodeNotFound, "the claim has expired and its items are back in their sink: it was not extended in time, or the pipeline was restarted")

func (p *Pipeline) settleClaims(ctx context.Context, ids []uint64, done bool) error {
	for _, id := range ids {
		o := p.endClaim(id)
		if o == nil {
			return errClaimExpired
		}
		if err := o.batch.settle(ctx, done); err != nil {
			return err
		}
	}
	return nil
}

// Claim is items of a sink that this process has claimed. It is extended in the background until Ack or Nak ends it.
// When the process dies, the items go back within seconds, or within half a minute if its host fails.
type Claim struct {
	Items []ClaimedItem

	c          *Client
	id         uint64
	presence   *bus.Subscription // proves to the pipeline that the holder lives
	cancel     context.CancelFunc
	keepalives sync.WaitGroup
}

// Claim takes up to n items from a sink, 100 at most; nil when there was none within a second.
func (c *Client) Claim(ctx context.Context, stream string, n int) (*Claim, error) {
	holds, err := c.b.Subscribe(c.b.NewInbox(), func(m *bus.Msg) { _ = c.b.Respond(m, nil) }) // a lost answer is requested again
	if err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "take from %s: %w", stream, err)
	}
	var w claimResponse
	if err := c.call(ctx, "take", request{ID: stream, Workers: n, Holder: holds.Subject()}, &w); err != nil || w.ID == 0 {
		_ = holds.Unsubscribe() // fails only on a closed connection, as below
		return nil, err
	}
	l := &Claim{Items: w.Items, c: c, id: w.ID, presence: holds}
	keeping, cancel := context.WithCancel(context.WithoutCancel(ctx))
	l.cancel = cancel
	l.keepalives.Go(bus.Guard(func() { l.keepAlive(keeping, time.Duration(w.For)*time.Millisecond/3) }))
	for i := range l.Items {
		it := &l.Items[i]
		if it.BodyRef == nil {
			continue
		}
		body, err := pull(ctx, c.exchange, *it.BodyRef)
		if err != nil {
			return nil, errors.Join(err, l.Nak(context.WithoutCancel(ctx)))
		}
		it.Body, it.BodyRef = body, nil
	}
	return l, nil
}

// keepAlive extends the claim. A missing answer is no reason to stop, because the pipeline may be restarting; a closed
// connection is.
func (l *Claim) keepAlive(ctx context.Context, every time.Duration) {
	for bus.Sleep(ctx, every) == nil {
		err := l.c.call(ctx, "keep", request{Seqs: []uint64{l.id}}, nil)
		if errors.Is(err, errClaimExpired) || l.c.b.Closed() {
			return
		}
	}
}

// Ack completes the items. It fails with bus.ErrNotFound when the claim has expired.
func (l *Claim) Ack(ctx context.Context) error { return l.settle(ctx, "taken") }

// Nak returns the items to the sink.
func (l *Claim) Nak(ctx context.Context) error { return l.settle(ctx, "given-back") }

func (l *Claim) settle(ctx context.Context, op string) error {
	l.cancel()
	l.keepalives.Wait()
	defer func() { _ = l.presence.Unsubscribe() }()
	return l.c.call(ctx, op, request{Seqs: []uint64{l.id}}, nil)
}
