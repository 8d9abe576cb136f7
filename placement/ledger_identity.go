package placement

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strings"
	"time"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/bus/wire"
	"troupe/nodes/protocol"
	"troupe/placement/internal/text"
)

// ledgerIdentity identifies a ledger and the tokens for which it is complete. It tells an ended reservation from a lost
// one when an agent runs workers under a token without a record:
//
//   - A token from Born to the newest was granted by this ledger, which contains every grant since. No record: it has ended.
//   - A token below Born was granted by a ledger that was lost or damaged. No record: unknown.
//   - A token in a gap, or above the newest, was granted by a later state of this ledger, which was lost. No record: unknown. Every
//     term begins with a gap up to the time of its start: a ledger grants less than one token a microsecond.
//
// Unknown grants are adopted. A ledger that is found to be damaged gets a new identity.
type ledgerIdentity struct {
	ID     string `msgpack:"id"`
	Born   uint64 `msgpack:"born"`             // the first token for which a missing record means that the grant has ended
	Offset uint64 `msgpack:"offset,omitempty"` // token = revision + Offset; it grows when agents know greater tokens

	Gaps []tokenRange `msgpack:"gaps,omitempty"` // tokens that no term of this ledger has granted, the last ones

	Doubt  string    `msgpack:"doubt,omitempty"`  // what is wrong; nothing is granted until that is resolved
	Awaits []string  `msgpack:"awaits,omitempty"` // nodes that must report first
	Since  time.Time `msgpack:"since,omitempty"`  // of the doubt
}

// tokenRange is tokens from the first to the last.
type tokenRange struct {
	First uint64 `msgpack:"first"`
	Last  uint64 `msgpack:"last"`
}

const gapsMost = 32 // gaps that are remembered; the tokens up to an older one are unknown

// startTerm begins a term after a newest token, with a gap up to the time.
func (i *ledgerIdentity) startTerm(newest uint64, now time.Time) {
	begin := uint64(max(now.UnixMicro(), 0)) //nolint:gosec // not negative
	if begin <= newest {
		return
	}
	i.Offset += begin - newest
	i.Gaps = append(slices.Clone(i.Gaps), tokenRange{newest + 1, begin})
	if len(i.Gaps) > gapsMost {
		i.Born, i.Gaps = i.Gaps[0].Last+1, i.Gaps[1:]
	}
}

// lostLater reports whether a token was granted by a later state of the ledger, which was lost.
func (i *ledgerIdentity) lostLater(token, newest uint64) bool {
	return token > newest || token >= i.Born && slices.ContainsFunc(i.Gaps, func(g tokenRange) bool { return g.First <= token && token <= g.Last })
}

const identityKey = "ledger"

// tokenGap is added to tokens when a ledger has lost data. Grants of the lost part had smaller tokens, so they are
// below Born however late nodes report them.
const tokenGap = 1 << 20

// watermark is a second record of the ledger's state in a bucket of its own, written after each checkpoint. A ledger
// that is missing, has another identity, or is behind its watermark has lost data. A missing watermark shows nothing.
type watermark struct {
	Ledger string   `msgpack:"ledger"`
	Epoch  uint64   `msgpack:"epoch"`
	Round  uint64   `msgpack:"round"` // the last round that the checkpoint contains
	Sum    uint64   `msgpack:"sum"`   // of the keys after it
	Nodes  []string `msgpack:"nodes,omitempty"`
}

const (
	watermarkKey   = "mark"
	watermarkBytes = 4 << 20
)

// watermarkStore writes the watermark. A running checkpoint owns it.
type watermarkStore struct {
	kv       *kv.Bucket
	revision uint64 // of the stored watermark; zero: none
}

func openWatermark(ctx context.Context, cfg Config) (*kv.Bucket, error) {
	return kv.Open(ctx, cfg.Bus, kv.Config{Bucket: watermarkBucket, Replicas: cfg.Replicas, MaxBytes: watermarkBytes})
}

// read returns the watermark; nil if there is none or it cannot be decoded.
func (w *watermarkStore) read(ctx context.Context) (*watermark, error) {
	entry, err := w.kv.Get(ctx, watermarkKey)
	if errors.Is(err, bus.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	w.revision = entry.Revision
	found := new(watermark)
	if wire.Unmarshal(entry.Value, found) != nil {
		return nil, nil
	}
	return found, nil
}

// write replaces the watermark, unless a later leader has. If it fails, the next checkpoint writes one.
func (w *watermarkStore) write(ctx context.Context, value []byte, epoch uint64) error {
	for {
		revision, err := w.put(ctx, value)
		if err == nil {
			w.revision = revision
			return nil
		}
		if !errors.Is(err, bus.ErrConflict) && !errors.Is(err, bus.ErrExists) {
			return err
		}
		there, err := w.read(ctx)
		if err != nil || there != nil && there.Epoch > epoch {
			return err
		}
		if there == nil {
			w.revision = 0
		}
	}
}

func (w *watermarkStore) put(ctx context.Context, value []byte) (uint64, error) {
	if w.revision == 0 {
		return w.kv.Create(ctx, watermarkKey, value)
	}
	return w.kv.Update(ctx, watermarkKey, value, w.revision)
}

// DistrustLedger makes the next leader doubt the ledger, because it was replaced by an older state: nothing is granted until every known
// node has reported what it runs, and reservations that nothing confirms are dropped. No leader may be running.
func DistrustLedger(ctx context.Context, b *bus.Bus, why string) error {
	bucket, err := openWatermark(ctx, Config{Bus: b, Replicas: bus.AllReplicas})
	if err != nil {
		return err
	}
	value, err := wire.Marshal(watermark{Ledger: why})
	if err == nil {
		_, err = bucket.Put(ctx, watermarkKey, value)
	}
	return err
}

// isSummedKey reports whether rounds write this key, so that the sum contains it.
func isSummedKey(key string) bool {
	kind, _, _ := strings.Cut(key, ".")
	return kind == "reservation" || kind == "node" || kind == "cordon" || key == rulesKey || key == identityKey
}

// keySum returns the part of a key in the sum of all keys, which does not depend on their order.
func keySum(key string) uint64 {
	if !isSummedKey(key) {
		return 0
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(key)) // never fails
	x := h.Sum64()
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	return x ^ x>>33
}

// inspect returns what is wrong with the ledger; empty if nothing is.
func (c *ledgerContents) inspect(w *watermark) (wrong string) {
	switch {
	case c.identity == nil && w != nil && w.Round == 0: // of DistrustLedger
		return "the ledger is missing or empty: " + w.Ledger
	case c.identity == nil && w != nil:
		return fmt.Sprintf("the ledger is missing or empty: its watermark names ledger %s at round %d", w.Ledger, w.Round)
	case c.identity == nil && c.damage == "" && c.notEmpty:
		return "the ledger has records and no identity"
	case w != nil && w.Ledger != c.identity.ID:
		return fmt.Sprintf("the ledger has identity %s, and its watermark names %s", c.identity.ID, w.Ledger)
	case w != nil && c.round < w.Round:
		return fmt.Sprintf("the ledger is older than its watermark: it ends at round %d, and the watermark is at round %d", c.round, w.Round)
	case c.damage != "":
		return c.damage
	case w != nil && w.Round == c.round && c.sum != w.Sum:
		return fmt.Sprintf("the ledger's keys are not those that it had at round %d", c.round)
	}
	return ""
}

// checkLedger decides whether the leader trusts the ledger, and adds an identity to the first round if there is none.
func (t *leaderTerm) checkLedger(c *ledgerContents, w *watermark, now time.Time) {
	wrong := c.inspect(w)
	if c.identity != nil {
		t.identity = *c.identity
	}
	switch {
	case wrong != "":
		nodes := slices.Collect(maps.Keys(c.ranks))
		if w != nil {
			nodes = append(nodes, w.Nodes...)
		}
		t.distrust(wrong, nodes, now)
	case c.identity == nil:
		t.identity = ledgerIdentity{ID: bus.NewID(), Born: t.newestToken() + 1}
		t.writeIdentity()
	default:
		t.identity.startTerm(t.newestToken(), now)
		t.writeIdentity()
	}
	if t.identity.Doubt != "" {
		t.cfg.Logger.Error("placement: nothing is granted", "error", t.ledgerError())
	}
}

// newestToken returns an upper bound of the tokens of all grants.
func (t *leaderTerm) newestToken() uint64 { return t.ledger.newestRevision() + t.identity.Offset }

// distrust stops grants until the nodes have reported what runs on them. The ledger gets a new identity, so that
// missing records count as lost rather than ended, and existing ones must be confirmed.
func (t *leaderTerm) distrust(why string, nodes []string, now time.Time) {
	nodes = append(nodes, t.identity.Awaits...)
	slices.Sort(nodes)
	if t.identity.Doubt != "" && t.identity.Doubt != why {
		why = t.identity.Doubt + "; " + why
	}
	t.identity.Offset += tokenGap
	t.identity = ledgerIdentity{
		ID: bus.NewID(), Born: t.newestToken() + 1, Offset: t.identity.Offset, Doubt: text.Truncate(why, 4*text.ClipLimit), Awaits: slices.Compact(nodes), Since: now.UTC(),
	}
	t.unconfirmAll("the ledger has lost data: " + why)
	t.writeIdentity()
	t.emit(protocol.Event{Kind: protocol.EventLedgerDoubt, Text: t.ledgerError().Error()})
}

func (t *leaderTerm) writeIdentity() {
	value, err := wire.Marshal(t.identity)
	if err != nil {
		t.cfg.Logger.Error("placement: the ledger's identity cannot be written", "error", err)
		return
	}
	id, awaits := t.identity.ID, t.identity.Awaits
	t.round.put(identityKey, value, func(uint64, time.Time) { t.ledger.enableWatermark(id, awaits) }, nil)
}

// ledgerError returns why nothing is granted; nil if the ledger is trusted.
func (t *leaderTerm) ledgerError() error {
	if t.identity.Doubt == "" {
		return nil
	}
	return &LedgerError{Why: t.identity.Doubt, Awaits: clipList(t.awaitedNodes())}
}

// awaitedNodes returns the nodes that have not reported yet what runs on them.
func (t *leaderTerm) awaitedNodes() []string {
	var missing []string
	for _, name := range t.identity.Awaits {
		if n := t.nodes.byName[name]; !t.reported[name] && (n == nil || !n.verified || !n.report.RunningComplete) {
			missing = append(missing, name)
		}
	}
	return missing
}

// markReported records that a node has reported everything that runs on it, or has ended in order.
func (t *leaderTerm) markReported(node string) {
	if t.identity.Doubt != "" {
		t.reported[node] = true
	}
}

// resolveDoubt trusts the ledger again once every node has reported, and unknown nodes and holders have had time to come back and to say
// what they hold.
func (t *leaderTerm) resolveDoubt(now time.Time) {
	if t.identity.Doubt != "" && len(t.awaitedNodes()) == 0 && !now.Before(t.nodes.judgeFrom) {
		t.trustLedger("every node has reported what runs on it")
	}
}

func (t *leaderTerm) trustLedger(why string) {
	t.cfg.Logger.Warn("placement: the ledger is trusted again", "why", why, "doubt", t.identity.Doubt)
	t.emit(protocol.Event{Kind: protocol.EventLedgerTrusted, Text: "devices are granted again: " + why})
	t.identity.Doubt, t.identity.Awaits, t.identity.Since = "", nil, time.Time{}
	clear(t.reported)
	t.needsSchedule = true
	t.writeIdentity()
}

// handleAcceptLedger trusts the ledger on behalf of an operator. Only operators may.
func (t *leaderTerm) handleAcceptLedger(c *call) {
	if c.namespace != "" {
		t.answerErr(c, bus.Errorf(bus.CodeRefused, "only operators may accept the ledger, not clients of namespace %q", c.namespace))
		return
	}
	if t.identity.Doubt != "" {
		t.audit(c, protocol.Event{Kind: protocol.ActionLedgerAccepted, Text: "the ledger is trusted as it is, although " + t.identity.Doubt})
		t.trustLedger("an operator has accepted the ledger as it is")
	}
	t.answerCall(c, &answer{Kind: answerDone, Ledger: t.ledgerStatus()})
}

// LedgerStatus is whether the placement service trusts its ledger.
type LedgerStatus struct {
	ID     string    `json:"id" msgpack:"id"`
	Doubt  string    `json:"doubt,omitempty" msgpack:"doubt,omitempty"`   // why nothing is granted; empty: the ledger is trusted
	Awaits []string  `json:"awaits,omitempty" msgpack:"awaits,omitempty"` // nodes that must report what runs on them
	Since  time.Time `json:"since,omitzero" msgpack:"since,omitempty"`    // of the doubt
	// Unconfirmed is the number of reservations that neither an agent nor a holder has confirmed yet.
	Unconfirmed int `json:"unconfirmed,omitempty" msgpack:"unconfirmed,omitempty"`
	// Leader is the ID of the service that leads, and Epoch the number of its term, which grows with every change of the leader.
	Leader string `json:"leader,omitempty" msgpack:"leader,omitempty"`
	Epoch  uint64 `json:"epoch,omitempty" msgpack:"epoch,omitempty"`
}

// String describes the status in one line.
func (s LedgerStatus) String() string {
	if s.Doubt == "" {
		return "trusted"
	}
	return (&LedgerError{Why: s.Doubt, Awaits: s.Awaits}).Error()
}

func (t *leaderTerm) ledgerStatus() *LedgerStatus {
	s := &LedgerStatus{ID: t.identity.ID, Doubt: t.identity.Doubt, Since: t.identity.Since, Leader: t.cfg.ID, Epoch: t.ledger.term.Epoch()}
	if s.Doubt != "" {
		s.Awaits = clipList(t.awaitedNodes())
	}
	for _, e := range t.records {
		if e.Unconfirmed != "" {
			s.Unconfirmed++
		}
	}
	return s
}

// rankedNodes returns the nodes whose rank is among the keys.
func rankedNodes(keys map[string]bool) []string {
	var names []string
	for key := range keys {
		if name, seat := strings.CutPrefix(key, rankKey("")); seat {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}
