package groups

import (
	"slices"
	"time"

	"troupe/bus"
	"troupe/pipeline/spec"
)

// errWait is the answer to a request that nothing can serve yet. It is retried when the state has changed.
var errWait = bus.Errorf(bus.CodeBusy, "nothing is ready yet")

// Waits reports whether a request is to be retried when the state has changed.
func Waits(err error) bool { return err == errWait }

// NewGroup is a put.
type NewGroup struct {
	Name   string `msgpack:"name"` // new for each group
	Source string `msgpack:"source"`
	Number uint64 `msgpack:"number"` // counts up in its source; one that is not above the last is a repeat
	Body   Body   `msgpack:"body"`
}

// Put makes a group; nil: it was put before. It waits while too many groups have not ended.
func (s *State) Put(p NewGroup) (*Event, error) {
	if p.Number <= s.Sources[p.Source].Number {
		return nil, nil
	}
	if len(s.groups) >= s.spec.Open || s.bytes >= s.spec.Bytes/2 { // the open groups grow
		return nil, errWait
	}
	e := &Event{
		Kind: Put, Group: s.Last + 1, Name: p.Name, Siblings: s.spec.Siblings, Turns: s.spec.Turns, Source: p.Source, Number: p.Number, Body: p.Body,
	}
	s.emit(e)
	s.forgetSources()
	return e, nil
}

// forgetSources forgets the producer that put nothing for longest when there are too many.
func (s *State) forgetSources() {
	if len(s.Sources) <= maxSources {
		return
	}
	oldest := ""
	for name, source := range s.Sources {
		if oldest == "" || source.At < s.Sources[oldest].At {
			oldest = name
		}
	}
	delete(s.Sources, oldest)
}

// Lineage names a sample and the attempt to make it.
type Lineage struct {
	Group   uint64 `msgpack:"group"`
	Index   int    `msgpack:"index"`
	Attempt int    `msgpack:"attempt"`
}

// Take gives a sample that nobody has to a worker, older groups first. The ticket names the request and the holder; the same
// ticket gets the same sample again, because its answer may have been lost.
func (s *State) Take(ticket string) (*Group, *Sample, error) {
	var g *Group
	var m *Sample
	for _, at := range s.groups {
		if at.closed {
			continue
		}
		for _, one := range at.Samples {
			if one.ticket == ticket {
				return at, one, nil
			}
			if m == nil && !one.ended && one.ticket == "" {
				g, m = at, one
			}
		}
	}
	if m == nil {
		return nil, nil, errWait
	}
	s.emit(&Event{Kind: Granted, Group: g.ID, Index: m.Index, Attempt: m.Attempt + 1, Ticket: ticket})
	return g, m, nil
}

// NewTurn is a finished turn.
type NewTurn struct {
	Of      Lineage      `msgpack:"of"`
	Turn    int          `msgpack:"turn"`
	Last    bool         `msgpack:"last"`
	Version spec.Version `msgpack:"version"`
	Body    Body         `msgpack:"body"`
}

// Finish stores a turn of the current attempt; nil: it was stored before. A turn of an earlier attempt is dropped: the error is
// bus.ErrFenced.
func (s *State) Finish(n NewTurn) (*Event, error) {
	g, m, err := s.find(n.Of)
	switch {
	case err != nil:
		return nil, err
	case n.Turn >= 0 && n.Turn < len(m.Turns) && m.Turns[n.Turn].Attempt == n.Of.Attempt:
		return nil, nil // a repeat
	case n.Of.Attempt != m.Attempt:
		return nil, s.late("attempt %d of sample %d/%d was replaced by attempt %d", n.Of.Attempt, n.Of.Group, n.Of.Index, m.Attempt)
	case g.closed || m.ended:
		return nil, s.late("sample %d/%d is no longer wanted: it has ended, or its group is complete without it", n.Of.Group, n.Of.Index)
	case n.Turn != len(m.Turns):
		return nil, bus.Errorf(bus.CodeInvalid, "turn %d of sample %d/%d: the next one is %d", n.Turn, n.Of.Group, n.Of.Index, len(m.Turns))
	}
	e := &Event{Kind: Turn, Group: n.Of.Group, Index: n.Of.Index, Attempt: n.Of.Attempt, Turn: n.Turn, Last: n.Last, Version: n.Version, Body: n.Body}
	s.emit(e)
	return e, nil
}

// find finds a sample of a group that has not ended.
func (s *State) find(l Lineage) (*Group, *Sample, error) {
	g := s.byID[l.Group]
	if g == nil {
		return nil, nil, s.late("group %d has ended, or there never was one", l.Group)
	}
	if l.Index < 0 || l.Index >= len(g.Samples) {
		return nil, nil, bus.Errorf(bus.CodeInvalid, "group %d has samples 0 to %d, not %d", l.Group, len(g.Samples)-1, l.Index)
	}
	return g, g.Samples[l.Index], nil
}

func (s *State) late(format string, args ...any) error {
	s.Counts.Late++
	return fenced(format, args...)
}

// Set stores fields of a sample whose turns are finished; nil: all of them were set before, and the first values stay.
func (s *State) Set(l Lineage, body Body) (*Event, error) {
	g, m, err := s.find(l)
	if err != nil {
		return nil, err
	}
	missing := false
	for _, p := range body.Parts {
		if err := checkField(p.Name); err != nil {
			return nil, err
		}
		missing = missing || m.Fields[p.Name] == nil
		delete(s.scoring, scoring{l.Group, l.Index, p.Name})
	}
	switch {
	case !missing:
		return nil, nil
	case len(m.Fields)+len(body.Parts) > maxNames:
		return nil, bus.Errorf(bus.CodeInvalid, "sample %d/%d: more than %d fields", l.Group, l.Index, maxNames)
	case !m.ended:
		return nil, bus.Errorf(bus.CodeInvalid, "sample %d/%d has not ended; its fields are set when all its turns are finished", l.Group, l.Index)
	case g.closed && !m.done:
		return nil, s.late("group %d is complete without sample %d", l.Group, l.Index)
	}
	e := &Event{Kind: Field, Group: l.Group, Index: l.Index, Body: body}
	s.emit(e)
	return e, nil
}

// Pair is a sample and its group.
type Pair struct {
	Group  *Group
	Sample *Sample
}

// Scoring gives ended samples that lack a field to a worker that makes it, older groups first. Nobody else gets them while the
// ticket is held.
func (s *State) Scoring(field string, n int, ticket string) ([]Pair, error) {
	if err := checkField(field); err != nil {
		return nil, err
	}
	if n < 1 || n > MaxBatch {
		return nil, bus.Errorf(bus.CodeInvalid, "one request gets 1 to %d samples, not %d", MaxBatch, n)
	}
	var out []Pair
	for _, g := range s.groups {
		if g.loan != "" {
			continue
		}
		for _, m := range g.Samples {
			if len(out) >= n || !m.ended || m.Fields[field] != nil || g.closed && !m.done {
				continue
			}
			k := scoring{g.ID, m.Index, field}
			if by, taken := s.scoring[k]; taken && by != ticket {
				continue
			}
			s.scoring[k] = ticket
			out = append(out, Pair{g, m})
		}
	}
	if len(out) == 0 {
		return nil, errWait
	}
	return out, nil
}

// Batch gives n complete groups to a trainer, oldest first. The same ticket gets the same groups again. Groups that are too old
// are dropped.
func (s *State) Batch(n int, ticket string) ([]*Group, error) {
	if n < 1 || n > min(MaxBatch, s.spec.Open) {
		return nil, bus.Errorf(bus.CodeInvalid, "a batch has 1 to %d groups, not %d", min(MaxBatch, s.spec.Open), n)
	}
	var out, more []*Group
	for _, g := range slices.Clone(s.groups) {
		if g.loan == ticket {
			out = append(out, g)
			continue
		}
		if g.loan != "" {
			continue
		}
		switch {
		case !g.ready():
		case s.spec.Bound > 0 && Oldest(g.Complete())+s.spec.Bound < s.Version:
			s.Counts.Stale++
			s.end(g)
		case len(more) < n:
			more = append(more, g)
		}
	}
	if len(out)+len(more) < n {
		return nil, errWait
	}
	for _, g := range more[:max(0, n-len(out))] {
		s.emit(&Event{Kind: Loaned, Group: g.ID, Ticket: ticket})
		out = append(out, g)
	}
	return out, nil
}

// Done ends the groups of a batch: they are trained. It is refused as a whole when one of them was given to another trainer. If the
// batch was returned and nobody got it, that is no error.
func (s *State) Done(ticket string, ids []uint64) error {
	if slices.Contains(s.Batches, ticket) {
		return nil
	}
	for _, id := range ids {
		if g := s.byID[id]; g == nil || g.lent != ticket {
			s.Release(ticket)
			return s.late("group %d of the batch was given to another trainer: this one did not answer for some seconds, or gave it back", id)
		}
	}
	for _, id := range ids {
		s.end(s.byID[id])
	}
	s.Counts.Trained += uint64(len(ids))
	s.Batches = append(s.Batches, ticket)
	s.Batches = s.Batches[max(0, len(s.Batches)-maxDone):]
	return nil
}

// Release takes back what a ticket holds. It is not stored: after a restart the holder is asked again.
func (s *State) Release(ticket string) {
	for _, g := range s.groups {
		if g.loan == ticket {
			g.loan = ""
		}
		for _, m := range g.Samples {
			if m.ticket == ticket {
				m.ticket = ""
			}
		}
	}
	for k, by := range s.scoring {
		if by == ticket {
			delete(s.scoring, k)
		}
	}
}

// Redispatch takes unfinished samples from their workers; finished turns stay. Group 0: of all groups. It returns how many.
func (s *State) Redispatch(group uint64) (n int) {
	for _, g := range s.groups {
		if group != 0 && g.ID != group {
			continue
		}
		for _, m := range g.Samples {
			if m.ticket != "" {
				m.ticket = ""
				n++
			}
		}
	}
	return n
}

// Tickets lists what is held, each ticket once.
func (s *State) Tickets() map[string]bool {
	out := map[string]bool{}
	for _, g := range s.groups {
		out[g.loan] = true
		for _, m := range g.Samples {
			out[m.ticket] = true
		}
	}
	for _, by := range s.scoring {
		out[by] = true
	}
	delete(out, "")
	return out
}

// SetVersion sets the version of the weights. It does not go back.
func (s *State) SetVersion(v spec.Version) error {
	if v < s.Version {
		return bus.Errorf(bus.CodeInvalid, "version %v is behind the current one, %v", v, s.Version)
	}
	s.changed = s.changed || v > s.Version
	s.Version = v
	return nil
}

const (
	maxClosed = 100 // events of one Tick
	// MaxBatch is how many groups, or samples to score, one request gets.
	MaxBatch = 100
)

// Tick closes groups that have enough complete samples after their time, and takes samples from workers that are too slow.
func (s *State) Tick() {
	now := s.Now.UnixMilli()
	for _, g := range s.groups {
		if s.spec.Timeout > 0 {
			for _, m := range g.Samples {
				if m.ticket != "" && now-m.since > s.spec.Timeout.Milliseconds() {
					m.ticket = ""
				}
			}
		}
		if s.spec.AtLeast == 0 || g.closed || g.started == 0 || now-g.started < s.spec.After.Milliseconds() {
			continue
		}
		if !g.ready() && g.done >= s.spec.AtLeast && len(s.events) < maxClosed {
			s.emit(&Event{Kind: Closed, Group: g.ID})
		}
	}
}

// Status is the state in numbers.
type Status struct {
	Counts
	Put      uint64            `json:"put"`
	Version  spec.Version      `json:"version"`
	Open     int               `json:"open"`     // groups that have not ended
	Complete int               `json:"complete"` // of these, ready for a trainer
	Loaned   int               `json:"loaned"`   // of these, with a trainer
	Free     int               `json:"free"`     // samples that wait for a worker
	Held     int               `json:"held"`     // samples that a worker has
	Bytes    int               `json:"bytes"`    // of all bodies
	Unscored int               `json:"unscored"` // ended samples that lack a field
	Numbers  map[string]uint64 `json:"numbers"`  // the last number of each named producer
	By       string            `json:"by"`
	At       time.Time         `json:"at"`
}

// Status counts.
func (s *State) Status() Status {
	st := Status{Counts: s.Counts, Put: s.Last, Version: s.Version, Open: len(s.groups), Bytes: s.bytes, Numbers: map[string]uint64{}, By: s.By, At: s.Now}
	for name, source := range s.Sources {
		st.Numbers[name] = source.Number
	}
	for _, g := range s.groups {
		st.Counts.add(g)
		switch {
		case g.loan != "":
			st.Loaned++
		case g.ready():
			st.Complete++
		}
		for _, m := range g.Samples {
			switch {
			case g.closed || m.done:
			case m.ended:
				st.Unscored++
			case m.ticket != "":
				st.Held++
			default:
				st.Free++
			}
		}
	}
	return st
}
