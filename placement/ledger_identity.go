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

	"github.com/nats-io/nuid"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/bus/wire"
	"troupe/nodes/protocol"
	"troupe/placement/internal/text"
)

// identity says which ledger this is, and from where on it is complete. It tells a reservation that has ended from one
// that was forgotten, when an agent runs workers under a token that no record has:
//
//   - A token from Born up to the newest was granted by this ledger, which has every grant since. No record: it has ended.
//   - A token below Born was granted by a ledger that was lost or damaged, or before there was an identity. No record:
//     nobody knows.
//   - A token above the newest was granted by a later state of this ledger, which was lost since. No record: nobody knows.
//
// What nobody knows is adopted. Where a ledger is found to be damaged it gets another identity.
type ledgerIdentity struct {
	ID     string `msgpack:"id"`
	Born   uint64 `msgpack:"born"`             // the first token that absence says something about
	Offset uint64 `msgpack:"offset,omitempty"` // tokens are revisions plus this; it grows when agents know greater tokens

	Doubt  string    `msgpack:"doubt,omitempty"`  // what is wrong; nothing is granted until that is resolved
	Awaits []string  `msgpack:"awaits,omitempty"` // nodes that have to report what runs on them first
	Since  time.Time `msgpack:"since,omitempty"`  // of the doubt
}

const identityKey = "ledger"

// tokenSlack is by how much tokens leap when a ledger has lost something: what it granted after the state that is left had
// lower tokens than that, so that they are below Born too, however late the nodes report them.
const tokenGap = 1 << 20

// mark is what is kept of the ledger in a second place: a bucket of its own, written after each checkpoint. A ledger that
// is missing, another, or behind its mark has lost something. A mark that is missing says nothing.
type watermark struct {
	Ledger string   `msgpack:"ledger"`
	Epoch  uint64   `msgpack:"epoch"`
	Round  uint64   `msgpack:"round"` // the last round that the checkpoint covers
	Sum    uint64   `msgpack:"sum"`   // of the keys after it
	Nodes  []string `msgpack:"nodes,omitempty"`
}

const (
	watermarkKey   = "mark"
	watermarkBytes = 4 << 20
)

// marker writes the mark. A checkpoint owns it while it is under way.
type watermarkStore struct {
	kv       *kv.Bucket
	revision uint64 // of the mark that is there; zero: none
}

func openWatermark(ctx context.Context, cfg Config) (*kv.Bucket, error) {
	return kv.Open(ctx, cfg.Bus, kv.Config{Bucket: watermarkBucket, Replicas: cfg.Replicas, MaxBytes: watermarkBytes})
}

// read is the mark; nil if there is none. One that cannot be read is none either.
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

// write replaces the mark, unless a later leader has. A mark that is not written is made up for by the next: the ledger is
// only less well guarded meanwhile.
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

// summed reports whether a key belongs to the sum of all keys: what rounds write.
func isSummedKey(key string) bool {
	kind, _, _ := strings.Cut(key, ".")
	return kind == "reservation" || kind == "node" || kind == "cordon" || key == rulesKey || key == identityKey
}

// sumOf is a key's part in the sum of all keys, which is the same in whatever order they came.
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

// inspect says what is wrong with a ledger as it was read; empty if nothing is. legacy is a ledger that was written by a
// version that kept no identity: its records may be complete or not.
func (c *ledgerContents) inspect(w *watermark) (wrong string, legacy bool) {
	switch {
	case c.identity == nil && w != nil:
		return fmt.Sprintf("the ledger is missing or empty: its mark names ledger %s at round %d", w.Ledger, w.Round), false
	case c.identity == nil:
		return c.damage, c.damage == "" && c.notEmpty
	case w != nil && w.Ledger != c.identity.ID:
		return fmt.Sprintf("the ledger is another than its mark names: %s instead of %s", c.identity.ID, w.Ledger), false
	case w != nil && c.round < w.Round:
		return fmt.Sprintf("the ledger is older than its mark: it ends at round %d, and was at round %d", c.round, w.Round), false
	case c.damage != "":
		return c.damage, false
	case w != nil && w.Round == c.round && c.sum != nil && *c.sum != w.Sum:
		return fmt.Sprintf("the ledger's keys are not those that it had at round %d", c.round), false
	}
	return "", false
}

// beginLedger decides what a leader believes of the ledger as it was read, and enters what it has to write about that into the
// first round: after it the ledger has an identity.
func (t *leaderTerm) checkLedger(c *ledgerContents, w *watermark, now time.Time) {
	wrong, legacy := c.inspect(w)
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
		t.resolveDoubt() // if no node was ever there
	case legacy:
		t.identity = ledgerIdentity{ID: nuid.Next(), Born: t.newestToken() + 1}
		t.unconfirmAll("it was written by a version that kept no evidence of it")
		t.writeIdentity()
	case c.identity == nil:
		t.identity = ledgerIdentity{ID: nuid.Next(), Born: t.newestToken() + 1}
		t.writeIdentity()
	default:
		t.ledger.enableWatermark(t.identity.ID, t.identity.Awaits)
	}
	if t.identity.Doubt != "" {
		t.cfg.Logger.Error("placement: nothing is granted", "error", t.ledgerError())
	}
}

// newest is a token that no grant up to now exceeds.
func (t *leaderTerm) newestToken() uint64 { return t.ledger.newestRevision() + t.identity.Offset }

// doubt stops the granting until the nodes have reported what runs on them. The ledger gets another identity, so that
// what it does not have counts as forgotten rather than as ended; and what it has must be confirmed.
func (t *leaderTerm) distrust(why string, nodes []string, now time.Time) {
	nodes = append(nodes, t.identity.Awaits...)
	slices.Sort(nodes)
	if t.identity.Doubt != "" && t.identity.Doubt != why {
		why = t.identity.Doubt + "; " + why
	}
	t.identity.Offset += tokenGap
	t.identity = ledgerIdentity{
		ID: nuid.Next(), Born: t.newestToken() + 1, Offset: t.identity.Offset, Doubt: text.Truncate(why, 4*text.ClipLimit), Awaits: slices.Compact(nodes), Since: now.UTC(),
	}
	t.unconfirmAll("the ledger had lost something: " + why)
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

// ledgerError is why nothing is granted; nil if grants are made.
func (t *leaderTerm) ledgerError() error {
	if t.identity.Doubt == "" {
		return nil
	}
	return &LedgerError{Why: t.identity.Doubt, Awaits: clipList(t.awaitedNodes())}
}

// missing is the nodes that have not reported yet what runs on them.
func (t *leaderTerm) awaitedNodes() []string {
	var missing []string
	for _, name := range t.identity.Awaits {
		if n := t.nodes.byName[name]; !t.reported[name] && (n == nil || !n.verified || !n.report.RunningComplete) {
			missing = append(missing, name)
		}
	}
	return missing
}

// account notes that a node has said all that runs on it, or that nothing of it is left.
func (t *leaderTerm) markReported(node string) {
	if t.identity.Doubt != "" {
		t.reported[node] = true
	}
}

// settleDoubt ends the doubt when every node has reported.
func (t *leaderTerm) resolveDoubt() {
	if t.identity.Doubt != "" && len(t.awaitedNodes()) == 0 {
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

// acceptLedger is an operator who takes the ledger as it is. Only operators may.
func (t *leaderTerm) handleAcceptLedger(c *call) {
	if c.namespace != "" {
		t.answerErr(c, bus.Errorf(bus.CodeRefused, "the ledger is accepted by an operator, not from within namespace %q", c.namespace))
		return
	}
	if t.identity.Doubt != "" {
		t.trustLedger("an operator has accepted the ledger as it is")
	}
	t.answerCall(c, &answer{Kind: answerDone, Ledger: t.ledgerStatus()})
}

// LedgerStatus is whether the ledger is believed.
type LedgerStatus struct {
	ID     string    `json:"id" msgpack:"id"`
	Doubt  string    `json:"doubt,omitempty" msgpack:"doubt,omitempty"`   // why nothing is granted; empty: grants are made
	Awaits []string  `json:"awaits,omitempty" msgpack:"awaits,omitempty"` // the nodes that have to report what runs on them
	Since  time.Time `json:"since,omitzero" msgpack:"since,omitempty"`    // of the doubt
	// Unconfirmed is how many reservations neither an agent nor a holder has confirmed yet.
	Unconfirmed int `json:"unconfirmed,omitempty" msgpack:"unconfirmed,omitempty"`
}

// String is the status for a person.
func (s LedgerStatus) String() string {
	if s.Doubt == "" {
		return "trusted"
	}
	return (&LedgerError{Why: s.Doubt, Awaits: s.Awaits}).Error()
}

func (t *leaderTerm) ledgerStatus() *LedgerStatus {
	s := &LedgerStatus{ID: t.identity.ID, Doubt: t.identity.Doubt, Since: t.identity.Since}
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

// nodesOf is the names behind the seats among the keys.
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
