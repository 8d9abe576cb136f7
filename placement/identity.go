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
type identity struct {
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
const tokenSlack = 1 << 20

// mark is what is kept of the ledger in a second place: a bucket of its own, written after each checkpoint. A ledger that
// is missing, another, or behind its mark has lost something. A mark that is missing says nothing.
type mark struct {
	Ledger string   `msgpack:"ledger"`
	Epoch  uint64   `msgpack:"epoch"`
	Round  uint64   `msgpack:"round"` // the last round that the checkpoint covers
	Sum    uint64   `msgpack:"sum"`   // of the keys after it
	Nodes  []string `msgpack:"nodes,omitempty"`
}

const (
	markKey   = "mark"
	markBytes = 4 << 20
)

// marker writes the mark. A checkpoint owns it while it is under way.
type marker struct {
	kv       *kv.Bucket
	revision uint64 // of the mark that is there; zero: none
}

func openMark(ctx context.Context, cfg Config) (*kv.Bucket, error) {
	return kv.Open(ctx, cfg.Bus, kv.Config{Bucket: markBucket, Replicas: cfg.Replicas, MaxBytes: markBytes})
}

// read is the mark; nil if there is none. One that cannot be read is none either.
func (m *marker) read(ctx context.Context) (*mark, error) {
	entry, err := m.kv.Get(ctx, markKey)
	if errors.Is(err, bus.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	m.revision = entry.Revision
	found := new(mark)
	if wire.Unmarshal(entry.Value, found) != nil {
		return nil, nil
	}
	return found, nil
}

// write replaces the mark, unless a later leader has. A mark that is not written is made up for by the next: the ledger is
// only less well guarded meanwhile.
func (m *marker) write(ctx context.Context, value []byte, epoch uint64) error {
	for {
		revision, err := m.put(ctx, value)
		if err == nil {
			m.revision = revision
			return nil
		}
		if !errors.Is(err, bus.ErrConflict) && !errors.Is(err, bus.ErrExists) {
			return err
		}
		there, err := m.read(ctx)
		if err != nil || there != nil && there.Epoch > epoch {
			return err
		}
		if there == nil {
			m.revision = 0
		}
	}
}

func (m *marker) put(ctx context.Context, value []byte) (uint64, error) {
	if m.revision == 0 {
		return m.kv.Create(ctx, markKey, value)
	}
	return m.kv.Update(ctx, markKey, value, m.revision)
}

// summed reports whether a key belongs to the sum of all keys: what rounds write.
func summed(key string) bool {
	kind, _, _ := strings.Cut(key, ".")
	return kind == "reservation" || kind == "node" || kind == "cordon" || key == rulesKey || key == identityKey
}

// sumOf is a key's part in the sum of all keys, which is the same in whatever order they came.
func sumOf(key string) uint64 {
	if !summed(key) {
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
func (c *contents) inspect(m *mark) (wrong string, legacy bool) {
	switch {
	case c.identity == nil && m != nil:
		return fmt.Sprintf("the ledger is missing or empty: its mark names ledger %s at round %d", m.Ledger, m.Round), false
	case c.identity == nil:
		return c.broken, c.broken == "" && c.written
	case m != nil && m.Ledger != c.identity.ID:
		return fmt.Sprintf("the ledger is another than its mark names: %s instead of %s", c.identity.ID, m.Ledger), false
	case m != nil && c.round < m.Round:
		return fmt.Sprintf("the ledger is older than its mark: it ends at round %d, and was at round %d", c.round, m.Round), false
	case c.broken != "":
		return c.broken, false
	case m != nil && m.Round == c.round && c.sum != nil && *c.sum != m.Sum:
		return fmt.Sprintf("the ledger's keys are not those that it had at round %d", c.round), false
	}
	return "", false
}

// beginLedger decides what a leader believes of the ledger as it was read, and enters what it has to write about that into the
// first round: after it the ledger has an identity.
func (r *reign) beginLedger(c *contents, m *mark, now time.Time) {
	wrong, legacy := c.inspect(m)
	if c.identity != nil {
		r.identity = *c.identity
	}
	switch {
	case wrong != "":
		nodes := slices.Collect(maps.Keys(c.seats))
		if m != nil {
			nodes = append(nodes, m.Nodes...)
		}
		r.doubt(wrong, nodes, now)
		r.settleDoubt() // if no node was ever there
	case legacy:
		r.identity = identity{ID: nuid.Next(), Born: r.newest() + 1}
		r.unconfirmAll("it was written by a version that kept no evidence of it")
		r.writeIdentity()
	case c.identity == nil:
		r.identity = identity{ID: nuid.Next(), Born: r.newest() + 1}
		r.writeIdentity()
	default:
		r.ledger.marking(r.identity.ID, r.identity.Awaits)
	}
	if r.identity.Doubt != "" {
		r.cfg.Logger.Error("placement: nothing is granted", "error", r.ledgerError())
	}
}

// newest is a token that no grant up to now exceeds.
func (r *reign) newest() uint64 { return r.ledger.newest() + r.identity.Offset }

// doubt stops the granting until the nodes have reported what runs on them. The ledger gets another identity, so that
// what it does not have counts as forgotten rather than as ended; and what it has must be confirmed.
func (r *reign) doubt(why string, nodes []string, now time.Time) {
	nodes = append(nodes, r.identity.Awaits...)
	slices.Sort(nodes)
	if r.identity.Doubt != "" && r.identity.Doubt != why {
		why = r.identity.Doubt + "; " + why
	}
	r.identity.Offset += tokenSlack
	r.identity = identity{
		ID: nuid.Next(), Born: r.newest() + 1, Offset: r.identity.Offset, Doubt: text.Truncate(why, 4*text.ClipLimit), Awaits: slices.Compact(nodes), Since: now.UTC(),
	}
	r.unconfirmAll("the ledger had lost something: " + why)
	r.writeIdentity()
	r.emit(protocol.Event{Kind: protocol.EventLedgerDoubt, Text: r.ledgerError().Error()})
}

func (r *reign) writeIdentity() {
	value, err := wire.Marshal(r.identity)
	if err != nil {
		r.cfg.Logger.Error("placement: the ledger's identity cannot be written", "error", err)
		return
	}
	id, awaits := r.identity.ID, r.identity.Awaits
	r.round.put(identityKey, value, func(uint64, time.Time) { r.ledger.marking(id, awaits) }, nil)
}

// ledgerError is why nothing is granted; nil if grants are made.
func (r *reign) ledgerError() error {
	if r.identity.Doubt == "" {
		return nil
	}
	return &LedgerError{Why: r.identity.Doubt, Awaits: limited(r.missing())}
}

// missing is the nodes that have not reported yet what runs on them.
func (r *reign) missing() []string {
	var missing []string
	for _, name := range r.identity.Awaits {
		if m := r.roster.members[name]; !r.accounted[name] && (m == nil || !m.proven || !m.report.RunningComplete) {
			missing = append(missing, name)
		}
	}
	return missing
}

// account notes that a node has said all that runs on it, or that nothing of it is left.
func (r *reign) account(node string) {
	if r.identity.Doubt != "" {
		r.accounted[node] = true
	}
}

// settleDoubt ends the doubt when every node has reported.
func (r *reign) settleDoubt() {
	if r.identity.Doubt != "" && len(r.missing()) == 0 {
		r.endDoubt("every node has reported what runs on it")
	}
}

func (r *reign) endDoubt(why string) {
	r.cfg.Logger.Warn("placement: the ledger is trusted again", "why", why, "doubt", r.identity.Doubt)
	r.emit(protocol.Event{Kind: protocol.EventLedgerTrusted, Text: "devices are granted again: " + why})
	r.identity.Doubt, r.identity.Awaits, r.identity.Since = "", nil, time.Time{}
	clear(r.accounted)
	r.dirty = true
	r.writeIdentity()
}

// acceptLedger is an operator who takes the ledger as it is. Only operators may.
func (r *reign) acceptLedger(c *call) {
	if c.namespace != "" {
		r.finishErr(c, bus.Errorf(bus.CodeRefused, "the ledger is accepted by an operator, not from within namespace %q", c.namespace))
		return
	}
	if r.identity.Doubt != "" {
		r.endDoubt("an operator has accepted the ledger as it is")
	}
	r.finish(c, &answer{Kind: answerDone, Ledger: r.ledgerStatus()})
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

func (r *reign) ledgerStatus() *LedgerStatus {
	s := &LedgerStatus{ID: r.identity.ID, Doubt: r.identity.Doubt, Since: r.identity.Since}
	if s.Doubt != "" {
		s.Awaits = limited(r.missing())
	}
	for _, e := range r.held {
		if e.Unconfirmed != "" {
			s.Unconfirmed++
		}
	}
	return s
}

// nodesOf is the names behind the seats among the keys.
func nodesOf(keys map[string]bool) []string {
	var names []string
	for key := range keys {
		if name, seat := strings.CutPrefix(key, seatKey("")); seat {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}
