package pipeline

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"pgregory.net/rapid"
)

// theatre drives a flow without a server: what is committed goes into a log that is a list, and survives the flow. Time
// is a number. The flow is the real one; what the engine does around it is done here, in an order that the dice choose:
// bodies that are stored ahead, commits that reach the log, answers that come back, reads, ends of handlers.
type theatre struct {
	t    *rapid.T
	spec Spec
	f    *flow
	now  time.Time

	rec     *record   // the newest in the log
	log     []*entry  // every item that was committed, in order
	flights []*commit // built, and not yet known to be in the log
	inLog   int       // how many of them are
	purged  map[*entry]bool
	tried   map[string]map[uint64]tries // what went wrong, as the log has it, by lane
	tasks   []*task                     // in somebody's hand
	stale   []*task                     // taken back: their answers come late
	reads   []load
	shelves map[*shelf][]*stash // bodies that are to be stored, in order
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

func newTheatre(t *rapid.T, spec Spec) *theatre {
	th := &theatre{
		t: t, spec: spec, now: time.Unix(1000, 0), stored: map[string]bool{}, purged: map[*entry]bool{}, tried: map[string]map[uint64]tries{},
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
	th.f = newFlow(th.spec, th.rec)
	th.f.window = window{items: 4, bytes: 1 << 20}
	th.f.apart = 10
	th.f.now = th.now
	th.tasks, th.stale, th.reads, th.flights, th.inLog, th.taken = nil, nil, nil, nil, 0, nil
	th.shelves = map[*shelf][]*stash{}
	for _, s := range th.f.streams {
		for _, l := range s.lanes {
			for n, tr := range th.tried[laneName(l)] {
				l.tried[n] = &tr
			}
		}
	}
	th.f.crashed(th.rec)
	th.flights = append(th.flights, th.f.build())
	th.reach()
	th.hear()
	for _, s := range th.f.stages {
		th.hire(s)
	}
}

func laneName(l *lane) string { return fmt.Sprint(l.stream.spec.Name, l.priority) }

func (th *theatre) hire(s *stage) {
	th.workers++
	th.f.join(s, fmt.Sprint("w", th.workers), 2)
}

// scale replaces a stage's workers by another number of them: the old ones finish what they have.
func (th *theatre) scale(s *stage, n int) {
	for _, h := range s.hands.all {
		h.draining = true
		th.f.returnQueue(s, h)
	}
	for range n {
		th.hire(s)
	}
}

// pump lets the flow decide and takes its effects.
func (th *theatre) pump() {
	th.f.now = th.now
	th.f.pump()
	th.tasks = append(th.tasks, th.f.starts...)
	th.reads = append(th.reads, th.f.loads...)
	for _, c := range th.f.cancels {
		th.stale = append(th.stale, c.task)
	}
	for _, a := range th.f.answers {
		if id, ok := a.token.(string); ok && a.err == nil {
			th.stored[id] = true
		}
	}
	for _, b := range th.f.bodies {
		th.shelves[b.shelf] = append(th.shelves[b.shelf], b)
	}
	th.f.starts, th.f.loads, th.f.cancels, th.f.answers, th.f.bodies = nil, nil, nil, nil, nil
	th.tasks = slices.DeleteFunc(th.tasks, func(t *task) bool { return t.stage.running[t.id] == nil })
	if len(th.flights) < maxFlights && th.f.buildable() {
		th.flights = append(th.flights, th.f.build())
	}
}

// storeBody stores the next body of a shelf.
func (th *theatre) storeBody(sh *shelf) {
	if len(th.shelves[sh]) == 0 {
		return
	}
	b := th.shelves[sh][0]
	th.shelves[sh] = th.shelves[sh][1:]
	th.bodySeq++
	b.at = b.at.add(th.bodySeq)
	th.f.bodiesStored([]*stash{b})
}

// anyShelf is one of those with bodies to store, in a fixed order.
func (th *theatre) anyShelf(pick func([]*shelf) *shelf) *shelf {
	var all []*shelf
	for _, s := range th.f.streams {
		for _, l := range s.lanes {
			if len(th.shelves[l.shelf]) > 0 {
				all = append(all, l.shelf)
			}
		}
	}
	if len(th.shelves[th.f.dead]) > 0 {
		all = append(all, th.f.dead)
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
	last := map[*shelf]uint64{}
	for _, e := range c.entries {
		copied := *e
		copied.seq = uint64(len(th.log) + 1)
		th.log = append(th.log, &copied)
		if e.stash != nil {
			if e.stash.at.last() <= last[e.stash.shelf] {
				th.t.Fatalf("the bodies of %s are not in the order of its items", e.Stream)
			}
			last[e.stash.shelf] = e.stash.at.last()
		}
	}
	for _, ch := range c.changes {
		th.account(ch)
	}
	rec := c.record
	th.rec = &rec
}

// account notes what a change that is in the log did.
func (th *theatre) account(ch *change) {
	for _, e := range ch.tried {
		if th.tried[laneName(e.lane)] == nil {
			th.tried[laneName(e.lane)] = map[uint64]tries{}
		}
		th.tried[laneName(e.lane)][e.n] = e.tries.clipped()
	}
	for _, e := range ch.done {
		delete(th.tried[laneName(e.lane)], e.n)
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
	at := slices.IndexFunc(th.log, func(e *entry) bool {
		return len(c.entries) > 0 && e.Stream == c.entries[0].Stream && e.n == c.entries[0].n
	})
	th.flights, th.inLog = th.flights[1:], th.inLog-1
	th.f.landed(c, uint64(at+1))
	for _, s := range th.f.streams {
		for _, l := range s.lanes {
			m := l.passed()
			for _, e := range th.log {
				if e.Stream == s.spec.Name && e.Priority == l.priority && e.seq <= m.seq {
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
	var got []*entry
	for i, e := range th.log {
		if e.Stream == want.lane.stream.spec.Name && e.Priority == want.lane.priority && e.n >= want.from && e.n <= want.to && !th.purged[e] {
			copied := *e
			copied.lane, copied.seq, copied.tries, copied.aborted = want.lane, uint64(i+1), nil, false
			got = append(got, &copied)
		}
	}
	last := want.after
	if len(got) > 0 {
		last = got[len(got)-1].seq
	}
	want.lane.arrived(loaded{entries: got, upTo: want.to, last: last})
}

func (th *theatre) putOne(it Item) {
	th.put++
	it.ID = fmt.Sprint(th.put)
	th.f.now = th.now
	th.f.put(&put{stream: th.f.streamOf("a"), items: []Item{it}, token: it.ID})
}

// end gives a task an end. What it gives is named after all it was made of.
func (th *theatre) end(t *task, how ending, bytes int) {
	th.f.now = th.now
	var names []string
	for _, e := range t.entries {
		names = append(names, e.ID)
	}
	o := outcome{task: t.id, stage: t.stage, ending: how, outs: []Out{{Item: Item{ID: strings.Join(names, "+"), Body: make([]byte, bytes)}}}}
	if how != handled {
		o.outs, o.err = nil, errors.New("it did not work")
	}
	th.f.finish(o)
}

// killOne takes a worker away with what it has, and puts another in its place.
func (th *theatre) killOne(s *stage, died bool) {
	if len(s.hands.all) == 0 {
		return
	}
	h := s.hands.all[0]
	for _, t := range th.tasks {
		if t.hand == h {
			th.stale = append(th.stale, t)
		}
	}
	th.f.now = th.now
	end := returned
	if died {
		end = lost
	}
	th.f.part(s, h, end, 0, errors.New("killed"))
	th.hire(s)
}

// take takes out of the sink, and give ends that.
func (th *theatre) take(n int) {
	if id, _ := th.f.takeOut(th.f.streamOf("out"), n); id != 0 {
		th.taken = append(th.taken, id)
	}
}

func (th *theatre) give(done bool) {
	if len(th.taken) > 0 {
		th.f.now = th.now
		th.f.takenOut(th.taken[0], done, nil)
		th.taken = th.taken[1:]
	}
}

// finish lets everything go through.
func (th *theatre) finish() {
	for _, s := range th.f.stages {
		s.paused = false
	}
	for range 10_000 {
		th.pump()
		for th.anyShelf(func(all []*shelf) *shelf { th.storeBody(all[0]); return all[0] }) != nil {
		}
		th.pump()
		th.reach()
		th.hear()
		th.read()
		th.give(true)
		for _, t := range slices.Clone(th.tasks) {
			th.end(t, handled, 1)
		}
		th.now = th.now.Add(time.Second)
		if th.f.idle() && len(th.flights) == 0 && len(th.reads) == 0 && len(th.taken) == 0 {
			return
		}
	}
	th.t.Fatalf("it does not come to an end: %+v", th.f.streams)
}

// never is a function of a stage that is played by the theatre.
func never(context.Context, []Item) ([]Out, error) { panic("the theatre plays it") }
