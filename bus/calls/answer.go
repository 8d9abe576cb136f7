package calls

import (
	"context"
	"time"

	"troupe/bus/values"
	"troupe/bus/wire"
)

// Answer is the answer of one rank. Body is nil for an acknowledgement without data; it belongs to the caller.
type Answer struct {
	Rank   int
	Gen    uint32
	Body   []byte
	Err    error
	Queued time.Duration // how long the call waited at the worker
	Ran    time.Duration // how long it ran there
	refs   *answerReferences
}

// answerReferences are the references of an answer; most have none.
type answerReferences struct {
	kept   wire.Reference
	inside []wire.Reference
}

// Kept is set instead of Body for a large answer of a call with Keep: a value of this endpoint with one use, which the caller
// releases.
func (a *Answer) Kept() wire.Reference {
	if a.refs == nil {
		return wire.Reference{}
	}
	return a.refs.kept
}

// References are those inside the body, of a call with Counted. Each is retained once, and the caller releases it.
func (a *Answer) References() []wire.Reference {
	if a.refs == nil {
		return nil
	}
	return a.refs.inside
}

// Progress is the state of one rank in a pending call.
type Progress struct {
	Rank     int
	Answered bool
	State    wire.State    // by the worker's last status
	For      time.Duration // time in that state at the last status
}

// Done is closed when the call is over.
func (g *Gather) Done() <-chan struct{} { return g.doneCh }

// Answers returns every rank's answer, in the order of the parts. It must be called after Done is closed.
func (g *Gather) Answers() []Answer {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := make([]Answer, len(g.slots))
	for i := range g.slots {
		out[i] = g.slots[i].answer
	}
	return out
}

// Answer returns one rank's answer, the zero Answer if the call did not address it. It must be called after Done is
// closed: answers do not change any more, and are read without a lock.
func (g *Gather) Answer(rank int) Answer {
	if s, _ := g.slotOf(rank); s != nil {
		return s.answer
	}
	return Answer{}
}

// Arrived returns every rank's answer in the order of arrival, with missing ones last. It must be called after Done is
// closed.
func (g *Gather) Arrived() []Answer {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := make([]Answer, len(g.arrived))
	for i, slot := range g.arrived {
		out[i] = g.slots[slot].answer
	}
	return out
}

// ArrivedSince returns the answers after the first n, in order of arrival. It may be called at any time.
func (g *Gather) ArrivedSince(n int) []Answer {
	g.mu.Lock()
	defer g.mu.Unlock()
	var out []Answer
	for _, slot := range g.arrived[min(n, len(g.arrived)):] {
		out = append(out, g.slots[slot].answer)
	}
	return out
}

// AllGood reports whether every rank has answered without an error.
func (g *Gather) AllGood() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.good == len(g.slots)
}

// Next returns the next answer in order of arrival; ok is false when all have been returned. One goroutine may call it.
func (g *Gather) Next(ctx context.Context) (a Answer, ok bool, err error) {
	for {
		g.mu.Lock()
		if g.taken < len(g.arrived) {
			a = g.slots[g.arrived[g.taken]].answer
			g.taken++
			g.mu.Unlock()
			return a, true, nil
		}
		over := g.over
		g.mu.Unlock()
		if over {
			return Answer{}, false, nil
		}
		select {
		case <-g.arrivedCh:
		case <-g.doneCh:
		case <-ctx.Done():
			return Answer{}, false, g.contextError(ctx)
		}
	}
}

// Progress returns the state of each rank.
func (g *Gather) Progress() []Progress {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := make([]Progress, len(g.slots))
	for i := range g.slots {
		s := &g.slots[i]
		out[i] = Progress{Rank: s.answer.Rank, Answered: s.answered, State: s.state}
		if s.rare != nil {
			out[i].For = s.rare.stateFor
		}
	}
	return out
}

// Result is the answer as the result that a promised value gets; see values.References.Fulfil.
func (a *Answer) Result() values.Result {
	return values.Result{Body: a.Body, Kept: a.Kept(), References: a.References(), Err: a.Err}
}
