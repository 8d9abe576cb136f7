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
type ReservationRef struct {
	ID    string `json:"id" msgpack:"id"`
	Token uint64 `json:"token" msgpack:"token"`
}

// Confirm says that the caller still holds reservations of its namespace, and returns those that the ledger does not have
// under these tokens. A leader that does not trust its ledger alone, because something in it was lost or because it was
// written by a version that kept no evidence, drops reservations that no agent runs and nobody confirms within two leases
// of a node (30 s). Whoever holds reservations without workers confirms them every few seconds. To repeat it is harmless.
func (c *Client) Confirm(ctx context.Context, held []ReservationRef) (unknown []ReservationRef, err error) {
	ctx, cancel := withTimeout(ctx)
	defer cancel()
	for part := range slices.Chunk(held, maxConfirm) {
		a, err := c.call(ctx, &message{Verb: verbConfirm, Refs: part}, nil)
		if err != nil {
			return nil, wrap("confirm", err)
		}
		unknown = append(unknown, a.Unknown...)
	}
	return unknown, nil
}

// confirmMost is how many reservations one message confirms.
const maxConfirm = 1024

// Ledger is whether the placement service trusts its ledger, and why not.
func (c *Client) Ledger(ctx context.Context) (LedgerStatus, error) { return c.ledger(ctx, verbLedger) }

// AcceptLedger makes the placement service grant again though its ledger has lost something and nodes have not reported
// what runs on them. Devices of such a node are still granted only after it has reported. Only an operator may.
func (c *Client) AcceptLedger(ctx context.Context) (LedgerStatus, error) {
	return c.ledger(ctx, verbAccept)
}

func (c *Client) ledger(ctx context.Context, v verb) (LedgerStatus, error) {
	ctx, cancel := withTimeout(ctx)
	defer cancel()
	a, err := c.call(ctx, &message{Verb: v}, nil)
	if err != nil {
		return LedgerStatus{}, wrap("ledger", err)
	}
	if a.Ledger == nil {
		return LedgerStatus{}, bus.Errorf(bus.CodeMalformed, "an answer about the ledger without one")
	}
	return *a.Ledger, nil
}

// confirmCall is a holder who confirms. Whoever asks again gets the same answer.
func (t *leaderTerm) handleConfirm(c *call) {
	a := &answer{Kind: answerDone}
	for _, h := range c.Refs {
		e := t.records[h.ID]
		if e == nil || e.ending || e.Token != h.Token || c.namespace != "" && e.Namespace != c.namespace {
			a.Unknown = append(a.Unknown, h)
			continue
		}
		t.confirm(e)
	}
	t.answerCall(c, a)
}

// confirm takes the reservation for what it says from now on.
func (t *leaderTerm) confirm(e *ledgerEntry) {
	if e.Unconfirmed == "" || e.ending {
		return
	}
	next := e.storedRecord
	next.Unconfirmed, next.Adopted = "", false
	t.updateRecord(e, next, Event{})
}

// unconfirmAll makes every reservation need to be confirmed.
func (t *leaderTerm) unconfirmAll(why string) {
	for _, id := range slices.Sorted(maps.Keys(t.records)) {
		e := t.records[id]
		if e.ending || e.Unconfirmed != "" {
			continue
		}
		next := e.storedRecord
		e.lastConfirmed = t.planner.Now
		next.Unconfirmed = text.Truncate(why, 2*text.ClipLimit)
		t.updateRecord(e, next, Event{})
		t.anyUnconfirmed = true
	}
}

// reviewUnconfirmed drops the reservations that all their nodes have reported not to run, and that nobody has confirmed
// within two leases.
func (t *leaderTerm) dropUnconfirmed(now time.Time) {
	if !t.anyUnconfirmed || !t.nodes.leasesSeen || now.Before(t.nodes.judgeFrom) {
		return
	}
	t.anyUnconfirmed = false
	for _, id := range slices.Sorted(maps.Keys(t.records)) {
		e := t.records[id]
		if e.Unconfirmed == "" || e.ending {
			continue
		}
		t.anyUnconfirmed = true
		if now.Sub(e.lastConfirmed) > 2*t.cfg.NodeLease && !slices.ContainsFunc(e.Nodes(), t.mayRunMore) {
			t.drop(e, fmt.Sprintf("no agent runs it, and its holder has not confirmed it within %v", 2*t.cfg.NodeLease))
		}
	}
}

// mayRun reports whether a node may run what it has not reported: it is there, and has not said all that runs on it. A
// node that is not there has nothing.
func (t *leaderTerm) mayRunMore(name string) bool {
	n := t.nodes.byName[name]
	return n != nil && !n.gone && (n.report == nil || !n.verified || !n.report.RunningComplete)
}

// drop ends a reservation that is only in the ledger.
func (t *leaderTerm) drop(e *ledgerEntry, why string) {
	why = fmt.Sprintf("%s; %s", e.Unconfirmed, why)
	t.cfg.Logger.Warn("placement: a reservation is dropped", "id", e.ID, "namespace", e.Namespace, "holder", e.Holder, "why", why)
	t.emit(reservationEvent(e, protocol.EventReservationDropped, "reservation "+e.ID+" is dropped: "+why))
	t.endReservation(e, Event{Kind: EventDropped, Why: why}, nil)
}
