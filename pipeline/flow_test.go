package pipeline

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// theatre drives a flow without a server: what is committed goes into a log that is a list, and survives the flow.
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
	tasks   []*task // in somebody's hand
	stale   []*task // taken back: their answers come late
	reads   []load
	put     int
	stored  map[string]bool // those that were answered
	workers int
}

func newTheatre(t *rapid.T, spec Spec) *theatre {
	th := &theatre{t: t, spec: spec, now: time.Unix(1000, 0), stored: map[string]bool{}, purged: map[*entry]bool{}}
	th.open()
	return th
}

// open is a start: the first one, or one after a crash.
func (th *theatre) open() {
	th.f = newFlow(th.spec, th.rec)
	th.f.window = window{items: 4, bytes: 1 << 20}
	th.tasks, th.stale, th.reads, th.flights, th.inLog = nil, nil, nil, nil, 0
	for _, s := range th.f.stages {
		th.hire(s)
	}
}

func (th *theatre) hire(s *stage) {
	th.workers++
	th.f.join(s, fmt.Sprint("w", th.workers), 2)
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
	th.f.starts, th.f.loads, th.f.cancels, th.f.answers = nil, nil, nil, nil
	th.tasks = slices.DeleteFunc(th.tasks, func(t *task) bool { return t.stage.running[t.id] == nil })
	if len(th.flights) < maxFlights && th.f.buildable() {
		th.flights = append(th.flights, th.f.build())
	}
}

// reach brings the next commit into the log.
func (th *theatre) reach() {
	if th.inLog == len(th.flights) {
		return
	}
	c := th.flights[th.inLog]
	th.inLog++
	for _, e := range c.entries {
		copied := *e
		copied.seq = uint64(len(th.log) + 1)
		th.log = append(th.log, &copied)
	}
	rec := c.record
	th.rec = &rec
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
			copied.lane, copied.seq = want.lane, uint64(i+1)
			got = append(got, &copied)
		}
	}
	last := want.after
	if len(got) > 0 {
		last = got[len(got)-1].seq
	}
	want.lane.arrived(got, want.to, last)
}

func (th *theatre) putOne(key string) {
	th.put++
	id := fmt.Sprint(th.put)
	th.f.now = th.now
	th.f.put(&put{stream: th.f.streamOf("a"), items: []Item{{ID: id, Key: key, Body: []byte{1}}}, token: id})
}

// end gives a task an end.
func (th *theatre) end(t *task, how ending) {
	th.f.now = th.now
	o := outcome{task: t.id, stage: t.stage, ending: how, outs: []Out{{Item: Item{Body: []byte{2}}}}}
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
	th.f.part(s, h, died, errors.New("killed"))
	th.hire(s)
}

// finish lets everything go through.
func (th *theatre) finish() {
	for _, s := range th.f.stages {
		s.paused = false
	}
	for range 10_000 {
		th.pump()
		th.reach()
		th.hear()
		th.read()
		for _, t := range slices.Clone(th.tasks) {
			th.end(t, handled)
		}
		th.now = th.now.Add(time.Second)
		if th.f.idle() && len(th.flights) == 0 && len(th.reads) == 0 {
			return
		}
	}
	th.t.Fatalf("it does not come to an end: %+v", th.f.streams)
}

func twoStages(ordered bool) Spec {
	return Spec{Name: "p", Streams: []StreamSpec{{Name: "a", Items: 20}, {Name: "b", Items: 5}, {Name: "out", Sink: true, Items: 1 << 20}},
		Stages: []StageSpec{
			{Name: "one", In: []string{"a"}, Out: []string{"b"}, Role: "r", Method: "m", Ordered: ordered, Failures: 1 << 20, Losses: 1 << 20},
			{Name: "two", In: []string{"b"}, Out: []string{"out"}, Role: "r", Method: "m", Ordered: ordered, Sticky: ordered, Failures: 1 << 20, Losses: 1 << 20},
		}}
}

// steps are what may happen; the common ones are there more than once.
var steps = []string{
	"put", "put", "put", "put", "land", "land", "land", "reach", "read", "read", "end", "end", "end", "end", "end", "late answer", "kill", "pause", "crash", "time",
}

// Whatever is killed, paused, delivered late or twice, and wherever the engine dies: what was stored once gives its effect
// once, nothing stays behind, and keys keep their order.
func TestEffectsHappenOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ordered := rapid.Bool().Draw(t, "ordered")
		th := newTheatre(t, twoStages(ordered))
		for range rapid.IntRange(0, 400).Draw(t, "steps") {
			switch rapid.SampledFrom(steps).Draw(t, "step") {
			case "put":
				th.putOne(rapid.SampledFrom([]string{"x", "y", ""}).Draw(t, "key"))
			case "land":
				th.reach()
				th.hear()
			case "reach":
				th.reach()
			case "read":
				th.read()
			case "end":
				if len(th.tasks) > 0 {
					th.end(rapid.SampledFrom(th.tasks).Draw(t, "task"), rapid.SampledFrom([]ending{handled, handled, handled, failed, lost, returned}).Draw(t, "how"))
				}
			case "late answer":
				if len(th.stale) > 0 {
					th.end(rapid.SampledFrom(th.stale).Draw(t, "task"), handled)
				}
			case "kill":
				th.killOne(rapid.SampledFrom(th.f.stages).Draw(t, "stage"), rapid.Bool().Draw(t, "died"))
			case "pause":
				s := rapid.SampledFrom(th.f.stages).Draw(t, "stage")
				s.paused = !s.paused
			case "crash":
				th.open()
			case "time":
				th.now = th.now.Add(time.Second)
			}
			th.pump()
		}
		th.finish()
		seen, last := map[string]int{}, map[string]int{}
		for _, e := range th.log {
			if e.Stream != "out" {
				continue
			}
			seen[e.ID]++
			var n int
			_, err := fmt.Sscan(e.ID, &n)
			require.NoError(t, err)
			if ordered && e.Key != "" {
				require.Greater(t, n, last[e.Key], "key %s", e.Key)
				last[e.Key] = n
			}
		}
		for id, n := range seen {
			require.Equal(t, 1, n, "item %s", id)
		}
		for id := range th.stored {
			require.Equal(t, 1, seen[id], "item %s was stored", id)
		}
		for _, s := range th.f.streams {
			if !s.spec.Sink {
				require.Zero(t, s.items, s.spec.Name)
				require.Zero(t, s.bytes, s.spec.Name)
				require.Zero(t, s.reserved, s.spec.Name)
				for _, l := range s.lanes {
					require.Equal(t, l.head, l.done.Floor, "all of %s is done", s.spec.Name)
				}
			}
		}
	})
}

// A stream never has more than its bound, but for what was in hand when it filled up.
func TestBoundsHold(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		th := newTheatre(t, twoStages(false))
		t.Repeat(map[string]func(*rapid.T){
			"put": func(*rapid.T) { th.putOne("") },
			"land": func(*rapid.T) {
				th.reach()
				th.hear()
				th.read()
			},
			"end": func(t *rapid.T) {
				if len(th.tasks) > 0 {
					th.end(rapid.SampledFrom(th.tasks).Draw(t, "task"), handled)
				}
			},
			"": func(t *rapid.T) {
				th.pump()
				for _, s := range th.f.streams {
					require.LessOrEqual(t, s.items+s.reserved, s.spec.Items, s.spec.Name)
					for _, l := range s.lanes {
						require.LessOrEqual(t, l.ready.len(), th.f.window.items+2)
					}
				}
			},
		})
	})
}

// Groups: exactly the first K of a group are handed over together, the others are late, however they are mixed.
func TestGroupsTakeTheFirst(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		spec := twoStages(false)
		spec.Streams[0].Items = 1 << 20
		spec.Stages[0].Group = &GroupSpec{First: 3}
		th := newTheatre(t, spec)
		count := map[string]int{}
		for range rapid.IntRange(0, 60).Draw(t, "items") {
			g := rapid.SampledFrom([]string{"g", "h", "i", "j"}).Draw(t, "group")
			count[g]++
			th.put++
			th.f.now = th.now
			th.f.put(&put{stream: th.f.streamOf("a"), items: []Item{{ID: fmt.Sprint(th.put), Group: g, Of: 1000}}})
			if rapid.Bool().Draw(t, "go on") {
				th.pump()
				th.reach()
				th.hear()
				th.read()
				for _, x := range slices.Clone(th.tasks) {
					th.end(x, handled)
				}
			}
		}
		for range 300 {
			th.pump()
			th.reach()
			th.hear()
			th.read()
			for _, x := range slices.Clone(th.tasks) {
				th.end(x, handled)
			}
		}
		late := uint64(0)
		groups := 0
		for _, n := range count {
			if n >= 3 {
				groups++
				late += uint64(n - 3)
			}
		}
		require.Equal(t, late, th.f.streams[0].late)
		outs := 0
		for _, e := range th.log {
			if e.Stream == "out" {
				outs++
			}
		}
		require.Equal(t, groups, outs)
	})
}

func TestHistogram(t *testing.T) {
	var h histogram
	for i := 1; i <= 1000; i++ {
		h.add(time.Duration(i) * time.Millisecond)
	}
	require.InEpsilon(t, 500*time.Millisecond, h.quantile(0.5), 0.13)
	require.InEpsilon(t, 990*time.Millisecond, h.quantile(0.99), 0.13)
	for us := uint64(0); us < 1<<20; us = us*5/4 + 1 {
		b := bucketOf(us)
		require.LessOrEqual(t, floorOf(b), us)
		require.Greater(t, floorOf(b+1), us)
	}
}
