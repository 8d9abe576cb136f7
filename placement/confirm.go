package placement

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"troupe/bus"
	"troupe/nodes/protocol"
	"troupe/placement/internal/text"
)

// Holding names a grant by its reservation and token.
type Holding struct {
	ID    string `json:"id" msgpack:"id"`
	Token uint64 `json:"token" msgpack:"token"`
}

// Confirm says that the caller still holds reservations of its namespace, and returns those that the ledger does not have
// under these tokens. A leader that does not trust its ledger alone, because something in it was lost or because it was
// written by a version that kept no evidence, drops reservations that no agent runs and nobody confirms within two leases
// of a node (30 s). Whoever holds reservations without workers confirms them every few seconds. To repeat it is harmless.
func (c *Client) Confirm(ctx context.Context, held []Holding) (unknown []Holding, err error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	for part := range slices.Chunk(held, confirmMost) {
		a, err := c.do(ctx, &message{Verb: verbConfirm, Held: part}, nil)
		if err != nil {
			return nil, wrap("confirm", err)
		}
		unknown = append(unknown, a.Unknown...)
	}
	return unknown, nil
}

// confirmMost is how many reservations one message confirms.
const confirmMost = 1024

// Ledger is whether the placement service trusts its ledger, and why not.
func (c *Client) Ledger(ctx context.Context) (LedgerStatus, error) { return c.ledger(ctx, verbLedger) }

// AcceptLedger makes the placement service grant again though its ledger has lost something and nodes have not reported
// what runs on them. Devices of such a node are still granted only after it has reported. Only an operator may.
func (c *Client) AcceptLedger(ctx context.Context) (LedgerStatus, error) {
	return c.ledger(ctx, verbAccept)
}

func (c *Client) ledger(ctx context.Context, v verb) (LedgerStatus, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	a, err := c.do(ctx, &message{Verb: v}, nil)
	if err != nil {
		return LedgerStatus{}, wrap("ledger", err)
	}
	if a.Ledger == nil {
		return LedgerStatus{}, bus.Errorf(bus.CodeMalformed, "an answer about the ledger without one")
	}
	return *a.Ledger, nil
}

// confirmCall is a holder who confirms. Whoever asks again gets the same answer.
func (r *reign) confirmCall(c *call) {
	a := &answer{Kind: answerDone}
	for _, h := range c.Held {
		e := r.held[h.ID]
		if e == nil || e.ending || e.Token != h.Token || c.namespace != "" && e.Namespace != c.namespace {
			a.Unknown = append(a.Unknown, h)
			continue
		}
		r.confirm(e)
	}
	r.finish(c, a)
}

// confirm takes the reservation for what it says from now on.
func (r *reign) confirm(e *entry) {
	if e.Unconfirmed == "" || e.ending {
		return
	}
	next := e.stored
	next.Unconfirmed, next.Adopted = "", false
	r.rewrite(e, next, Event{})
}

// unconfirmAll makes every reservation need to be confirmed.
func (r *reign) unconfirmAll(why string) {
	for _, id := range slices.Sorted(maps.Keys(r.held)) {
		e := r.held[id]
		if e.ending || e.Unconfirmed != "" {
			continue
		}
		next := e.stored
		e.supported = r.book.Now
		next.Unconfirmed = text.Truncate(why, 2*text.ClipLimit)
		r.rewrite(e, next, Event{})
		r.anyUnconfirmed = true
	}
}

// reviewUnconfirmed drops the reservations that all their nodes have reported not to run, and that nobody has confirmed
// within two leases.
func (r *reign) reviewUnconfirmed(now time.Time) {
	if !r.anyUnconfirmed || !r.roster.seen || now.Before(r.roster.judgeAt) {
		return
	}
	r.anyUnconfirmed = false
	for _, id := range slices.Sorted(maps.Keys(r.held)) {
		e := r.held[id]
		if e.Unconfirmed == "" || e.ending {
			continue
		}
		r.anyUnconfirmed = true
		if now.Sub(e.supported) > 2*r.cfg.NodeLease && !slices.ContainsFunc(e.Nodes(), r.mayRun) {
			r.drop(e, fmt.Sprintf("no agent runs it, and its holder has not confirmed it within %v", 2*r.cfg.NodeLease))
		}
	}
}

// mayRun reports whether a node may run what it has not reported: it is there, and has not said all that runs on it. A
// node that is not there has nothing.
func (r *reign) mayRun(name string) bool {
	m := r.roster.members[name]
	return m != nil && !m.over && (m.report == nil || !m.proven || !m.report.RunningComplete)
}

// drop ends a reservation that is only in the ledger.
func (r *reign) drop(e *entry, why string) {
	why = fmt.Sprintf("%s; %s", e.Unconfirmed, why)
	r.cfg.Logger.Warn("placement: a reservation is dropped", "id", e.ID, "namespace", e.Namespace, "holder", e.Holder, "why", why)
	r.emit(reservationEvent(e, protocol.EventReservationDropped, "reservation "+e.ID+" is dropped: "+why))
	r.end(e, Event{Kind: EventDropped, Why: why}, nil)
}
