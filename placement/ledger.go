package placement

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"sync"

	"troupe/bus"
)

// ledger is the bucket under one term. All its writes are fenced by the term's epoch.
type ledger struct {
	kv   *bus.KV
	term *bus.Term
}

func openLedger(ctx context.Context, cfg Config) (*bus.KV, error) {
	return cfg.Bus.KV(ctx, bus.KVConfig{Bucket: ledgerBucket, Replicas: cfg.Replicas, MaxBytes: cfg.MaxBytes, MarkerTTL: markerTTL})
}

// contents is the ledger as a new leader reads it.
type contents struct {
	records []*stored
	seats   map[string]int // ranks by node
	rules   *Rules
}

func (l ledger) read(ctx context.Context) (contents, error) {
	c := contents{seats: map[string]int{}}
	entries, err := l.kv.List(ctx, "")
	if err != nil {
		return c, err
	}
	var errs []error
	for _, e := range entries {
		errs = append(errs, c.add(e))
	}
	slices.SortFunc(c.records, func(a, b *stored) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.ID, b.ID))
	})
	return c, errors.Join(errs...)
}

// add reads one key. Those of the lead are not ours.
func (c *contents) add(e bus.Entry) error {
	kind, name, _ := strings.Cut(e.Key, ".")
	switch {
	case kind == "reservation":
		s, err := decodeRecord(e)
		if err != nil {
			return bus.Errorf(bus.CodeOf(err), "the ledger's %s cannot be read: %w", e.Key, err)
		}
		c.records = append(c.records, s)
	case kind == "node":
		var s seat
		if err := bus.Unmarshal(e.Value, &s); err != nil {
			return bus.Errorf(bus.CodeOf(err), "the ledger's %s cannot be read: %w", e.Key, err)
		}
		c.seats[name] = s.Rank
	case e.Key == rulesKey:
		c.rules = new(Rules)
		if err := bus.Unmarshal(e.Value, c.rules); err != nil {
			return bus.Errorf(bus.CodeOf(err), "the ledger's rules cannot be read: %w", err)
		}
	}
	return nil
}

// batchFrom is from how many writes on one atomic batch is cheaper than as many messages at once. On file storage a
// batch costs the server a store of its own, about as much as fifty messages.
const batchFrom = 64

// write is one write of a round and what came of it.
type write struct {
	op       bus.Op
	revision uint64
	err      error
}

// commit makes the writes, all of them under way at once, and returns when every one has its result. They are about
// different reservations and do not depend on each other, so each may succeed or fail by itself.
func (l ledger) commit(ctx context.Context, writes []*write) {
	if len(writes) == 1 {
		l.one(ctx, writes[0])
		return
	}
	if len(writes) >= batchFrom {
		l.batches(ctx, writes)
		return
	}
	var group sync.WaitGroup
	for _, w := range writes {
		group.Go(func() { l.one(ctx, w) })
	}
	group.Wait()
}

func (l ledger) one(ctx context.Context, w *write) {
	revisions, err := l.term.Apply(ctx, []bus.Op{w.op})
	if w.err = err; err == nil {
		w.revision = revisions[0]
	}
}

// batches makes many writes in as few batches as the server takes, one after the other.
func (l ledger) batches(ctx context.Context, writes []*write) {
	for group := range slices.Chunk(writes, bus.MaxBatch/2) {
		ops := make([]bus.Op, len(group))
		for i, w := range group {
			ops[i] = w.op
		}
		revisions, err := l.term.Apply(ctx, ops)
		for i, w := range group {
			if w.err = err; err == nil {
				w.revision = revisions[i]
			}
		}
	}
}

// resolved reports whether an error says for certain that the write was not made. Otherwise only the ledger itself can
// tell, to the next leader.
func resolved(err error) bool {
	return !errors.Is(err, bus.ErrOutcomeUnknown) && !errors.Is(err, bus.ErrFenced)
}
