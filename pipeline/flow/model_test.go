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

// theatre drives a flow without a server: what is committed goes into a log that is a list, and survives the flow. Time
// is a number. The flow is the real one; what the engine does around it is done here, in an order that the dice choose:
// bodies that are stored ahead, commits that reach the log, answers that come back, reads, ends of handlers.
type theatre struct {
	t    *rapid.T
	spec spec.Spec
	f    *Flow
	now  time.Time

	rec     *Checkpoint // the newest in the log
	log     []*Entry    // every item that was committed, in order
	flights []*Commit   // built, and not yet known to be in the log
	inLog   int         // how many of them are
	purged  map[*Entry]bool
	tried   map[string]map[uint64]RetryState // what went wrong, as the log has it, by lane
	tasks   []*Task                          // in somebody's hand
	stale   []*Task                          // taken back: their answers come late
	reads   []ReadRequest
	shelves map[*BodyStream][]*PendingBody // bodies that are to be stored, in order
	bodySeq uint64
	taken   []uint64
	put     int
	stored  map[string]bool // those that were answered
	workers int

	// What came of each item, in the log: it lies in the sink, or among the dead letters, or was dropped.
	out, dead, dropped map[string]int
	served             int // out of the sink
	undone             int // ends that were taken in, and lost in a crash before they were stored
}

func newTheatre(t *rapid.T, spec spec.Spec) *theatre {
	th := &theatre{
		t: t, spec: spec, now: time.Unix(1000, 0), stored: map[string]bool{}, purged: map[*Entry]bool{}, tried: map[string]map[uint64]RetryState{},
		out: map[string]int{}, dead: map[string]int{}, dropped: map[string]int{},
	}
	th.open()
	return th
}

// open is a start: the first one, or one after a crash. It takes over what the log says, and nothing else.
func (th *theatre) open() {
	if th.f != nil {
		lost := slices.Clone(th.f.queue.all())
		for _, c := range th.flights[th.inLog:] {
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
	th.tasks, th.stale, th.reads, th.flights, th.inLog, th.taken = nil, nil, nil, nil, 0, nil
	th.shelves = map[*BodyStream][]*PendingBody{}
	for _, s := range th.f.streams {
		for _, l := range s.lanes {
			for n, tr := range th.tried[laneName(l)] {
				l.retries[n] = &tr
			}
		}
	}
	th.f.CountCrash(th.rec)
	th.flights = append(th.flights, th.f.BuildCommit())
	th.reach()
	th.hear()
	for _, s := range th.f.Stages {
		th.hire(s)
	}
}

func laneName(l *Lane) string { return fmt.Sprint(l.stream.spec.Name, l.Priority) }

func (th *theatre) hire(s *StageState) {
	th.workers++
	th.f.AddWorker(s, fmt.Sprint("w", th.workers), 2)
}

// scale replaces a stage's workers by another number of them: the old ones finish what they have.
func (th *theatre) scale(s *StageState, n int) {
	for _, h := range s.Workers.All {
		h.Draining = true
		th.f.Unassign(s, h)
	}
	for range n {
		th.hire(s)
	}
}

// pump lets the flow decide and takes its effects.
func (th *theatre) pump() {
	th.f.Now = th.now
	th.f.Schedule()
	do := th.f.TakeEffects()
	th.tasks = append(th.tasks, do.Starts...)
	th.reads = append(th.reads, do.Reads...)
	for _, c := range do.Cancels {
		th.stale = append(th.stale, c.Task)
	}
	for _, a := range do.Replies {
		if id, ok := a.Token.(string); ok && a.Err == nil {
			th.stored[id] = true
		}
	}
	for _, b := range do.Bodies {
		th.shelves[b.Stream] = append(th.shelves[b.Stream], b)
	}
	th.tasks = slices.DeleteFunc(th.tasks, func(t *Task) bool { return t.Stage.running[t.ID] == nil })
	if len(th.flights) < 3 && th.f.CanCommit() {
		th.flights = append(th.flights, th.f.BuildCommit())
	}
}

// storeBody stores the next body of a shelf.
func (th *theatre) storeBody(sh *BodyStream) {
	if len(th.shelves[sh]) == 0 {
		return
	}
	b := th.shelves[sh][0]
	th.shelves[sh] = th.shelves[sh][1:]
	th.bodySeq++
	b.Seqs = b.Seqs.Append(th.bodySeq)
	th.f.BodiesStored([]*PendingBody{b})
}

// anyShelf is one of those with bodies to store, in a fixed order.
func (th *theatre) anyShelf(pick func([]*BodyStream) *BodyStream) *BodyStream {
	var all []*BodyStream
	for _, s := range th.f.streams {
		for _, l := range s.lanes {
			if len(th.shelves[l.Bodies]) > 0 {
				all = append(all, l.Bodies)
			}
		}
	}
	if len(th.shelves[th.f.DeadBodies]) > 0 {
		all = append(all, th.f.DeadBodies)
	}
	if len(all) == 0 {
		return nil
	}
	return pick(all)
}

// reach brings the next commit into the log.
func (th *theatre) reach() {
	if th.inLog == len(th.flights) {
		return
	}
	c := th.flights[th.inLog]
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

// account notes what a change that is in the log did.
func (th *theatre) account(ch *change) {
	for _, e := range ch.retried {
		if th.tried[laneName(e.Lane)] == nil {
			th.tried[laneName(e.Lane)] = map[uint64]RetryState{}
		}
		th.tried[laneName(e.Lane)][e.Ordinal] = e.Retries.Truncated()
	}
	for _, e := range ch.done {
		delete(th.tried[laneName(e.Lane)], e.Ordinal)
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

// count counts the items that one was made of.
func count(into map[string]int, id string) {
	for _, one := range strings.Split(id, "+") {
		into[one]++
	}
}

// hear brings the next answer back, and lets go of what is done.
func (th *theatre) hear() {
	if th.inLog == 0 {
		return
	}
	c := th.flights[0]
	at := slices.IndexFunc(th.log, func(e *Entry) bool {
		return len(c.Entries) > 0 && e.Stream == c.Entries[0].Stream && e.Ordinal == c.Entries[0].Ordinal
	})
	th.flights, th.inLog = th.flights[1:], th.inLog-1
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

func (th *theatre) read() {
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

func (th *theatre) putOne(it spec.Item) {
	th.put++
	it.ID = fmt.Sprint(th.put)
	th.f.Now = th.now
	th.f.Put(&Put{Stream: th.f.StreamNamed("a"), Items: []spec.Item{it}, Token: it.ID})
}

// end gives a task an end. What it gives is named after all it was made of.
func (th *theatre) end(t *Task, how ResultKind, bytes int) {
	th.f.Now = th.now
	var names []string
	for _, e := range t.Entries {
		names = append(names, e.ID)
	}
	o := Result{TaskID: t.ID, Stage: t.Stage, Kind: how, Outs: []spec.Out{{Item: spec.Item{ID: strings.Join(names, "+"), Body: make([]byte, bytes)}}}}
	if how != Handled {
		o.Outs, o.Err = nil, errors.New("it did not work")
	}
	th.f.Finish(o)
}

// killOne takes a worker away with what it has, and puts another in its place.
func (th *theatre) killOne(s *StageState, died bool) {
	if len(s.Workers.All) == 0 {
		return
	}
	h := s.Workers.All[0]
	for _, t := range th.tasks {
		if t.Worker == h {
			th.stale = append(th.stale, t)
		}
	}
	th.f.Now = th.now
	end := Revoked
	if died {
		end = WorkerLost
	}
	th.f.RemoveWorker(s, h, end, 0, errors.New("killed"))
	th.hire(s)
}

// take takes out of the sink, and give ends that.
func (th *theatre) take(n int) {
	if id, _ := th.f.Take("out", n); id != 0 {
		th.taken = append(th.taken, id)
	}
}

func (th *theatre) give(done bool) {
	if len(th.taken) > 0 {
		th.f.Now = th.now
		th.f.Settle(th.taken[0], done, nil)
		th.taken = th.taken[1:]
	}
}

// finish lets everything go through.
func (th *theatre) finish() {
	for _, s := range th.f.Stages {
		s.paused = false
	}
	for range 10_000 {
		th.pump()
		for th.anyShelf(func(all []*BodyStream) *BodyStream { th.storeBody(all[0]); return all[0] }) != nil {
		}
		th.pump()
		th.reach()
		th.hear()
		th.read()
		th.give(true)
		for _, t := range slices.Clone(th.tasks) {
			th.end(t, Handled, 1)
		}
		th.now = th.now.Add(time.Second)
		if th.f.Idle() && len(th.flights) == 0 && len(th.reads) == 0 && len(th.taken) == 0 {
			return
		}
	}
	th.t.Fatalf("it does not come to an end: %+v", th.f.streams)
}

// never is a function of a stage that is played by the theatre.
func never(context.Context, []spec.Item) ([]spec.Out, error) { panic("the theatre plays it") }
