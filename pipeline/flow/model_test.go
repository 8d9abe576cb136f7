package flow

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"pgregory.net/rapid"

	"troupe/pipeline/spec"
)

// model drives a Flow without a server. The log is a list, which survives a crash of the flow, and time is a number.
// The flow is the real one; the model does what the engine does, in random order: storing bodies, storing and
// acknowledging commits, reads, results.
type model struct {
	t    *rapid.T
	spec spec.Spec
	f    *Flow
	now  time.Time

	rec           *Checkpoint // the last one in the log
	log           []*Entry    // every committed item, in order
	inflight      []*Commit   // built, and not acknowledged
	inLog         int         // how many of them are in the log
	purged        map[*Entry]bool
	retries       map[string]map[uint64]RetryState // by lane, as stored in the log
	tasks         []*Task                          // running
	revoked       []*Task                          // their results arrive late
	reads         []ReadRequest
	pendingBodies map[*BodyStream][]*PendingBody // not stored yet, in order
	bodySeq       uint64
	taken         []uint64
	put           int
	stored        map[string]bool // acknowledged
	workers       int

	// Where each item ended.
	out, dead, dropped map[string]int
	served             int // taken from the sink
	undone             int // results that were lost in a crash
}

func newModel(t *rapid.T, spec spec.Spec) *model {
	th := &model{
		t: t, spec: spec, now: time.Unix(1000, 0), stored: map[string]bool{}, purged: map[*Entry]bool{}, retries: map[string]map[uint64]RetryState{},
		out: map[string]int{}, dead: map[string]int{}, dropped: map[string]int{},
	}
	th.open()
	return th
}

// open starts the flow, the first time or after a crash, from the log alone.
func (th *model) open() {
	if th.f != nil {
		lost := slices.Clone(th.f.queue.all())
		for _, c := range th.inflight[th.inLog:] {
			lost = append(lost, c.changes...)
		}
		for _, ch := range lost {
			th.undone += len(ch.done)
		}
	}
	th.f = New(th.spec, th.rec)
	th.f.window = memoryWindow{items: 4, bytes: 1 << 20}
	th.f.LargeBodyMin = 10
	th.f.Now = th.now
	th.tasks, th.revoked, th.reads, th.inflight, th.inLog, th.taken = nil, nil, nil, nil, 0, nil
	th.pendingBodies = map[*BodyStream][]*PendingBody{}
	for _, s := range th.f.streams {
		for _, l := range s.lanes {
			for n, tr := range th.retries[laneName(l)] {
				l.retries[n] = &tr
			}
		}
	}
	th.f.CountCrash(th.rec)
	th.inflight = append(th.inflight, th.f.BuildCommit())
	th.storeCommit()
	th.acknowledge()
	for _, s := range th.f.Stages {
		th.addWorker(s)
	}
}

func laneName(l *Lane) string { return fmt.Sprint(l.stream.spec.Name, l.Priority) }

func (th *model) addWorker(s *StageState) {
	th.workers++
	th.f.AddWorker(s, fmt.Sprint("w", th.workers), 2)
}

// scale replaces a stage's workers; the old ones finish their tasks.
func (th *model) scale(s *StageState, n int) {
	for _, h := range s.Workers.All {
		h.Draining = true
		th.f.Unassign(s, h)
	}
	for range n {
		th.addWorker(s)
	}
}

// schedule lets the flow decide and takes its effects.
func (th *model) schedule() {
	th.f.Now = th.now
	th.f.Schedule()
	do := th.f.TakeEffects()
	th.tasks = append(th.tasks, do.Starts...)
	th.reads = append(th.reads, do.Reads...)
	for _, c := range do.Cancels {
		th.revoked = append(th.revoked, c.Task)
	}
	for _, a := range do.Replies {
		if id, ok := a.Token.(string); ok && a.Err == nil {
			th.stored[id] = true
		}
	}
	for _, b := range do.Bodies {
		th.pendingBodies[b.Stream] = append(th.pendingBodies[b.Stream], b)
	}
	th.tasks = slices.DeleteFunc(th.tasks, func(t *Task) bool { return t.Stage.running[t.ID] == nil })
	if len(th.inflight) < 3 && th.f.CanCommit() {
		th.inflight = append(th.inflight, th.f.BuildCommit())
	}
}

// storeBody stores the next body of a stream.
func (th *model) storeBody(sh *BodyStream) {
	if len(th.pendingBodies[sh]) == 0 {
		return
	}
	b := th.pendingBodies[sh][0]
	th.pendingBodies[sh] = th.pendingBodies[sh][1:]
	th.bodySeq++
	b.Seqs = b.Seqs.Append(th.bodySeq)
	th.f.BodiesStored([]*PendingBody{b})
}

// anyBodyStream picks a stream with bodies to store.
func (th *model) anyBodyStream(pick func([]*BodyStream) *BodyStream) *BodyStream {
	var all []*BodyStream
	for _, s := range th.f.streams {
		for _, l := range s.lanes {
			if len(th.pendingBodies[l.Bodies]) > 0 {
				all = append(all, l.Bodies)
			}
		}
	}
	if len(th.pendingBodies[th.f.DeadBodies]) > 0 {
		all = append(all, th.f.DeadBodies)
	}
	if len(all) == 0 {
		return nil
	}
	return pick(all)
}

// storeCommit stores the next commit.
func (th *model) storeCommit() {
	if th.inLog == len(th.inflight) {
		return
	}
	c := th.inflight[th.inLog]
	th.inLog++
	last := map[*BodyStream]uint64{}
	for _, e := range c.Entries {
		copied := *e
		copied.Seq = uint64(len(th.log) + 1)
		th.log = append(th.log, &copied)
		if e.BodyRef != nil {
			if e.BodyRef.Seqs.last() <= last[e.BodyRef.Stream] {
				th.t.Fatalf("the bodies of %s are not in the order of its items", e.Stream)
			}
			last[e.BodyRef.Stream] = e.BodyRef.Seqs.last()
		}
	}
	for _, ch := range c.changes {
		th.account(ch)
	}
	rec := c.Checkpoint
	th.rec = &rec
}

// account notes the changes of a stored commit.
func (th *model) account(ch *change) {
	for _, e := range ch.retried {
		if th.retries[laneName(e.Lane)] == nil {
			th.retries[laneName(e.Lane)] = map[uint64]RetryState{}
		}
		th.retries[laneName(e.Lane)][e.Ordinal] = e.Retries.Truncated()
	}
	for _, e := range ch.done {
		delete(th.retries[laneName(e.Lane)], e.Ordinal)
		if e.Stream == "out" {
			th.served++
		} else if len(ch.puts)+len(ch.dead) == 0 {
			count(th.dropped, e.ID)
		}
	}
	for _, d := range ch.dead {
		count(th.dead, d.ID)
	}
	for _, e := range ch.puts {
		if e.Stream == "out" {
			count(th.out, e.ID)
		}
	}
}

// count counts the items that an output was made of.
func count(into map[string]int, id string) {
	for _, one := range strings.Split(id, "+") {
		into[one]++
	}
}

// acknowledge acknowledges the next commit, and purges.
func (th *model) acknowledge() {
	if th.inLog == 0 {
		return
	}
	c := th.inflight[0]
	at := slices.IndexFunc(th.log, func(e *Entry) bool {
		return len(c.Entries) > 0 && e.Stream == c.Entries[0].Stream && e.Ordinal == c.Entries[0].Ordinal
	})
	th.inflight, th.inLog = th.inflight[1:], th.inLog-1
	th.f.Committed(c, uint64(at+1))
	for _, s := range th.f.streams {
		for _, l := range s.lanes {
			m := l.TakePurgePoint()
			for _, e := range th.log {
				if e.Stream == s.spec.Name && e.Priority == l.Priority && e.Seq <= m.Seq {
					th.purged[e] = true
				}
			}
		}
	}
}

func (th *model) read() {
	if len(th.reads) == 0 {
		return
	}
	want := th.reads[0]
	th.reads = th.reads[1:]
	var got []*Entry
	for i, e := range th.log {
		if e.Stream == want.Lane.stream.spec.Name && e.Priority == want.Lane.Priority && e.Ordinal >= want.From && e.Ordinal <= want.To && !th.purged[e] {
			copied := *e
			copied.Lane, copied.Seq, copied.Retries, copied.aborted = want.Lane, uint64(i+1), nil, false
			got = append(got, &copied)
		}
	}
	last := want.AfterSeq
	if len(got) > 0 {
		last = got[len(got)-1].Seq
	}
	want.Lane.ReadDone(ReadResult{Entries: got, UpTo: want.To, LastSeq: last})
}

func (th *model) putOne(it spec.Item) {
	th.put++
	it.ID = fmt.Sprint(th.put)
	th.f.Now = th.now
	th.f.Put(&Put{Stream: th.f.StreamNamed("a"), Items: []spec.Item{it}, Token: it.ID})
}

// end ends a task. Its output is named after all its inputs.
func (th *model) end(t *Task, how ResultKind, bytes int) {
	th.f.Now = th.now
	var names []string
	for _, e := range t.Entries {
		names = append(names, e.ID)
	}
	o := Result{TaskID: t.ID, Stage: t.Stage, Kind: how, Outs: []spec.Out{{Item: spec.Item{ID: strings.Join(names, "+"), Body: make([]byte, bytes)}}}}
	if how != Handled {
		o.Outs, o.Err = nil, errors.New("failed by the model")
	}
	th.f.Finish(o)
}

// removeWorker removes a worker with its tasks and adds another.
func (th *model) removeWorker(s *StageState, died bool) {
	if len(s.Workers.All) == 0 {
		return
	}
	h := s.Workers.All[0]
	for _, t := range th.tasks {
		if t.Worker == h {
			th.revoked = append(th.revoked, t)
		}
	}
	th.f.Now = th.now
	end := Revoked
	if died {
		end = WorkerLost
	}
	th.f.RemoveWorker(s, h, end, 0, errors.New("killed"))
	th.addWorker(s)
}

// take takes items from the sink; settle ends a take.
func (th *model) take(n int) {
	if id, _ := th.f.Take("out", n); id != 0 {
		th.taken = append(th.taken, id)
	}
}

func (th *model) settle(done bool) {
	if len(th.taken) > 0 {
		th.f.Now = th.now
		th.f.Settle(th.taken[0], done, nil)
		th.taken = th.taken[1:]
	}
}

// finish runs the flow until it is idle.
func (th *model) finish() {
	for _, s := range th.f.Stages {
		s.paused = false
	}
	for range 10_000 {
		th.schedule()
		for th.anyBodyStream(func(all []*BodyStream) *BodyStream { th.storeBody(all[0]); return all[0] }) != nil {
		}
		th.schedule()
		th.storeCommit()
		th.acknowledge()
		th.read()
		th.settle(true)
		for _, t := range slices.Clone(th.tasks) {
			th.end(t, Handled, 1)
		}
		th.now = th.now.Add(time.Second)
		if th.f.Idle() && len(th.inflight) == 0 && len(th.reads) == 0 && len(th.taken) == 0 {
			return
		}
	}
	th.t.Fatalf("the flow does not become idle: %+v", th.f.streams)
}

// notCalled marks a stage as a function; the model ends its tasks.
func notCalled(context.Context, []spec.Item) ([]spec.Out, error) { panic("not called by the flow") }
