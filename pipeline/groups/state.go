package groups

import (
	"slices"
	"time"

	"troupe/bus"
	"troupe/pipeline/spec"
)

const (
	maxSources = 1024
	maxDone    = 256
)

// State is all groups that have not ended. One goroutine owns it. The engine sets Now, calls the methods, and stores what
// TakeEvents returns before it answers the caller.
type State struct {
	Now  time.Time
	spec Spec
	Checkpoint

	groups  []*Group // by number
	byID    map[uint64]*Group
	events  []*Event
	changed bool               // the checkpoint alone
	ended   []*Group           // since the last TakeEnded
	bytes   int                // of all bodies
	scoring map[scoring]string // ticket of the worker that makes a field; in memory alone: a field is set once
}

type scoring struct {
	group uint64
	index int
	field string
}

// Group is a prompt and its samples.
type Group struct {
	ID      uint64
	Name    string
	Turns   int
	Prompt  *Body
	Samples []*Sample
	Large   bool   // it has bodies in the stream of bodies
	started int64  // milliseconds; of the first grant
	closed  bool   // no unfinished sample is wanted any more
	loan    string // ticket of the trainer that has it; empty: nobody
	bytes   int    // of its bodies
	done    int    // complete samples
	lent    string // ticket of the last trainer that got it
}

// Sample is one sibling. Its lineage is the group, the index and the attempt.
type Sample struct {
	Index   int
	Attempt int
	Turns   []Finished
	Fields  map[string]*Body
	ended   bool
	done    bool   // complete: ended, with all fields
	ticket  string // of the worker that has it; empty: nobody
	since   int64  // milliseconds; of the grant or the last turn
}

// Finished is a turn that was stored.
type Finished struct {
	Attempt int          `msgpack:"attempt"`
	Version spec.Version `msgpack:"version"`
	Body    *Body        `msgpack:"body"`
}

// NameOf is the name of a group that has not ended.
func (s *State) NameOf(group uint64) (string, error) {
	if g := s.byID[group]; g != nil {
		return g.Name, nil
	}
	return "", fenced("group %d has ended, or there never was one", group)
}

// Has reports whether there is a group of this name.
func (s *State) Has(name string) bool {
	return slices.ContainsFunc(s.groups, func(g *Group) bool { return g.Name == name })
}

// New makes a state from the last checkpoint. The events of the log are then applied in order with Restore.
func New(s Spec, from *Checkpoint) *State {
	st := &State{spec: s.WithDefaults(), byID: map[uint64]*Group{}, scoring: map[scoring]string{}}
	if from != nil {
		st.Checkpoint = *from
	}
	st.Checkpoint = st.Checkpoint.clone()
	return st
}

// Restore applies a stored event. It reports false when the event belongs to a group that has ended: it can be deleted.
func (s *State) Restore(e *Event, seq uint64) bool {
	if s.Ended.Contains(e.Group) {
		return false
	}
	s.apply(e)
	e.Stored(seq)
	return true
}

// TakeEvents returns the events since the last call, and whether a checkpoint has to be stored with them.
func (s *State) TakeEvents() (events []*Event, checkpoint bool) {
	events, checkpoint = s.events, s.changed
	s.events, s.changed = nil, false
	return events, checkpoint
}

// TakeEnded returns the groups that have ended since the last call.
func (s *State) TakeEnded() []*Group {
	out := s.ended
	s.ended = nil
	return out
}

// Snapshot is the checkpoint to store.
func (s *State) Snapshot() Checkpoint { return s.Checkpoint.clone() }

func (s *State) emit(e *Event) {
	e.At = s.Now.UnixMilli()
	s.apply(e)
	s.events = append(s.events, e)
}

// apply changes the state. What it does a second time, or for a part that is stored already, changes nothing.
func (s *State) apply(e *Event) {
	if e.Kind == Put {
		s.applyPut(e)
		return
	}
	g := s.byID[e.Group]
	if g == nil || e.Index < 0 || e.Index >= len(g.Samples) {
		return
	}
	m := g.Samples[e.Index]
	switch e.Kind {
	case Granted:
		if e.Attempt > m.Attempt {
			m.Attempt, m.ticket, m.since = e.Attempt, e.Ticket, e.At
			if g.started == 0 {
				g.started = e.At
			}
		}
	case Turn:
		if e.Turn != len(m.Turns) || m.ended {
			return
		}
		e.body = s.keep(g, e.Body)
		m.Turns = append(m.Turns, Finished{Attempt: e.Attempt, Version: e.Version, Body: e.body})
		m.since = e.At
		if m.ended = e.Last || len(m.Turns) >= g.Turns; m.ended {
			m.ticket = ""
		}
		s.count(g, m)
	case Field:
		for _, p := range e.Body.Parts {
			if m.Fields[p.Name] == nil {
				e.body = s.keep(g, e.Body)
				break
			}
		}
		for _, p := range e.Body.Parts {
			if m.Fields[p.Name] == nil {
				m.Fields[p.Name] = e.body
			}
		}
		s.count(g, m)
	case Closed:
		g.closed = true
		for _, m := range g.Samples {
			m.ticket = ""
		}
	case Loaned:
		g.loan, g.lent = e.Ticket, e.Ticket
	}
}

// count counts a sample that is complete now.
func (s *State) count(g *Group, m *Sample) {
	if m.done || !m.ended || slices.ContainsFunc(s.spec.Fields, func(name string) bool { return m.Fields[name] == nil }) {
		return
	}
	m.done = true
	g.done++
}

func (s *State) applyPut(e *Event) {
	if s.byID[e.Group] != nil {
		return
	}
	g := &Group{ID: e.Group, Name: e.Name, Turns: e.Turns, Samples: make([]*Sample, e.Siblings)}
	for i := range g.Samples {
		g.Samples[i] = &Sample{Index: i, Fields: map[string]*Body{}}
	}
	e.body = s.keep(g, e.Body)
	g.Prompt = e.body
	s.byID[g.ID] = g
	s.groups = append(s.groups, g)
	slices.SortFunc(s.groups, func(a, b *Group) int { return int(int64(a.ID) - int64(b.ID)) }) // almost sorted
	s.Last = max(s.Last, g.ID)
	if e.Number > s.Sources[e.Source].Number {
		s.Sources[e.Source] = Source{e.Number, e.At}
	}
}

// keep counts a body, which gets its sequence when its event is stored.
func (s *State) keep(g *Group, b Body) *Body {
	g.bytes += b.Size()
	s.bytes += b.Size()
	g.Large = g.Large || len(b.Large) > 0
	return &b
}

// ready reports whether a group can be trained.
func (g *Group) ready() bool { return g.closed || g.done == len(g.Samples) }

// Complete lists the complete samples of a group.
func (g *Group) Complete() (out []*Sample) {
	for _, m := range g.Samples {
		if m.done {
			out = append(out, m)
		}
	}
	return out
}

// Oldest is the version of the oldest part of samples.
func Oldest(samples []*Sample) (v spec.Version) {
	first := true
	for _, m := range samples {
		for _, t := range m.Turns {
			if first || t.Version < v {
				v, first = t.Version, false
			}
		}
	}
	return v
}

// end removes a group whose end is in the next checkpoint.
func (s *State) end(g *Group) {
	delete(s.byID, g.ID)
	s.groups = slices.DeleteFunc(s.groups, func(o *Group) bool { return o == g })
	s.Ended.Add(g.ID)
	s.Counts.add(g)
	s.ended = append(s.ended, g)
	s.bytes -= g.bytes
	s.changed = true
	for k := range s.scoring {
		if k.group == g.ID {
			delete(s.scoring, k)
		}
	}
}

func fenced(format string, args ...any) error { return bus.Errorf(bus.CodeFenced, format, args...) }
