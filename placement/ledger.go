package placement

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/bus/wire"
)

const (
	journalSlots    = 512 // rounds that one half of the journal has room for
	checkpointAfter = 384 // rounds after which what they changed is written to the records
	checkpointIdle  = 500 * time.Millisecond
	journalBytes    = 512 << 10 // of one round in one message; a longer one takes several
	batchSize       = kv.MaxBatch / 2
	batchFrom       = 64 // on file storage a batch costs the server a store of its own, about as much as so many messages
	sweepAtMost     = 32 // slots that a checkpoint clears away
)

// ledger is the bucket under one term. All its writes are fenced by the term's epoch.
//
// What a round changes is written as one message, into the next slot of a journal: so many requests cost one write, and
// on a server that syncs, one sync. Now and then a checkpoint brings the records up to date, one for each reservation,
// and says up to which round they are; what was granted and released in between is never written. A new leader reads
// the records and goes through the rounds after the checkpoint again, in their order. Doing that with rounds that the
// records have already seen changes nothing: the last round to touch a key decides.
//
// The journal has two halves. While a checkpoint covers one, rounds go to the other; so no slot is overwritten, or
// cleared away, before the records have what is in it.
//
// The loop owns it, but for what a checkpoint under way was given.
type ledger struct {
	kv   *kv.Bucket
	term *kv.Term

	half    int    // of the journal, that rounds go to now
	at      int    // the slot of the next
	used    [2]int // slots of each half that may hold something
	next    uint64 // the number of the next round
	done    uint64 // every round up to this one is in the records
	dirty   map[string]written
	records map[string]bool // the keys that are there
	last    time.Time       // when something was last written
	saved   *checkpoint     // under way; nil if none is

	live    map[string]bool // the keys after the last round
	sum     uint64          // of them
	written uint64          // the revision of the last round of this term
	broken  string          // as in contents
	mark    *marker
	guarded *mark // what every checkpoint writes as the mark, but for its round; nil until the ledger has an identity
	log     *slog.Logger
}

// newest is a revision that no round up to now exceeds.
func (l *ledger) newest() uint64 { return max(l.term.Epoch(), l.written) }

// marking makes checkpoints write the mark from now on, for a ledger of this identity.
func (l *ledger) marking(id string, nodes []string) {
	l.guarded = &mark{Ledger: id, Epoch: l.term.Epoch(), Nodes: nodes}
}

// toggled is the sum after a change of a key, which is then there or not.
func (l *ledger) toggled(sum uint64, key string, there bool) uint64 {
	if l.live[key] == there {
		return sum
	}
	return sum ^ sumOf(key)
}

// enter notes that a key is there, or not any more.
func (l *ledger) enter(key string, there bool) {
	l.sum = l.toggled(l.sum, key, there)
	if there {
		l.live[key] = true
	} else {
		delete(l.live, key)
	}
}

// written is the latest value of a key that the records do not have yet; nil if it was deleted.
type written struct {
	value    []byte
	revision uint64
}

// roundRecord is a round in the journal.
type roundRecord struct {
	N       uint64        `msgpack:"n"`
	Changes []keyedChange `msgpack:"changes"`
	Sum     *uint64       `msgpack:"sum,omitempty"` // of the keys that are there after it; nil: a version that did not say
}

type keyedChange struct {
	Key   string `msgpack:"key"`
	Value []byte `msgpack:"value"` // nil: it is deleted
}

const doneKey = "journal.done"

func slotKey(half, at int) string { return fmt.Sprintf("journal.%d-%d", half, at) }

func openLedger(ctx context.Context, cfg Config) (*kv.Bucket, error) {
	return kv.Open(ctx, cfg.Bus, kv.Config{Bucket: ledgerBucket, Replicas: cfg.Replicas, MaxBytes: cfg.MaxBytes})
}

// contents is the ledger as a new leader reads it.
type contents struct {
	records []*stored
	seats   map[string]int // ranks by node
	cordons map[string]cordons
	rules   *Rules

	identity *identity // nil: it has none
	written  bool      // it is not new
	round    uint64    // the last that it has
	sum      *uint64   // of its keys
	broken   string    // what is missing in it; empty: nothing that it can tell by itself
}

// read is the state that the ledger says, and makes the ledger ready for the next round.
func (l *ledger) read(ctx context.Context) (contents, error) {
	entries, err := l.kv.List(ctx, "")
	if err != nil {
		return contents{}, err
	}
	state, err := l.replay(entries)
	if err != nil {
		return contents{}, err
	}
	c := contents{seats: map[string]int{}, cordons: map[string]cordons{}, round: l.next - 1, sum: &l.sum, broken: l.broken}
	c.written = len(state) > 0 || c.round > 0
	if l.next-1 > l.done { // then both halves of the journal are free
		l.save(ctx)
		if err := l.finish(ctx); err != nil {
			return contents{}, err
		}
	}
	var errs []error
	for _, key := range slices.Sorted(maps.Keys(state)) {
		errs = append(errs, c.add(key, state[key]))
	}
	slices.SortFunc(c.records, func(a, b *stored) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.ID, b.ID))
	})
	return c, errors.Join(errs...)
}

// numbered is a round of the journal as it is read back.
type numbered struct {
	roundRecord
	revision uint64
}

// replay is the records with the rounds after the checkpoint on top.
func (l *ledger) replay(entries []kv.Entry) (map[string]written, error) {
	l.dirty, l.records, l.live = map[string]written{}, map[string]bool{}, map[string]bool{}
	state := map[string]written{}
	var rounds []numbered
	for _, e := range entries {
		var err error
		switch kind, _, _ := strings.Cut(e.Key, "."); {
		case e.Key == doneKey:
			err = wire.Unmarshal(e.Value, &l.done)
		case kind == "journal":
			var r numbered
			r, err = l.readSlot(e)
			rounds = append(rounds, r)
		case kind == "lead":
		default:
			l.records[e.Key] = true
			state[e.Key] = written{e.Value, e.Revision}
		}
		if err != nil {
			return nil, bus.Errorf(bus.CodeOf(err), "the ledger's %s cannot be read: %w", e.Key, err)
		}
	}
	for key := range state {
		l.enter(key, true)
	}
	l.redo(state, rounds)
	return state, nil
}

// readSlot is one slot of the journal.
func (l *ledger) readSlot(e kv.Entry) (numbered, error) {
	r := numbered{revision: e.Revision}
	var half, at int
	if _, err := fmt.Sscanf(e.Key, "journal.%d-%d", &half, &at); err == nil && half&^1 == 0 {
		l.used[half] = max(l.used[half], at+1)
	}
	err := wire.Unmarshal(e.Value, &r.roundRecord)
	return r, err
}

// redo goes through the rounds after the checkpoint again, in their order. One that is missing, and keys that are not
// those that the last round left, mean that the store has lost something: what is there is still the best there is.
func (l *ledger) redo(state map[string]written, rounds []numbered) {
	slices.SortFunc(rounds, func(a, b numbered) int { return cmp.Compare(a.N, b.N) })
	l.next = l.done + 1
	var sum *uint64
	for _, r := range rounds {
		if r.N == l.done {
			sum = r.Sum
		}
		if r.N <= l.done {
			continue
		}
		if r.N != l.next && l.broken == "" {
			l.broken = fmt.Sprintf("the ledger's journal has a gap: round %d after %d", r.N, l.next-1)
		}
		l.next, sum = r.N+1, r.Sum
		for _, c := range r.Changes {
			l.note(c, r.revision)
			l.enter(c.Key, c.Value != nil)
			state[c.Key] = l.dirty[c.Key]
			if c.Value == nil {
				delete(state, c.Key)
			}
		}
	}
	if sum != nil && *sum != l.sum && l.broken == "" {
		l.broken = fmt.Sprintf("the ledger's keys are not those that it had after round %d", l.next-1)
	}
}

// note remembers what the records do not have yet.
func (l *ledger) note(c keyedChange, revision uint64) { l.dirty[c.Key] = written{c.Value, revision} }

// add reads one key.
func (c *contents) add(key string, w written) error {
	kind, name, _ := strings.Cut(key, ".")
	var err error
	switch {
	case kind == "reservation":
		var s *stored
		if s, err = decodeRecord(w); err == nil {
			c.records = append(c.records, s)
		}
	case kind == "node":
		var s seat
		err = wire.Unmarshal(w.value, &s)
		c.seats[name] = s.Rank
	case kind == "cordon":
		c.cordons[name], err = decodeCordons(w.value)
	case key == identityKey:
		c.identity = new(identity)
		err = wire.Unmarshal(w.value, c.identity)
	case key == rulesKey:
		c.rules = new(Rules)
		err = wire.Unmarshal(w.value, c.rules)
	}
	if err != nil {
		return bus.Errorf(bus.CodeOf(err), "the ledger's %s cannot be read: %w", key, err)
	}
	return nil
}

// commit writes a round, and calls each for every change of it when it is known what has become of that.
func (l *ledger) commit(ctx context.Context, changes []*change, each func(*change)) {
	for len(changes) > 0 {
		n, size := 0, 0
		for n < len(changes) && (n == 0 || size+len(changes[n].value) <= journalBytes) {
			size += len(changes[n].key) + len(changes[n].value)
			n++
		}
		l.write(ctx, changes[:n])
		for _, c := range changes[:n] {
			each(c)
		}
		changes = changes[n:]
	}
}

// write is one message.
func (l *ledger) write(ctx context.Context, changes []*change) {
	err := l.room(ctx)
	r := roundRecord{N: l.next, Changes: make([]keyedChange, len(changes))}
	sum := l.sum
	for i, c := range changes {
		r.Changes[i] = c.keyedChange()
		sum = l.toggled(sum, c.key, c.value != nil)
	}
	r.Sum = &sum
	var value []byte
	if err == nil {
		value, err = wire.Marshal(r)
	}
	var revision uint64
	if err == nil {
		revision, err = l.term.Put(ctx, slotKey(l.half, l.at), value)
	}
	for i, c := range changes {
		if c.revision, c.err = revision, err; err == nil {
			l.note(r.Changes[i], revision)
		}
	}
	if err == nil {
		for _, c := range changes {
			l.enter(c.key, c.value != nil)
		}
		l.written = revision
		l.next++
		l.at++
		l.used[l.half] = max(l.used[l.half], l.at)
		l.last = time.Time{}
	}
}

// room waits until there is a slot for the next round.
func (l *ledger) room(ctx context.Context) error {
	if l.at < journalSlots {
		return nil
	}
	if l.saved != nil {
		if err := l.finish(ctx); err != nil {
			return err
		}
	}
	l.save(ctx)
	return nil
}

// checkpoint is records on their way.
type checkpoint struct {
	upTo   uint64
	dirty  map[string]written
	half   int // of the journal, that it covers
	busy   bool
	used   int    // slots there
	swept  int    // of those, cleared away, from the last
	mark   []byte // to be written when it is done; nil: none
	doneCh chan struct{}
	err    error
}

// tend begins a checkpoint when it is time for one, and takes note of one that is over. An error means that this leader
// must go.
func (l *ledger) tend(ctx context.Context, now time.Time) error {
	if l.saved != nil {
		select {
		case <-l.saved.doneCh:
			return l.finish(ctx)
		default:
			return nil
		}
	}
	if l.last.IsZero() {
		l.last = now
	}
	waiting := l.next - 1 - l.done
	if waiting >= checkpointAfter || waiting > 0 && now.Sub(l.last) > checkpointIdle {
		l.save(ctx)
	}
	return nil
}

// save starts a checkpoint of everything up to now, beside the rounds that follow. None may be under way.
func (l *ledger) save(ctx context.Context) {
	c := &checkpoint{upTo: l.next - 1, dirty: l.dirty, half: l.half, used: l.used[l.half], busy: l.at >= checkpointAfter, doneCh: make(chan struct{})}
	l.saved, l.dirty = c, map[string]written{}
	l.half, l.at = 1-l.half, 0
	known := maps.Clone(l.records)
	if l.guarded != nil {
		m := *l.guarded
		m.Round, m.Sum, m.Nodes = c.upTo, l.sum, append(nodesOf(l.live), m.Nodes...)
		slices.Sort(m.Nodes)
		m.Nodes = slices.Compact(m.Nodes)
		c.mark, _ = wire.Marshal(m) // strings and numbers
	}
	bus.Go(func() {
		defer close(c.doneCh)
		if c.err = c.write(ctx, l.term, known); c.err != nil || c.mark == nil {
			return
		}
		if err := l.mark.write(ctx, c.mark, l.term.Epoch()); err != nil {
			l.log.Warn("placement: the ledger's mark is not written; the next checkpoint writes it", "error", err)
		}
	})
}

// write makes the records say what the rounds did, and then says so: until then the rounds count.
func (c *checkpoint) write(ctx context.Context, term *kv.Term, known map[string]bool) error {
	var ops []kv.Op
	for _, key := range slices.Sorted(maps.Keys(c.dirty)) {
		w := c.dirty[key]
		switch {
		case w.value == nil && known[key]:
			ops = append(ops, kv.OpDelete(key, 0))
		case w.value != nil:
			value, err := w.settled(key)
			if err != nil {
				return err
			}
			ops = append(ops, kv.OpPut(key, value))
		}
	}
	if err := applyAll(ctx, term, ops); err != nil {
		return err
	}
	done, err := wire.Marshal(c.upTo)
	if err != nil {
		return err
	}
	if _, err := term.Put(ctx, doneKey, done); err != nil {
		return err
	}
	return c.sweep(ctx, term)
}

// sweep clears slots away after a busy time, or there would be ever more for a new leader to read.
func (c *checkpoint) sweep(ctx context.Context, term *kv.Term) error {
	if c.busy {
		return nil
	}
	c.swept = min(c.used, sweepAtMost)
	ops := make([]kv.Op, c.swept)
	for i := range ops {
		ops[i] = kv.OpDelete(slotKey(c.half, c.used-1-i), 0)
	}
	return applyAll(ctx, term, ops)
}

// applyAll makes writes that do not depend on each other: many as batches, few as messages that are under way together.
func applyAll(ctx context.Context, term *kv.Term, ops []kv.Op) error {
	if len(ops) >= batchFrom {
		for batch := range slices.Chunk(ops, batchSize) {
			if _, err := term.Apply(ctx, batch); err != nil {
				return err
			}
		}
		return nil
	}
	errs := make([]error, len(ops))
	var group sync.WaitGroup
	for i, op := range ops {
		group.Go(bus.Guard(func() { _, errs[i] = term.Apply(ctx, []kv.Op{op}) }))
	}
	group.Wait()
	return errors.Join(errs...)
}

// settled is the value as a record: with its token, which was not known when it was written.
func (w written) settled(key string) ([]byte, error) {
	if !strings.HasPrefix(key, "reservation.") {
		return w.value, nil
	}
	s, err := decodeRecord(w)
	if err != nil {
		return nil, err
	}
	return s.encode()
}

// finish waits for the checkpoint under way.
func (l *ledger) finish(ctx context.Context) error {
	c := l.saved
	select {
	case <-c.doneCh:
	case <-ctx.Done():
		<-c.doneCh // its writes end with the same context
	}
	l.saved = nil
	if c.err != nil {
		return bus.Errorf(bus.CodeOutcomeUnknown, "the checkpoint of the ledger: %w", c.err)
	}
	l.done = c.upTo
	l.used[c.half] -= c.swept
	for key, w := range c.dirty {
		if w.value == nil {
			delete(l.records, key)
		} else {
			l.records[key] = true
		}
	}
	return nil
}

// stop waits until nothing is on its way.
func (l *ledger) stop() {
	if l.saved != nil {
		<-l.saved.doneCh
	}
}

// resolved reports whether an error says for certain that the write was not made. Otherwise only the ledger itself can
// tell, to the next leader.
func resolved(err error) bool {
	return !errors.Is(err, bus.ErrOutcomeUnknown) && !errors.Is(err, bus.ErrFenced)
}
