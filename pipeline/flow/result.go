package flow

import (
	"fmt"
	"slices"

	"troupe/bus"
	"troupe/pipeline/spec"
)

// ResultKind is how a task ended.
type ResultKind uint8

const (
	Handled       ResultKind = iota // the handler returned
	Failed                          // the handler returned an error
	WorkerLost                      // the worker died
	WorkerStopped                   // the worker was stopped for a reason that is not this task
	Revoked                         // the task was cancelled to run elsewhere or later
)

// Result is the result of a task.
type Result struct {
	TaskID   uint64
	Stage    *StageState
	Kind     ResultKind
	Outs     []spec.Out
	Err      error
	onlyTask bool // WorkerLost: the worker had no other task
}

// Finish takes the result of a task. A task that is not running any more was revoked, and its result is ignored: a late
// answer of a lost worker has no effect.
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
	case t.aborted: // without a partial result
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
	delete(t.Stage.running, t.ID)
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

// outputs turns the outputs of a handler into a change.
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
			return nil, bus.Errorf(bus.CodeInvalid, "stage %s: the handler returned %d bytes for stream %s, which has a bound of %d; return less at once, or raise bytes", s.Spec.Name, bytes[st], st.spec.Name, st.spec.Bytes)
		}
	}
	if len(outs) > spec.MaxGroup {
		return nil, bus.Errorf(bus.CodeInvalid, "stage %s: the handler returned %d outputs; at most %d are stored at once", s.Spec.Name, len(outs), spec.MaxGroup)
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

// inherit fills in what the handler left empty: an output inherits id, key, group, priority and version from its
// inputs.
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

// closedGroup is what has to be stored about the task's group when its result is committed; nil: nothing.
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

// handlerFailed counts a failure: the work is retried later or becomes a dead letter.
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

// workerLost requeues the work of a dead worker at once. Only a task that was the worker's only one is charged with the
// loss, and becomes a dead letter after Losses of them. A loss shared with other tasks does not count as an attempt;
// after several of them the work runs isolated.
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

// giveUp turns work into dead letters that was running at too many crashes of the engine.
func (f *Flow) giveUp(s *StageState, w *Work) {
	w.failures = append(w.failures, Failure{At: f.Now, Code: bus.CodeWorkerLost, Error: "the process that runs the pipeline ended repeatedly while this item was running"})
	for _, e := range w.Entries {
		e.Attempt = w.losses + len(w.failures) - 1
	}
	s.lost++
	f.deadLetter(&Task{Work: w, Stage: s}, "losses")
}

// deadLetter moves the items of a task to the dead letters.
func (f *Flow) deadLetter(t *Task, reason string) {
	c := &change{done: t.Entries, closed: f.closedGroup(t), ordered: t.Stage.Spec.Ordered}
	for _, e := range t.Entries {
		t.Stage.dead++
		c.dead = append(c.dead, newDeadLetter(t.Stage, e, reason, t.failures, f.Now))
	}
	f.enqueue(c)
	t.Stage.leaveKey(t.Work)
}
