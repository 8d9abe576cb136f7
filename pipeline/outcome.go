package pipeline

import (
	"fmt"
	"slices"

	"troupe/bus"
)

// ending is how a task ended.
type ending uint8

const (
	handled   ending = iota // with outputs, or none
	failed                  // with an error
	lost                    // its worker died
	displaced               // its worker was stopped, for a reason that lies elsewhere: nobody is to blame
	returned                // it was taken back: nobody is to blame
)

// outcome is what came of a task.
type outcome struct {
	task   uint64
	stage  *stage
	ending ending
	outs   []Out
	err    error
	alone  bool // of what was lost: the worker had nothing else in hand
}

// finish takes in what came of a task. One that is not known any more was taken back before, and is passed over: this
// is what makes a late answer of a worker that was given up harmless.
func (f *flow) finish(o outcome) {
	t := o.stage.running[o.task]
	if t == nil {
		return
	}
	s := t.stage
	f.release(t)
	if o.ending == handled {
		c, err := f.outputs(t, o.outs)
		if err == nil {
			s.handled++
			s.times.add(f.now.Sub(t.started))
			f.enqueue(c)
			s.leave(t.work)
			return
		}
		o.ending, o.err = failed, err
	}
	switch {
	case t.aborted: // and nothing was handed back
		s.aborted++
		f.enqueue(&change{done: t.entries, closed: f.closingOf(t)})
		s.leave(t.work)
	case o.ending == failed:
		f.fail(t, o.err)
	case o.ending == lost:
		f.lose(t, o.alone, o.err)
	case o.ending == displaced:
		s.lost++
		s.runnable.pushFront(t.work)
	default:
		s.runnable.pushFront(t.work)
	}
}

func (f *flow) release(t *task) {
	delete(t.stage.running, t.id)
	if f.alone != nil && f.alone.work == t.work {
		f.alone = nil
	}
	t.hand.running--
	if t.hand.solo == t.work {
		t.hand.solo, t.hand.soloOut = nil, false
	}
	for _, out := range t.stage.blocks {
		out.reserved--
	}
}

// outputs makes a change of what a handler gave.
func (f *flow) outputs(t *task, outs []Out) (*change, error) {
	s := t.stage
	c := &change{done: t.entries, closed: f.closingOf(t), advance: s.spec.Advance, ordered: s.spec.Ordered}
	to := make([]*stream, len(outs))
	bytes := map[*stream]int64{}
	for i := range outs {
		st, err := s.outOf(outs[i].To)
		if err != nil {
			return nil, err
		}
		inherit(t, &outs[i].Item, st, i, len(outs))
		if err := st.checkItem(&outs[i].Item, f.maxBody); err != nil {
			return nil, err
		}
		to[i] = st
		if bytes[st] += weight(&outs[i].Item); bytes[st] > st.spec.Bytes {
			return nil, bus.Errorf(bus.CodeInvalid, "stage %s: a handler gave %d bytes for stream %s, which has a bound of %d; give less at once, or raise bytes", s.spec.Name, bytes[st], st.spec.Name, st.spec.Bytes)
		}
	}
	if len(outs) > maxGroup {
		return nil, bus.Errorf(bus.CodeInvalid, "stage %s: a handler gave %d outputs; at most %d are stored at once", s.spec.Name, len(outs), maxGroup)
	}
	for i := range outs {
		if to[i].spec.Full == DropOldest {
			f.makeRoom(to[i], 1, weight(&outs[i].Item), c)
		}
		c.puts = append(c.puts, f.move(to[i], outs[i].Item))
	}
	f.version += s.spec.Advance
	if t.aborted {
		s.aborted++
	}
	return c, nil
}

// inherit fills in what a handler left out: an output goes on under the name, key, group, priority and version of what
// it was made of.
func inherit(t *task, it *Item, to *stream, i, of int) {
	from := t.entries[0]
	if it.ID == "" {
		it.ID = from.ID
		if t.grouped && t.group != "" {
			it.ID = t.group
		}
		if of > 1 {
			it.ID = fmt.Sprintf("%s.%d", it.ID, i)
		}
	}
	if it.Key == "" {
		it.Key = from.Key
	}
	if it.Group == "" {
		it.Group, it.Of = from.Group, from.Of
	}
	if it.Priority == 0 {
		it.Priority = min(from.Priority, to.spec.Priorities-1)
	}
	for _, e := range t.entries {
		it.Rounds = max(it.Rounds, e.Rounds+rounds(t.stage))
	}
	if it.Stamped {
		return
	}
	it.Stamped, it.Version = true, t.version
	if !t.stage.spec.Stamp {
		it.Version = slices.MinFunc(t.entries, func(a, b *entry) int { return int(a.Version - b.Version) }).Version
	}
}

// closingOf is what has to be remembered of a group when its work is stored.
func (f *flow) closingOf(t *task) *closing {
	if !t.grouped || t.stage.groups.spec.First == 0 {
		return nil
	}
	c := t.stage.groups.closed[t.group]
	if c == nil {
		return nil
	}
	return &closing{stage: t.stage.spec.Name, group: t.group, left: c.left, remember: t.stage.groups.spec.Remember}
}

// fail counts a failure: the work is tried again later, or goes to the dead letters.
func (f *flow) fail(t *task, err error) {
	s, e := t.stage, bus.AsError(err)
	s.failed++
	t.failures = append(t.failures, Failure{At: f.now, Worker: t.hand.name, Code: e.Code, Error: err.Error(), Stack: e.Stack})
	if len(t.failures) < s.spec.Failures {
		f.note(t.work)
		s.delay(t.work, f.now.Add(s.spec.backoff(len(t.failures))))
		return
	}
	f.bury(t, "failures")
}

// lose gives the work of a dead worker back at once. Only what was alone in its hand can be to blame: work that has cost many
// workers so is given up. What was one of several is no attempt; after some deaths it is handed out alone.
func (f *flow) lose(t *task, alone bool, err error) {
	s := t.stage
	s.lost++
	if alone {
		t.losses++
	} else {
		t.shared++
	}
	if t.losses < s.spec.Losses {
		f.note(t.work)
		s.runnable.pushFront(t.work)
		return
	}
	e := bus.AsError(err)
	t.failures = append(t.failures, Failure{At: f.now, Worker: t.hand.name, Code: e.Code, Error: err.Error(), Stack: e.Stack})
	f.bury(t, "losses")
}

// giveUp buries work that was in hand too often when the engine was killed.
func (f *flow) giveUp(s *stage, w *work) {
	w.failures = append(w.failures, Failure{At: f.now, Code: bus.CodeWorkerLost, Error: "the process that runs the pipeline ended with it in hand, again and again"})
	for _, e := range w.entries {
		e.Attempt = w.losses + len(w.failures) - 1
	}
	s.lost++
	f.bury(&task{work: w, stage: s}, "losses")
}

// bury moves work to the dead letters.
func (f *flow) bury(t *task, reason string) {
	c := &change{done: t.entries, closed: f.closingOf(t), ordered: t.stage.spec.Ordered}
	for _, e := range t.entries {
		t.stage.dead++
		c.dead = append(c.dead, letter(t.stage, e, reason, t.failures, f.now))
	}
	f.enqueue(c)
	t.stage.leave(t.work)
}
