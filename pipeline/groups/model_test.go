package groups

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"troupe/bus"
)

// stored is the log and the last checkpoint, which survive a crash of the state.
type stored struct {
	events []Event
	from   *Checkpoint
}

// history drives a State through commits, partial commits and crashes, with workers and trainers that die, repeat their
// requests, and answer late.
type history struct {
	t      *rapid.T
	spec   Spec
	s      *State
	log    stored
	now    time.Time
	ticket int

	acked   map[string]bool           // puts
	turns   map[[2]uint64]map[int]int // finished turns that were acknowledged, with their attempt, by sample
	workers []worker                  // that have a sample, or had one
	trains  []string                  // tickets that have groups, or had some
	batches map[string][]uint64       // groups of a ticket
	trained map[uint64]int
	names   map[uint64]string
}

type worker struct {
	of     Lineage
	ticket string
	turn   int
}

func (h *history) open() {
	h.s = New(h.spec, h.log.from)
	h.s.Now = h.now
	for i := range h.log.events {
		e := h.log.events[i]
		h.s.Restore(&e, uint64(i+1))
	}
}

// commit stores everything; only then are requests answered.
func (h *history) commit() {
	events, checkpoint := h.s.TakeEvents()
	for _, e := range events {
		h.log.events = append(h.log.events, *e)
		e.Stored(uint64(len(h.log.events)))
	}
	if checkpoint {
		c := h.s.Snapshot()
		h.log.from = &c
	}
}

// crash loses what was not stored, or a part of it, and starts again from the log. Some events of ended groups were deleted.
func (h *history) crash() {
	events, _ := h.s.TakeEvents()
	for _, e := range events[:rapid.IntRange(0, len(events)).Draw(h.t, "stored events of a partial commit")] {
		h.log.events = append(h.log.events, *e)
	}
	if h.log.from != nil && rapid.Bool().Draw(h.t, "deleted") {
		h.log.events = slices.DeleteFunc(h.log.events, func(e Event) bool {
			return h.log.from.Ended.Contains(e.Group) && e.Turn%2 == 0
		})
	}
	h.open()
}

func (h *history) newTicket() string { h.ticket++; return fmt.Sprint("t", h.ticket) }

// lost reports whether the answer of a request is lost, with the state or alone.
func (h *history) lost() bool {
	switch rapid.IntRange(0, 9).Draw(h.t, "answer") {
	case 0:
		h.crash()
		return true
	case 1:
		h.commit()
		return true
	}
	h.commit()
	return false
}

// put puts the next prompt, again if its answer was lost, or repeats an earlier put.
func (h *history) put() {
	n := uint64(rapid.IntRange(max(1, len(h.acked)), len(h.acked)+1).Draw(h.t, "number"))
	name := fmt.Sprint("p", n)
	_, err := h.s.Put(NewGroup{Name: name, Source: "driver", Number: n, Body: Body{Parts: []Part{{"prompt", 1}}}})
	if Waits(err) {
		return
	}
	require.NoError(h.t, err)
	if !h.lost() {
		h.acked[name] = true
	}
}

func (h *history) take() {
	ticket := h.newTicket()
	g, m, err := h.s.Take(ticket)
	if Waits(err) {
		return
	}
	if h.lost() {
		if rapid.Bool().Draw(h.t, "gives up") {
			h.s.Release(ticket)
			return
		}
		if g, m, err = h.s.Take(ticket); Waits(err) {
			return
		}
		h.commit()
	}
	require.NoError(h.t, err)
	for turn := range h.turns[[2]uint64{g.ID, uint64(m.Index)}] {
		require.Less(h.t, turn, len(m.Turns), "finished turn %d of %d/%d is generated again", turn, g.ID, m.Index)
	}
	h.workers = append(h.workers, worker{Lineage{g.ID, m.Index, m.Attempt}, ticket, len(m.Turns)})
}

func (h *history) finish() {
	if len(h.workers) == 0 {
		return
	}
	w := &h.workers[rapid.IntRange(0, len(h.workers)-1).Draw(h.t, "worker")]
	turn := w.turn
	if turn > 0 && rapid.IntRange(0, 5).Draw(h.t, "repeat") == 0 {
		turn--
	}
	last := rapid.IntRange(0, 9).Draw(h.t, "last") == 0
	_, err := h.s.Finish(NewTurn{Of: w.of, Turn: turn, Last: last, Body: Body{Parts: []Part{{"tokens", 1}}}})
	if h.lost() {
		return // a worker repeats the request
	}
	if errors.Is(err, bus.ErrFenced) {
		h.dismiss(w.ticket)
		return
	}
	if turn < w.turn && errors.Is(err, bus.ErrInvalid) {
		return // the turn that is repeated was of an earlier attempt
	}
	require.NoError(h.t, err)
	sample := [2]uint64{w.of.Group, uint64(w.of.Index)}
	if h.turns[sample] == nil {
		h.turns[sample] = map[int]int{}
	}
	if by, known := h.turns[sample][turn]; known {
		require.Equal(h.t, by, w.of.Attempt, "a turn was stored under two attempts")
	}
	h.turns[sample][turn] = w.of.Attempt
	w.turn = max(w.turn, turn+1)
	if g := h.s.byID[w.of.Group]; g == nil || g.Samples[w.of.Index].ended {
		h.dismiss(w.ticket)
	}
}

func (h *history) dismiss(ticket string) {
	h.workers = slices.DeleteFunc(h.workers, func(w worker) bool { return w.ticket == ticket })
}

func (h *history) reward() {
	pairs, err := h.s.Scoring("reward", 3, h.newTicket())
	if Waits(err) {
		return
	}
	for _, p := range pairs {
		_, err := h.s.Set(Lineage{Group: p.Group.ID, Index: p.Sample.Index}, Body{Parts: []Part{{"reward", 1}}})
		if err != nil {
			require.ErrorIs(h.t, err, bus.ErrFenced)
		}
		if h.lost() {
			return
		}
	}
}

func (h *history) batch() {
	ticket := h.newTicket()
	got, err := h.s.Batch(rapid.IntRange(1, 2).Draw(h.t, "groups"), ticket)
	if Waits(err) {
		return
	}
	require.NoError(h.t, err)
	if h.lost() {
		return
	}
	h.trains = append(h.trains, ticket)
	for _, g := range got {
		require.Zero(h.t, h.trained[g.ID], "group %d is given to a trainer after it was trained", g.ID)
		h.batches[ticket] = append(h.batches[ticket], g.ID)
		h.names[g.ID] = g.Name
	}
}

func (h *history) done() {
	if len(h.trains) == 0 {
		return
	}
	i := rapid.IntRange(0, len(h.trains)-1).Draw(h.t, "batch")
	ticket := h.trains[i]
	err := h.s.Done(ticket, h.batches[ticket])
	if errors.Is(err, bus.ErrFenced) {
		h.trains = slices.Delete(h.trains, i, i+1)
		return
	}
	require.NoError(h.t, err)
	if h.lost() {
		return // it is repeated
	}
	h.note(ticket)
	h.trains = slices.Delete(h.trains, i, i+1)
}

// note counts the groups of a ticket that have ended by it.
func (h *history) note(ticket string) {
	for _, id := range h.batches[ticket] {
		if h.s.Ended.Contains(id) {
			h.trained[id]++
			require.Equal(h.t, 1, h.trained[id], "group %d is trained twice", id)
		}
	}
}

func (h *history) die() {
	all := h.s.Tickets()
	names := make([]string, 0, len(all))
	for ticket := range all {
		names = append(names, ticket)
	}
	if len(names) == 0 {
		return
	}
	slices.Sort(names)
	h.s.Release(rapid.SampledFrom(names).Draw(h.t, "dead")) // its late answers may still arrive
}

// Whatever dies and whenever: no group that was put is lost, none is trained twice, and no finished turn is generated again.
func TestNoGroupIsLostNoneTrainedTwiceNoTurnGeneratedAgain(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		spec := Spec{Siblings: rapid.IntRange(1, 3).Draw(rt, "siblings"), Turns: rapid.IntRange(1, 3).Draw(rt, "turns"), Fields: []string{"reward"}, Open: 4}
		if spec.Siblings > 1 && rapid.Bool().Draw(rt, "k of n") {
			spec.AtLeast, spec.After = spec.Siblings-1, time.Second
		}
		h := &history{
			t: rt, spec: spec, now: time.Unix(1000, 0), acked: map[string]bool{}, turns: map[[2]uint64]map[int]int{}, batches: map[string][]uint64{},
			trained: map[uint64]int{}, names: map[uint64]string{},
		}
		h.open()
		tick := func() {
			h.now = h.now.Add(time.Duration(rapid.IntRange(0, 700).Draw(rt, "ms")) * time.Millisecond)
			h.s.Now = h.now
			h.s.Tick()
		}
		steps := []func(){h.put, h.take, h.take, h.finish, h.finish, h.finish, h.reward, h.batch, h.done, h.die, tick, h.crash, func() { h.s.Redispatch(0) }}
		for range rapid.IntRange(1, 120).Draw(rt, "steps") {
			steps[rapid.IntRange(0, len(steps)-1).Draw(rt, "step")]()
		}
		h.drain()
		require.LessOrEqual(rt, uint64(len(h.acked)), h.s.Last, "a put was lost")
		require.LessOrEqual(rt, h.s.Last, uint64(len(h.acked))+1, "a put was stored twice") // one may have no answer yet
		require.Equal(rt, h.s.Last, h.s.Counts.Trained)
	})
}

// drain lets good workers finish everything; then every group that was put has ended, once.
func (h *history) drain() {
	for ticket := range h.s.Tickets() {
		h.s.Release(ticket)
	}
	for round := 0; len(h.s.groups) > 0; round++ {
		require.Less(h.t, round, 1000, "groups remain: %+v", h.s.Status())
		h.now = h.now.Add(time.Second)
		h.s.Now = h.now
		if _, m, err := h.s.Take(h.newTicket()); err == nil {
			of := Lineage{h.s.findGroup(m).ID, m.Index, m.Attempt}
			_, err := h.s.Finish(NewTurn{Of: of, Turn: len(m.Turns), Last: true})
			require.NoError(h.t, err)
		}
		if pairs, err := h.s.Scoring("reward", 100, h.newTicket()); err == nil {
			for _, p := range pairs {
				_, err := h.s.Set(Lineage{Group: p.Group.ID, Index: p.Sample.Index}, Body{Parts: []Part{{"reward", 1}}})
				require.NoError(h.t, err)
			}
		}
		ticket := h.newTicket()
		if got, err := h.s.Batch(1, ticket); err == nil {
			h.batches[ticket] = append(h.batches[ticket], got[0].ID)
			err := h.s.Done(ticket, h.batches[ticket])
			require.NoError(h.t, err)
			h.note(ticket)
		}
		h.commit()
	}
}

func (s *State) findGroup(m *Sample) *Group {
	for _, g := range s.groups {
		if slices.Contains(g.Samples, m) {
			return g
		}
	}
	return nil
}
