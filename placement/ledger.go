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
	journalSlots    = 512 // rounds in one half of the journal
	checkpointAfter = 384 // rounds
	checkpointIdle  = 500 * time.Millisecond
	journalBytes    = 512 << 10 // of one message; a longer round takes several
	batchSize       = kv.MaxBatch / 2
	minBatch        = 64 // on file storage a batch makes the server create a store, which costs about as much as this many messages
	maxSweep        = 32 // slots that one checkpoint deletes
)

// ledger is the bucket during one term. All writes are fenced by the term's epoch.
//
// A round is written as one message into the next slot of a journal, so all its requests share one write and one sync.
// A checkpoint brings the records, one for each reservation, up to date with the journal and stores the number of the
// last round that they contain; reservations that were granted and released in between are never written as records. A
// new leader reads the records and replays the rounds after the checkpoint. Replaying a round that the records contain
// changes nothing: the last round that touches a key decides.
//
// The journal has two halves. While a checkpoint covers one, rounds go to the other, so no slot is overwritten or
// deleted before the records contain it.
//
// The loop owns it, except for the data handed to a running checkpoint.
type ledger struct {
	kv   *kv.Bucket
	term *kv.Term

	half         int    // of the journal, for the next round
	slot         int    // in that half, for the next round
	used         [2]int // slots of each half that may contain a round
	nextRound    uint64
	checkpointed uint64 // the records contain all rounds up to this one
	pending      map[string]pendingValue
	storedKeys   map[string]bool // keys of records in the bucket
	idleSince    time.Time       // of the last round; zero: set by the next maintain
	checkpoint   *checkpoint     // running; nil: none

	liveKeys      map[string]bool // keys after the last round
	sum           uint64          // of liveKeys
	lastRevision  uint64          // of the last round of this term
	damage        string          // as in ledgerContents
	watermarks    *watermarkStore
	watermarkBase *watermark // watermark that checkpoints complete and write; nil until the ledger has an identity
	log           *slog.Logger
}

// newestRevision returns an upper bound of the revisions of all rounds.
func (l *ledger) newestRevision() uint64 { return max(l.term.Epoch(), l.lastRevision) }

// enableWatermark makes checkpoints write the watermark, for a ledger with this identity.
func (l *ledger) enableWatermark(id string, nodes []string) {
	l.watermarkBase = &watermark{Ledger: id, Epoch: l.term.Epoch(), Nodes: nodes}
}

// sumAfter returns the sum after a key is set or deleted.
func (l *ledger) sumAfter(sum uint64, key string, there bool) uint64 {
	if l.liveKeys[key] == there {
		return sum
	}
	return sum ^ keySum(key)
}

// setKey records that a key exists, or no longer exists.
func (l *ledger) setKey(key string, there bool) {
	l.sum = l.sumAfter(l.sum, key, there)
	if there {
		l.liveKeys[key] = true
	} else {
		delete(l.liveKeys, key)
	}
}

// pendingValue is the latest value of a key that the records do not contain yet; nil if it was deleted.
type pendingValue struct {
	value    []byte
	revision uint64
}

// roundRecord is a round in the journal.
type roundRecord struct {
	N       uint64          `msgpack:"n"`
	Changes []journalChange `msgpack:"changes"`
	Sum     uint64          `msgpack:"sum"` // of the keys after it
}

type journalChange struct {
	Key   string `msgpack:"key"`
	Value []byte `msgpack:"value"` // nil: deleted
}

const doneKey = "journal.done"

func slotKey(half, at int) string { return fmt.Sprintf("journal.%d-%d", half, at) }

func openLedger(ctx context.Context, cfg Config) (*kv.Bucket, error) {
	return kv.Open(ctx, cfg.Bus, kv.Config{Bucket: ledgerBucket, Replicas: cfg.Replicas, MaxBytes: cfg.MaxBytes})
}

// ledgerContents is the ledger as a new leader reads it.
type ledgerContents struct {
	records []*storedRecord
	ranks   map[string]int // by node
	cordons map[string]cordons
	rules   *Rules

	identity *ledgerIdentity // nil: none
	notEmpty bool
	round    uint64 // the last one
	sum      uint64 // of its keys
	damage   string // what is missing; empty: nothing that the ledger alone can show
}

// read returns the contents and prepares the ledger for the next round.
func (l *ledger) read(ctx context.Context) (ledgerContents, error) {
	entries, err := l.kv.List(ctx, "")
	if err != nil {
		return ledgerContents{}, err
	}
	state, err := l.replay(entries)
	if err != nil {
		return ledgerContents{}, err
	}
	c := ledgerContents{ranks: map[string]int{}, cordons: map[string]cordons{}, round: l.nextRound - 1, sum: l.sum, damage: l.damage}
	c.notEmpty = len(state) > 0 || c.round > 0
	if l.nextRound-1 > l.checkpointed { // afterwards both halves are free
		l.startCheckpoint(ctx)
		if err := l.finishCheckpoint(ctx); err != nil {
			return ledgerContents{}, err
		}
	}
	var errs []error
	for _, key := range slices.Sorted(maps.Keys(state)) {
		errs = append(errs, c.add(key, state[key]))
	}
	slices.SortFunc(c.records, func(a, b *storedRecord) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.ID, b.ID))
	})
	return c, errors.Join(errs...)
}

// journalRound is a round as read from the journal.
type journalRound struct {
	roundRecord
	revision uint64
}

// replay returns the records with the rounds after the checkpoint applied.
func (l *ledger) replay(entries []kv.Entry) (map[string]pendingValue, error) {
	l.pending, l.storedKeys, l.liveKeys = map[string]pendingValue{}, map[string]bool{}, map[string]bool{}
	state := map[string]pendingValue{}
	var rounds []journalRound
	for _, e := range entries {
		var err error
		switch kind, _, _ := strings.Cut(e.Key, "."); {
		case e.Key == doneKey:
			err = wire.Unmarshal(e.Value, &l.checkpointed)
		case kind == "journal":
			var r journalRound
			r, err = l.readSlot(e)
			rounds = append(rounds, r)
		case kind == "lead":
		default:
			l.storedKeys[e.Key] = true
			state[e.Key] = pendingValue{e.Value, e.Revision}
		}
		if err != nil {
			return nil, bus.Errorf(bus.CodeOf(err), "the ledger's %s cannot be read: %w", e.Key, err)
		}
	}
	for key := range state {
		l.setKey(key, true)
	}
	l.replayRounds(state, rounds)
	return state, nil
}

func (l *ledger) readSlot(e kv.Entry) (journalRound, error) {
	r := journalRound{revision: e.Revision}
	var half, at int
	if _, err := fmt.Sscanf(e.Key, "journal.%d-%d", &half, &at); err == nil && half&^1 == 0 {
		l.used[half] = max(l.used[half], at+1)
	}
	err := wire.Unmarshal(e.Value, &r.roundRecord)
	return r, err
}

// replayRounds applies the rounds after the checkpoint in order. A missing round, or keys that differ from the sum of
// the last round, show that the store has lost data; the rest is still used.
func (l *ledger) replayRounds(state map[string]pendingValue, rounds []journalRound) {
	slices.SortFunc(rounds, func(a, b journalRound) int { return cmp.Compare(a.N, b.N) })
	l.nextRound = l.checkpointed + 1
	var sum *uint64
	for _, r := range rounds {
		if r.N == l.checkpointed {
			sum = &r.Sum
		}
		if r.N <= l.checkpointed {
			continue
		}
		if r.N != l.nextRound && l.damage == "" {
			l.damage = fmt.Sprintf("the ledger's journal has a gap: round %d after %d", r.N, l.nextRound-1)
		}
		l.nextRound, sum = r.N+1, &r.Sum
		for _, c := range r.Changes {
			l.setPending(c, r.revision)
			l.setKey(c.Key, c.Value != nil)
			state[c.Key] = l.pending[c.Key]
			if c.Value == nil {
				delete(state, c.Key)
			}
		}
	}
	if sum != nil && *sum != l.sum && l.damage == "" {
		l.damage = fmt.Sprintf("the ledger's keys are not those that it had after round %d", l.nextRound-1)
	}
}

func (l *ledger) setPending(c journalChange, revision uint64) {
	l.pending[c.Key] = pendingValue{c.Value, revision}
}

// add decodes one key.
func (c *ledgerContents) add(key string, w pendingValue) error {
	kind, name, _ := strings.Cut(key, ".")
	var err error
	switch {
	case kind == "reservation":
		var s *storedRecord
		if s, err = decodeRecord(w); err == nil {
			c.records = append(c.records, s)
		}
	case kind == "node":
		var s storedRank
		err = wire.Unmarshal(w.value, &s)
		c.ranks[name] = s.Rank
	case kind == "cordon":
		c.cordons[name], err = decodeCordons(w.value)
	case key == identityKey:
		c.identity = new(ledgerIdentity)
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

// commit writes a round, and calls each for every change once its outcome is known.
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

// write writes one message.
func (l *ledger) write(ctx context.Context, changes []*change) {
	err := l.ensureSlot(ctx)
	r := roundRecord{N: l.nextRound, Changes: make([]journalChange, len(changes))}
	sum := l.sum
	for i, c := range changes {
		r.Changes[i] = c.journalChange()
		sum = l.sumAfter(sum, c.key, c.value != nil)
	}
	r.Sum = sum
	var value []byte
	if err == nil {
		value, err = wire.Marshal(r)
	}
	var revision uint64
	if err == nil {
		revision, err = l.term.Put(ctx, slotKey(l.half, l.slot), value)
	}
	for i, c := range changes {
		if c.revision, c.err = revision, err; err == nil {
			l.setPending(r.Changes[i], revision)
		}
	}
	if err == nil {
		for _, c := range changes {
			l.setKey(c.key, c.value != nil)
		}
		l.lastRevision = revision
		l.nextRound++
		l.slot++
		l.used[l.half] = max(l.used[l.half], l.slot)
		l.idleSince = time.Time{}
	}
}

// ensureSlot waits until a slot is free for the next round.
func (l *ledger) ensureSlot(ctx context.Context) error {
	if l.slot < journalSlots {
		return nil
	}
	if l.checkpoint != nil {
		if err := l.finishCheckpoint(ctx); err != nil {
			return err
		}
	}
	l.startCheckpoint(ctx)
	return nil
}

// checkpoint is a checkpoint in progress.
type checkpoint struct {
	upTo      uint64
	pending   map[string]pendingValue
	half      int // of the journal, that it covers
	busy      bool
	used      int    // slots in that half
	swept     int    // slots deleted, from the last
	watermark []byte // written after the records; nil: none
	doneCh    chan struct{}
	err       error
}

// maintain starts a checkpoint when one is due, and completes one that has ended. An error means that the leader must
// step down.
func (l *ledger) maintain(ctx context.Context, now time.Time) error {
	if l.checkpoint != nil {
		select {
		case <-l.checkpoint.doneCh:
			return l.finishCheckpoint(ctx)
		default:
			return nil
		}
	}
	if l.idleSince.IsZero() {
		l.idleSince = now
	}
	waiting := l.nextRound - 1 - l.checkpointed
	if waiting >= checkpointAfter || waiting > 0 && now.Sub(l.idleSince) > checkpointIdle {
		l.startCheckpoint(ctx)
	}
	return nil
}

// startCheckpoint writes everything up to now in the background. No checkpoint may be running.
func (l *ledger) startCheckpoint(ctx context.Context) {
	c := &checkpoint{upTo: l.nextRound - 1, pending: l.pending, half: l.half, used: l.used[l.half], busy: l.slot >= checkpointAfter, doneCh: make(chan struct{})}
	l.checkpoint, l.pending = c, map[string]pendingValue{}
	l.half, l.slot = 1-l.half, 0
	known := maps.Clone(l.storedKeys)
	if l.watermarkBase != nil {
		m := *l.watermarkBase
		m.Round, m.Sum, m.Nodes = c.upTo, l.sum, append(rankedNodes(l.liveKeys), m.Nodes...)
		slices.Sort(m.Nodes)
		m.Nodes = slices.Compact(m.Nodes)
		c.watermark, _ = wire.Marshal(m) // cannot fail: strings and numbers
	}
	bus.Go(func() {
		defer close(c.doneCh)
		if c.err = c.write(ctx, l.term, known); c.err != nil || c.watermark == nil {
			return
		}
		if err := l.watermarks.write(ctx, c.watermark, l.term.Epoch()); err != nil {
			l.log.Warn("placement: the ledger's watermark was not written; the next checkpoint writes it", "error", err)
		}
	})
}

// write writes the records, and then the number of the last round they contain. Until then the rounds count.
func (c *checkpoint) write(ctx context.Context, term *kv.Term, known map[string]bool) error {
	var ops []kv.Op
	for _, key := range slices.Sorted(maps.Keys(c.pending)) {
		w := c.pending[key]
		switch {
		case w.value == nil && known[key]:
			ops = append(ops, kv.OpDelete(key, 0))
		case w.value != nil:
			value, err := w.withToken(key)
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

// sweep deletes slots when the load is low, which bounds what a new leader reads.
func (c *checkpoint) sweep(ctx context.Context, term *kv.Term) error {
	if c.busy {
		return nil
	}
	c.swept = min(c.used, maxSweep)
	ops := make([]kv.Op, c.swept)
	for i := range ops {
		ops[i] = kv.OpDelete(slotKey(c.half, c.used-1-i), 0)
	}
	return applyAll(ctx, term, ops)
}

// applyAll makes independent writes: many as batches, few as concurrent messages.
func applyAll(ctx context.Context, term *kv.Term, ops []kv.Op) error {
	if len(ops) >= minBatch {
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

// withToken returns the value of a record with its token, which was not known when the round was written.
func (w pendingValue) withToken(key string) ([]byte, error) {
	if !strings.HasPrefix(key, "reservation.") {
		return w.value, nil
	}
	s, err := decodeRecord(w)
	if err != nil {
		return nil, err
	}
	return s.encode()
}

// finishCheckpoint waits for the running checkpoint.
func (l *ledger) finishCheckpoint(ctx context.Context) error {
	c := l.checkpoint
	select {
	case <-c.doneCh:
	case <-ctx.Done():
		<-c.doneCh // its writes end with the same context
	}
	l.checkpoint = nil
	if c.err != nil {
		return bus.Errorf(bus.CodeOutcomeUnknown, "the checkpoint of the ledger: %w", c.err)
	}
	l.checkpointed = c.upTo
	l.used[c.half] -= c.swept
	for key, w := range c.pending {
		if w.value == nil {
			delete(l.storedKeys, key)
		} else {
			l.storedKeys[key] = true
		}
	}
	return nil
}

func (l *ledger) awaitCheckpoint() {
	if l.checkpoint != nil {
		<-l.checkpoint.doneCh
	}
}

// isDefinite reports whether an error states that the write was not made. Otherwise the next leader finds out from the
// ledger.
func isDefinite(err error) bool {
	return !errors.Is(err, bus.ErrOutcomeUnknown) && !errors.Is(err, bus.ErrFenced)
}
