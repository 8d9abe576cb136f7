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
	md := &model{
		t: t, spec: spec, now: time.Unix(1000, 0), stored: map[string]bool{}, purged: map[*Entry]bool{}, retries: map[string]map[uint64]RetryState{},
		out: map[string]int{}, dead: map[string]int{}, dropped: map[string]int{},
	}
	md.open()
	return md
}

// open starts the flow, the first time or after a crash, from the log alone.
func (md *model) open() {
	if md.f != nil {
		lost := slices.Clone(md.f.queue.all())
		for _, c := range md.inflight[md.inLog:] {
			lost = append(lost, c.changes...)
		}
		for _, ch := range lost {
			md.undone += len(ch.done)
		}
	}
	md.f = New(md.spec, md.rec)
	md.f.window = memoryWindow{items: 4, bytes: 1 << 20}
	md.f.LargeBodyMin = 10
	md.f.Now = md.now
	md.tasks, md.revoked, md.reads, md.inflight, md.inLog, md.taken = nil, nil, nil, nil, 0, nil
	md.pendingBodies = map[*BodyStream][]*PendingBody{}
	for _, s := range md.f.streams {
		for _, l := range s.lanes {
			for n, tr := range md.retries[laneName(l)] {
				l.retries[n] = &tr
			}
		}
	}
	md.f.CountCrash(md.rec)
	md.inflight = append(md.inflight, md.f.BuildCommit())
	md.storeCommit()
	md.acknowledge()
	for _, s := range md.f.Stages {
		md.addWorker(s)
	}
}

func laneName(l *Lane) string { return fmt.Sprint(l.stream.spec.Name, l.Priority) }

func (md *model) addWorker(s *StageState) {
	md.workers++
	md.f.AddWorker(s, fmt.Sprint("w", md.workers), 2)
}

// scale replaces a stage's workers; the old ones finish their tasks.
func (md *model) scale(s *StageState, n int) {
	for _, slots := range s.Workers.All {
		slots.Draining = true
		md.f.Unassign(s, slots)
	}
	for range n {
		md.addWorker(s)
	}
}

// schedule lets the flow decide and takes its effects.
func (md *model) schedule() {
	md.f.Now = md.now
	md.f.Schedule()
	do := md.f.TakeEffects()
	md.tasks = append(md.tasks, do.Starts...)
	md.reads = append(md.reads, do.Reads...)
	for _, c := range do.Cancels {
		md.revoked = append(md.revoked, c.Task)
	}
	for _, a := range do.Replies {
		if id, ok := a.Token.(string); ok && a.Err == nil {
			md.stored[id] = true
		}
	}
	for _, b := range do.Bodies {
		md.pendingBodies[b.Stream] = append(md.pendingBodies[b.Stream], b)
	}
	md.tasks = slices.DeleteFunc(md.tasks, func(t *Task) bool { return t.Stage.running[t.ID] == nil })
	if len(md.inflight) < 3 && md.f.CanCommit() {
		md.inflight = append(md.inflight, md.f.BuildCommit())
	}
}

// storeBody stores the next body of a stream.
func (md *model) storeBody(sh *BodyStream) {
	if len(md.pendingBodies[sh]) == 0 {
		return
	}
	b := md.pendingBodies[sh][0]
	md.pendingBodies[sh] = md.pendingBodies[sh][1:]
	md.bodySeq++
	b.Seqs = b.Seqs.Append(md.bodySeq)
	md.f.BodiesStored([]*PendingBody{b})
}

// anyBodyStream picks a stream with bodies to store.
func (md *model) anyBodyStream(pick func([]*BodyStream) *BodyStream) *BodyStream {
	var all []*BodyStream
	for _, s := range md.f.streams {
		for _, l := range s.lanes {
			if len(md.pendingBodies[l.Bodies]) > 0 {
				all = append(all, l.Bodies)
			}
		}
	}
	if len(md.pendingBodies[md.f.DeadBodies]) > 0 {
		all = append(all, md.f.DeadBodies)
	}
	if len(all) == 0 {
		return nil
	}
	return pick(all)
}

// storeCommit stores the next commit.
func (md *model) storeCommit() {
	if md.inLog == len(md.inflight) {
		return
	}
	c := md.inflight[md.inLog]
	md.inLog++
	last := map[*BodyStream]uint64{}
	for _, e := range c.Entries {
		copied := *e
		copied.Seq = uint64(len(md.log) + 1)
		md.log = append(md.log, &copied)
		if e.BodyRef != nil {
			if e.BodyRef.Seqs.last() <= last[e.BodyRef.Stream] {
				md.t.Fatalf("the bodies of %s are not in the order of its items", e.Stream)
			}
			last[e.BodyRef.Stream] = e.BodyRef.Seqs.last()
		}
	}
	for _, ch := range c.changes {
		md.account(ch)
	}
	rec := c.Checkpoint
	md.rec = &rec
}

// account notes the changes of a stored commit.
func (md *model) account(ch *change) {
	for _, failed := range ch.retried {
		e := failed.Item
		if md.retries[laneName(e.Lane)] == nil {
			md.retries[laneName(e.Lane)] = map[uint64]RetryState{}
		}
		md.retries[laneName(e.Lane)][e.Ordinal] = failed.State.Truncated()
	}
	for _, e := range ch.done {
		delete(md.retries[laneName(e.Lane)], e.Ordinal)
		if e.Stream == "out" {
			md.served++
		} else if len(ch.puts)+len(ch.dead) == 0 {
			count(md.dropped, e.ID)
		}
	}
	for _, d := range ch.dead {
		count(md.dead, d.ID)
	}
	for _, e := range ch.puts {
		if e.Stream == "out" {
			count(md.out, e.ID)
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
func (md *model) acknowledge() {
	if md.inLog == 0 {
		return
	}
	c := md.inflight[0]
	at := slices.IndexFunc(md.log, func(e *Entry) bool {
		return len(c.Entries) > 0 && e.Stream == c.Entries[0].Stream && e.Ordinal == c.Entries[0].Ordinal
	})
	md.inflight, md.inLog = md.inflight[1:], md.inLog-1
	md.f.Committed(c, uint64(at+1))
	for _, s := range md.f.streams {
		for _, l := range s.lanes {
			m := l.TakePurgePoint()
			for _, e := range md.log {
				if e.Stream == s.spec.Name && e.Priority == l.Priority && e.Seq <= m.Seq {
					md.purged[e] = true
				}
			}
		}
	}
}

func (md *model) read() {
	if len(md.reads) == 0 {
		return
	}
	want := md.reads[0]
	md.reads = md.reads[1:]
	var got []*Entry
	for i, e := range md.log {
		if e.Stream == want.Lane.stream.spec.Name && e.Priority == want.Lane.Priority && e.Ordinal >= want.From && e.Ordinal <= want.To && !md.purged[e] {
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

func (md *model) putOne(it spec.Item) {
	md.put++
	it.ID = fmt.Sprint(md.put)
	md.f.Now = md.now
	md.f.Put(&Put{Stream: md.f.StreamNamed("a"), Items: []spec.Item{it}, Token: it.ID})
}

// end ends a task. Its output is named after all its inputs.
func (md *model) end(t *Task, how ResultKind, bytes int) {
	md.f.Now = md.now
	var names []string
	for _, e := range t.Entries {
		names = append(names, e.ID)
	}
	o := Result{TaskID: t.ID, Stage: t.Stage, Kind: how, Outs: []spec.Out{{Item: spec.Item{ID: strings.Join(names, "+"), Body: make([]byte, bytes)}}}}
	if how != Handled {
		o.Outs, o.Err = nil, errors.New("failed by the model")
	}
	md.f.Finish(o)
}

// removeWorker removes a worker with its tasks and adds another.
func (md *model) removeWorker(s *StageState, died bool) {
	if len(s.Workers.All) == 0 {
		return
	}
	slots := s.Workers.All[0]
	for _, t := range md.tasks {
		if t.Worker == slots {
			md.revoked = append(md.revoked, t)
		}
	}
	md.f.Now = md.now
	end := Revoked
	if died {
		end = WorkerLost
	}
	md.f.RemoveWorker(s, slots, end, 0, errors.New("killed"))
	md.addWorker(s)
}

// take takes items from the sink; settle ends a take.
func (md *model) take(n int) {
	if id, _ := md.f.Take("out", n); id != 0 {
		md.taken = append(md.taken, id)
	}
}

func (md *model) settle(done bool) {
	if len(md.taken) > 0 {
		md.f.Now = md.now
		md.f.Settle(md.taken[0], done, nil)
		md.taken = md.taken[1:]
	}
}

// finish runs the flow until it is idle.
func (md *model) finish() {
	for _, s := range md.f.Stages {
		s.paused = false
	}
	for range 10_000 {
		md.schedule()
		for md.anyBodyStream(func(all []*BodyStream) *BodyStream { md.storeBody(all[0]); return all[0] }) != nil {
		}
		md.schedule()
		md.storeCommit()
		md.acknowledge()
		md.read()
		md.settle(true)
		for _, t := range slices.Clone(md.tasks) {
			md.end(t, Handled, 1)
		}
		md.now = md.now.Add(time.Second)
		if md.f.Idle() && len(md.inflight) == 0 && len(md.reads) == 0 && len(md.taken) == 0 {
			return
		}
	}
	md.t.Fatalf("the flow does not become idle: %+v", md.f.streams)
}

// notCalled marks a stage as a function; the model ends its tasks.
func notCalled(context.Context, []spec.Item) ([]spec.Out, error) { panic("not called by the flow") }
