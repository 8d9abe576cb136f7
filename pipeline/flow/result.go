package flow

import (
	"fmt"
	"slices"

	"troupe/bus"
	"troupe/pipeline/spec"
)

// ending is how a task ended.
type ResultKind uint8

const (
	Handled       ResultKind = iota // with outputs, or none
	Failed                          // with an error
	WorkerLost                      // its worker died
	WorkerStopped                   // its worker was stopped, for a reason that lies elsewhere: nobody is to blame
	Revoked                         // it was taken back: nobody is to blame
)

// outcome is what came of a task.
type Result struct {
	TaskID   uint64
	Stage    *StageState
	Kind     ResultKind
	Outs     []spec.Out
	Err      error
	onlyTask bool // of what was lost: the worker had nothing else in hand
}

// finish takes in what came of a task. One that is not known any more was taken back before, and is passed over: this
// is what makes a late answer of a worker that was given up harmless.
func (f *Flow) Finish(o Result) {
	t := o.Stage.running[o.TaskID]
	if t == nil {
		return
	}
	s := t.Stage
	f.release(t)
	if o.Kind == Handled {
		c, err := f.outputs(t, o.Outs)
		if err == nil {
			s.handled++
			s.times.add(f.Now.Sub(t.started))
			f.enqueue(c)
			s.leaveKey(t.Work)
			return
		}
		o.Kind, o.Err = Failed, err
	}
	switch {
	case t.aborted: // and nothing was handed back
		s.aborted++
		f.enqueue(&change{done: t.Entries, closed: f.closedGroup(t)})
		s.leaveKey(t.Work)
	case o.Kind == Failed:
		f.handlerFailed(t, o.Err)
	case o.Kind == WorkerLost:
		f.workerLost(t, o.onlyTask, o.Err)
	case o.Kind == WorkerStopped:
		s.lost++
		s.runnable.pushFront(t.Work)
	default:
		s.runnable.pushFront(t.Work)
	}
}

func (f *Flow) release(t *Task) {
	delete(t.Stage.running, t.Id)
	if f.isolated != nil && f.isolated.work == t.Work {
		f.isolated = nil
	}
	t.Worker.Running--
	if t.Worker.isolated == t.Work {
		t.Worker.isolated, t.Worker.isolatedStarted = nil, false
	}
	for _, out := range t.Stage.blockingOutputs {
		out.reservedOutputs--
	}
}

// outputs makes a change of what a handler gave.
func (f *Flow) outputs(t *Task, outs []spec.Out) (*change, error) {
	s := t.Stage
	c := &change{done: t.Entries, closed: f.closedGroup(t), advance: s.Spec.Advance, ordered: s.Spec.Ordered}
	to := make([]*StreamState, len(outs))
	bytes := map[*StreamState]int64{}
	for i := range outs {
		st, err := s.output(outs[i].To)
		if err != nil {
			return nil, err
		}
		inherit(t, &outs[i].Item, st, i, len(outs))
		if err := st.checkItem(&outs[i].Item, f.maxBody); err != nil {
			return nil, err
		}
		to[i] = st
		if bytes[st] += Weight(&outs[i].Item); bytes[st] > st.spec.Bytes {
			return nil, bus.Errorf(bus.CodeInvalid, "stage %s: a handler gave %d bytes for stream %s, which has a bound of %d; give less at once, or raise bytes", s.Spec.Name, bytes[st], st.spec.Name, st.spec.Bytes)
		}
	}
	if len(outs) > spec.MaxGroup {
		return nil, bus.Errorf(bus.CodeInvalid, "stage %s: a handler gave %d outputs; at most %d are stored at once", s.Spec.Name, len(outs), spec.MaxGroup)
	}
	for i := range outs {
		if to[i].spec.Full == spec.DropOldest {
			f.dropOldest(to[i], 1, Weight(&outs[i].Item), c)
		}
		c.puts = append(c.puts, f.newEntry(to[i], outs[i].Item))
	}
	f.Version += s.Spec.Advance
	if t.aborted {
		s.aborted++
	}
	return c, nil
}

// inherit fills in what a handler left out: an output goes on under the name, key, group, priority and version of what
// it was made of.
func inherit(t *Task, it *spec.Item, to *StreamState, i, of int) {
	from := t.Entries[0]
	if it.ID == "" {
		it.ID = from.ID
		if t.Grouped && t.group != "" {
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
	for _, e := range t.Entries {
		it.Rounds = max(it.Rounds, e.Rounds+roundsAdded(t.Stage))
	}
	if it.Stamped {
		return
	}
	it.Stamped, it.Version = true, t.version
	if !t.Stage.Spec.Stamp {
		it.Version = slices.MinFunc(t.Entries, func(a, b *Entry) int { return int(a.Version - b.Version) }).Version
	}
}

// closingOf is what has to be remembered of a group when its work is stored.
func (f *Flow) closedGroup(t *Task) *ClosedGroup {
	if !t.Grouped || t.Stage.groups.spec.First == 0 {
		return nil
	}
	c := t.Stage.groups.closed[t.group]
	if c == nil {
		return nil
	}
	return &ClosedGroup{Stage: t.Stage.Spec.Name, Group: t.group, Missing: c.missing, Remember: t.Stage.groups.spec.Remember}
}

// fail counts a failure: the work is tried again later, or goes to the dead letters.
func (f *Flow) handlerFailed(t *Task, err error) {
	s, e := t.Stage, bus.AsError(err)
	s.failed++
	t.failures = append(t.failures, Failure{At: f.Now, Worker: t.Worker.name, Code: e.Code, Error: err.Error(), Stack: e.Stack})
	if len(t.failures) < s.Spec.Failures {
		f.saveRetryState(t.Work)
		s.delay(t.Work, f.Now.Add(s.Spec.RetryDelay(len(t.failures))))
		return
	}
	f.deadLetter(t, "failures")
}

// lose gives the work of a dead worker back at once. Only what was alone in its hand can be to blame: work that has cost many
// workers so is given up. What was one of several is no attempt; after some deaths it is handed out alone.
func (f *Flow) workerLost(t *Task, alone bool, err error) {
	s := t.Stage
	s.lost++
	if alone {
		t.losses++
	} else {
		t.sharedLosses++
	}
	if t.losses < s.Spec.Losses {
		f.saveRetryState(t.Work)
		s.runnable.pushFront(t.Work)
		return
	}
	e := bus.AsError(err)
	t.failures = append(t.failures, Failure{At: f.Now, Worker: t.Worker.name, Code: e.Code, Error: err.Error(), Stack: e.Stack})
	f.deadLetter(t, "losses")
}

// giveUp buries work that was in hand too often when the engine was killed.
func (f *Flow) giveUp(s *StageState, w *Work) {
	w.failures = append(w.failures, Failure{At: f.Now, Code: bus.CodeWorkerLost, Error: "the process that runs the pipeline ended with it in hand, again and again"})
	for _, e := range w.Entries {
		e.Attempt = w.losses + len(w.failures) - 1
	}
	s.lost++
	f.deadLetter(&Task{Work: w, Stage: s}, "losses")
}

// bury moves work to the dead letters.
func (f *Flow) deadLetter(t *Task, reason string) {
	c := &change{done: t.Entries, closed: f.closedGroup(t), ordered: t.Stage.Spec.Ordered}
	for _, e := range t.Entries {
		t.Stage.dead++
		c.dead = append(c.dead, newDeadLetter(t.Stage, e, reason, t.failures, f.Now))
	}
	f.enqueue(c)
	t.Stage.leaveKey(t.Work)
}
