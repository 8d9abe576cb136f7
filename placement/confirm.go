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

// ReservationRef names a grant by its reservation and token.
type ReservationRef struct {
	ID    string `json:"id" msgpack:"id"`
	Token uint64 `json:"token" msgpack:"token"`
}

// Confirm states that the caller still holds reservations of its namespace, and returns those that the ledger does not
// have under these tokens. A leader whose ledger has lost data, or was written by a version without identity, drops
// reservations that no agent runs and no holder confirms within two node leases (30 s). Holders of reservations without
// workers confirm them every few seconds. Repetition is harmless.
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

// maxConfirm is the number of reservations that one message confirms.
const maxConfirm = 1024

// Ledger returns whether the placement service trusts its ledger.
func (c *Client) Ledger(ctx context.Context) (LedgerStatus, error) { return c.ledger(ctx, verbLedger) }

// AcceptLedger makes the placement service grant again although its ledger has lost data and some nodes have not
// reported. Devices of those nodes are still granted only after they have reported. Only operators may.
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
		return LedgerStatus{}, bus.Errorf(bus.CodeMalformed, "the answer contains no ledger status")
	}
	return *a.Ledger, nil
}

// handleConfirm is idempotent: a repetition gets the same answer.
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

// confirm marks the reservation as confirmed.
func (t *leaderTerm) confirm(e *ledgerEntry) {
	if e.Unconfirmed == "" || e.ending {
		return
	}
	next := e.storedRecord
	next.Unconfirmed, next.Adopted = "", false
	t.updateRecord(e, next, Event{})
}

// unconfirmAll marks every reservation as unconfirmed.
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

// dropUnconfirmed drops the reservations that none of their nodes runs and that no holder has confirmed within two node
// leases.
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

// mayRunMore reports whether a node may run workers that it has not reported: it is present and has not sent a complete
// report.
func (t *leaderTerm) mayRunMore(name string) bool {
	n := t.nodes.byName[name]
	return n != nil && !n.gone && (n.report == nil || !n.verified || !n.report.RunningComplete)
}

// drop ends a reservation that only the ledger knows.
func (t *leaderTerm) drop(e *ledgerEntry, why string) {
	why = fmt.Sprintf("%s; %s", e.Unconfirmed, why)
	t.cfg.Logger.Warn("placement: a reservation is dropped", "id", e.ID, "namespace", e.Namespace, "holder", e.Holder, "why", why)
	t.emit(reservationEvent(e, protocol.EventReservationDropped, "reservation "+e.ID+" is dropped: "+why))
	t.endReservation(e, Event{Kind: EventDropped, Why: why}, nil)
}
