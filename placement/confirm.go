package placement

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/nodes/protocol"
	"troupe/placement/internal/text"
)

// ReservationRef names a grant by its reservation and token.
type ReservationRef struct {
	ID    string `json:"id" msgpack:"id"`
	Token uint64 `json:"token" msgpack:"token"`
}

// Confirm states that the caller still holds reservations of its namespace, and returns those that the ledger does not
// have under these tokens. A leader whose ledger has lost data drops
// reservations that no agent runs and no holder confirms within Config.Unclaimed. Holders of reservations without
// workers confirm them every few seconds. Repetition is harmless.
func (c *Client) Confirm(ctx context.Context, held []ReservationRef) (unknown []ReservationRef, err error) {
	for part := range slices.Chunk(held, maxConfirm) {
		more, err := c.confirm(ctx, &message{Verb: verbConfirm, Refs: part})
		if err != nil {
			return nil, err
		}
		unknown = append(unknown, more...)
	}
	return unknown, nil
}

// Claim is Confirm of everything that this client was granted and has not released, and of more: those that the ledger has lost are stored
// again as they were granted. It returns those that cannot be: they have ended, or others have their devices now.
func (c *Client) Claim(ctx context.Context, more []ReservationRef) (unknown []ReservationRef, err error) {
	c.mu.Lock()
	all := maps.Clone(c.granted)
	c.mu.Unlock()
	for id, g := range all {
		ref := ReservationRef{ID: id, Token: g.token}
		ended, err := c.confirm(ctx, &message{Verb: verbConfirm, Refs: []ReservationRef{ref}, Claim: g.record})
		if err != nil {
			return nil, err
		}
		if len(ended) > 0 {
			c.forget(ref)
			unknown = append(unknown, ref)
		}
	}
	more = slices.DeleteFunc(slices.Clone(more), func(r ReservationRef) bool { return all[r.ID].token == r.Token })
	ended, err := c.Confirm(ctx, more)
	return append(unknown, ended...), err
}

func (c *Client) confirm(ctx context.Context, m *message) ([]ReservationRef, error) {
	ctx, cancel := withTimeout(ctx)
	defer cancel()
	a, err := c.call(ctx, m, nil)
	if err != nil {
		return nil, wrap("confirm", err)
	}
	return a.Unknown, nil
}

// grantedRecord is a reservation as the service has answered it.
type grantedRecord struct {
	token  uint64
	record wire.Raw
}

// forget forgets a reservation that has ended.
func (c *Client) forget(r ReservationRef) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.granted[r.ID].token == r.Token {
		delete(c.granted, r.ID)
	}
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
	if len(c.Refs) == 1 && c.Claim != nil && t.restoreClaim(c) {
		return
	}
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

// restoreClaim stores a reservation as its holder was granted it, if the ledger has lost it or knows it from agents only, and answers when it
// is stored. It reports whether it does.
func (t *leaderTerm) restoreClaim(c *call) bool {
	var next storedRecord
	ref, old := c.Refs[0], t.records[c.Refs[0].ID]
	switch err := wire.Unmarshal(c.Claim, &next); {
	case err != nil || next.ID != ref.ID || next.Version != recordVersion || c.namespace != "" && next.Namespace != c.namespace:
		return false
	case old != nil && (old.ending || !old.Adopted || old.Token != ref.Token || old.Namespace != next.Namespace):
		return false
	case old == nil && (t.planner.Now.Sub(t.startedAt) > t.cfg.Unclaimed || !t.lostByLedger(&protocol.RunningGrant{Reservation: ref.ID, Token: ref.Token, Namespace: next.Namespace}, nil)):
		return false
	}
	next.Token, next.State, next.Why, next.Unconfirmed, next.Adopted, next.Ended = ref.Token, StateGranted, "", "", false, nil
	e := &ledgerEntry{storedRecord: next, lastConfirmed: t.planner.Now}
	value, err := e.encode()
	if err != nil {
		return false
	}
	if old != nil {
		t.planner.Release(old.ID)
	}
	if err := t.planner.Restore(e.Reservation); err != nil {
		t.cfg.Logger.Error("placement: a reservation cannot be restored from its holder's claim", "id", ref.ID, "holder", e.Holder, "error", err)
		if old != nil {
			_ = t.planner.Restore(old.Reservation) // restores the previous state
		}
		return false
	}
	e.encoded = value
	t.records[e.ID] = e
	const why = "restored from the claim of its holder: the ledger had lost it"
	t.round.put(reservationKey(e.ID), value, func(uint64, time.Time) {
		t.cfg.Logger.Warn("placement: a reservation is "+why, "id", e.ID, "token", e.Token, "holder", e.Holder)
		t.emit(reservationEvent(e, protocol.EventReservationAdopted, "reservation "+e.ID+" is "+why))
		t.answerCall(c, &answer{Kind: answerDone})
	}, func(err error) { t.answerErr(c, err) })
	return true
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

// dropUnconfirmed drops the reservations that none of their nodes runs and that no holder has confirmed in time.
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
		if now.Sub(e.lastConfirmed) > t.cfg.Unclaimed && !slices.ContainsFunc(e.Nodes(), t.mayRunMore) {
			t.drop(e, fmt.Sprintf("no agent runs it, and its holder has not confirmed it within %v", t.cfg.Unclaimed))
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
