package pipeline

import (
	"context"
	"encoding/json"
	"slices"
	"strconv"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
)

// tries are what has gone wrong with an item, as the log keeps it: written when something does, and gone with the item.
// Those of a group are kept with its first item.
type tries struct {
	Failures []Failure `json:"failures,omitempty"`
	Losses   int       `json:"losses,omitempty"`
	Shared   int       `json:"shared,omitempty"`
}

const (
	keptFailures = 8   // the newest, with their words; of those before only the number counts
	keptStack    = 800 // bytes
)

// note stores what has gone wrong with the work so far.
func (f *flow) note(w *work) {
	e := w.entries[0]
	e.tries = &tries{Failures: w.failures, Losses: w.losses, Shared: w.shared}
	f.enqueue(&change{tried: []*entry{e}})
}

// resume gives work what went wrong with its items before the engine was started.
func (w *work) resume() {
	for _, e := range w.entries {
		if e.tries == nil {
			continue
		}
		w.losses, w.shared = max(w.losses, e.tries.Losses), max(w.shared, e.tries.Shared)
		if len(e.tries.Failures) > len(w.failures) {
			w.failures = e.tries.Failures
		}
	}
}

// triesMessages are the tries of a commit in the log: those that are new, and those that go with their items. There is one
// for an item, the last.
func (j *journal) triesMessages(c *commit) (out []*nats.Msg, err error) {
	at := map[string]int{}
	add := func(e *entry, m *nats.Msg) {
		m.Subject = j.at.Tries(e.lane.stream.spec.Name, e.lane.priority, strconv.FormatUint(e.n, 10))
		if i, twice := at[m.Subject]; twice {
			out[i] = m
			return
		}
		at[m.Subject] = len(out)
		out = append(out, m)
	}
	for _, ch := range c.changes {
		for _, e := range ch.tried {
			text, err := json.Marshal(e.tries.clipped())
			if err != nil {
				return nil, err
			}
			add(e, &nats.Msg{Data: text, Header: nats.Header{headerRollup: {rollupSubject}}})
		}
	}
	for _, ch := range c.changes {
		for _, e := range ch.done {
			if e.tries != nil {
				add(e, &nats.Msg{Header: lasting(markTTL)})
			}
		}
	}
	return out, nil
}

// clipped are the tries without long stacks.
func (t *tries) clipped() tries {
	out := tries{Failures: make([]Failure, len(t.Failures)), Losses: t.Losses, Shared: t.Shared}
	for i, f := range t.Failures {
		if i < len(t.Failures)-keptFailures {
			f = Failure{At: f.At, Code: f.Code}
		}
		f.Stack, f.Error = clip(f.Stack, keptStack), clip(f.Error, keptStack)
		out.Failures[i] = f
	}
	return out
}

// recallTries reads back what has gone wrong with items that are not done. What lies there of items that are, or under what was
// written later, was left by an engine that was killed, or came back when a server was.
func (p *Pipeline) recallTries(ctx context.Context) error {
	var stale []uint64
	defer func() { p.garbage.add(stale) }()
	for _, s := range p.flow.streams {
		for _, l := range s.lanes {
			at := map[uint64]uint64{}
			err := p.journal.each(ctx, p.at.Tries(s.spec.Name, l.priority, "*"), func(m jetstream.Msg, seq uint64) error {
				n, err := strconv.ParseUint(lastWord(m.Subject()), 10, 64)
				if err != nil || len(m.Data()) == 0 {
					return err
				}
				if l.done.has(n) {
					stale = append(stale, seq)
					return nil
				}
				if before := at[n]; before > 0 { // the newest counts
					stale = append(stale, before)
				}
				at[n] = seq
				t := &tries{}
				l.tried[n] = t
				return json.Unmarshal(m.Data(), t)
			})
			if err != nil {
				return bus.Errorf(bus.CodeUnavailable, "pipeline %s: read its log: %w", p.at.Name, err)
			}
		}
	}
	return nil
}

// crashed counts what functions had in hand when the engine before this one was killed: each is a loss. An item that
// kills the engine is given up in the end, and does not for ever.
func (f *flow) crashed(r *record) {
	if r == nil || r.Closed {
		return
	}
	c := &change{}
	for _, s := range f.streams {
		hands := r.Streams[s.spec.Name].Hands
		for p, l := range s.lanes {
			l.suspect = l.head
			if p >= len(hands) {
				continue
			}
			for _, n := range hands[p].seqs() {
				if l.done.has(n) {
					continue
				}
				if l.tried[n] == nil {
					l.tried[n] = &tries{}
				}
				l.tried[n].Losses++
				c.tried = append(c.tried, &entry{lane: l, n: n, tries: l.tried[n]})
			}
		}
	}
	for len(c.tried) > maxGroup { // of one commit; the rest follows
		f.enqueue(&change{tried: c.tried[:maxGroup:maxGroup]})
		c.tried = c.tried[maxGroup:]
	}
	f.enqueue(c)
}

// handsOf are the numbers of each lane that functions have in hand, as the record says them; nil: none.
func (f *flow) handsOf(s *stream) []place {
	numbers := make([][]uint64, len(s.lanes))
	some := false
	for _, st := range f.stages {
		if st.spec.Func == nil || !slices.Contains(st.in, s) {
			continue
		}
		for _, t := range st.running {
			for _, e := range t.entries {
				if e.lane.stream == s {
					numbers[e.lane.priority], some = append(numbers[e.lane.priority], e.n), true
				}
			}
		}
	}
	if !some {
		return nil
	}
	out := make([]place, len(s.lanes))
	for p, all := range numbers {
		slices.Sort(all)
		for _, n := range all {
			out[p] = out[p].add(n)
		}
	}
	return out
}

// suspects says that the work may have killed the engine before this one: then it is written down before it is handed
// to a function, and not after.
func (s *stage) suspects(w *work) bool {
	if s.spec.Func == nil {
		return false
	}
	for _, e := range w.entries {
		if e.n <= e.lane.suspect {
			return true
		}
	}
	return false
}
