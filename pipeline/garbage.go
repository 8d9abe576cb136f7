package pipeline

import (
	"context"
	"errors"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/stream"
	"troupe/pipeline/flow"
)

// garbage is what can be deleted from the log and the body streams.
type garbage struct {
	wakeCh chan struct{} // capacity one

	mu          sync.Mutex // guards the following fields
	purgePoints map[*flow.Lane]flow.PurgePoint
	completed   map[*flow.Lane][]flow.CompletedItem
	deadBodies  []uint64 // of resolved dead letters
	staleSeqs   []uint64 // messages of the log that the checkpoint marks as obsolete
}

func newGarbage() *garbage {
	return &garbage{wakeCh: make(chan struct{}, 1), purgePoints: map[*flow.Lane]flow.PurgePoint{}, completed: map[*flow.Lane][]flow.CompletedItem{}}
}

// take removes and returns everything.
func (g *garbage) take() *garbage {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := &garbage{purgePoints: g.purgePoints, completed: g.completed, deadBodies: g.deadBodies, staleSeqs: g.staleSeqs}
	g.purgePoints, g.completed, g.deadBodies, g.staleSeqs = map[*flow.Lane]flow.PurgePoint{}, map[*flow.Lane][]flow.CompletedItem{}, nil, nil
	return out
}

// add adds obsolete messages of the log.
func (g *garbage) add(stale []uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.staleSeqs = append(g.staleSeqs, stale...)
}

// collectGarbage notes what can be deleted now that the commit is stored; nil: no commit.
func (p *Pipeline) collectGarbage(c *flow.Commit) {
	g := p.garbage
	g.mu.Lock()
	defer g.mu.Unlock()
	if c != nil {
		g.deadBodies = append(g.deadBodies, c.FreedBodies()...)
	}
	for l := range p.flow.Lanes() {
		if completed := l.TakeCompleted(); len(completed) > 0 {
			g.completed[l] = append(g.completed[l], completed...)
		}
		if m := l.TakePurgePoint(); m.Seq > 0 {
			g.purgePoints[l] = flow.PurgePoint{Seq: m.Seq, BodySeq: max(m.BodySeq, g.purgePoints[l].BodySeq)}
		}
	}
	if len(g.purgePoints)+len(g.completed)+len(g.deadBodies)+len(g.staleSeqs) > 0 {
		select {
		case g.wakeCh <- struct{}{}:
		default:
		}
	}
}

// purgeInterval is the time between two purges: each costs the server a millisecond, however little there is to purge.
const purgeInterval = time.Second

func (p *Pipeline) purgeLoop() {
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-p.garbage.wakeCh:
		}
		p.purge(p.garbage.take())
		if bus.Sleep(p.ctx, purgeInterval) != nil {
			return
		}
	}
}

// purge deletes garbage. What could not be deleted is covered by a later purge.
func (p *Pipeline) purge(g *garbage) {
	warn := func(stream string, err error) {
		if err != nil && p.ctx.Err() == nil {
			p.cfg.Logger.Warn("pipeline: completed items were not purged; a later purge covers them", "pipeline", p.at.Name, "stream", stream, "error", err)
		}
	}
	for l, items := range g.completed {
		warn(l.StreamName(), p.journal.deleteCompleted(p.ctx, l, items))
	}
	for l, m := range g.purgePoints {
		ctx, cancel := context.WithTimeout(p.ctx, attemptTimeout)
		warn(l.StreamName(), p.journal.purge(ctx, l, m))
		cancel()
	}
	if len(g.deadBodies) > 0 {
		warn(flow.DeadBodiesName, p.journal.deleteBodies(p.ctx, p.flow.DeadBodies, g.deadBodies))
	}
	warn("", p.journal.stream.DeleteMessages(p.ctx, g.staleSeqs))
}

// purgeBeforeFirstWrite purges completed items before anything is written, if the log is more than half full: messages
// that a killed server restored count against its bound, and could block every write. It is harmless beside another
// engine, because completed items stay completed.
func (p *Pipeline) purgeBeforeFirstWrite(ctx context.Context, rec *flow.Checkpoint) error {
	state, err := p.journal.stream.State(ctx)
	if err != nil {
		return bus.Errorf(bus.CodeUnavailable, "pipeline %s: read its log: %w", p.at.Name, err)
	}
	if rec == nil || int64(state.Bytes) < state.MaxBytes/2 {
		return nil
	}
	for name, sr := range rec.Streams {
		for priority, l := range sr.Lanes {
			if err := p.journal.purgeDone(ctx, p.at.Items(name, priority), l.Floor, state); err != nil {
				return bus.Errorf(bus.CodeUnavailable, "pipeline %s: make room in its log: %w", p.at.Name, err)
			}
		}
	}
	_, ended, err := p.journal.deadLetters(ctx)
	if err != nil {
		return err
	}
	return p.journal.stream.DeleteMessages(ctx, append(ended, p.garbage.take().staleSeqs...))
}

// purgeDone purges the items of a lane up to its floor. Ordinals rise along the log, so the first item above the floor
// is found by binary search.
func (j *journal) purgeDone(ctx context.Context, subject string, floor uint64, state stream.State) error {
	from, to := state.FirstSeq, state.LastSeq+1 // the first item above the floor is in between, or there is none
	for from < to {
		middle := from + (to-from)/2
		seq, n, err := j.nextItem(ctx, subject, middle)
		switch {
		case err != nil:
			return err
		case seq == 0 || n > floor:
			to = middle
		default:
			from = seq + 1
		}
	}
	return j.stream.Purge(ctx, subject, from)
}

// nextItem is the sequence and the ordinal of the next item of a lane; 0: there is none.
func (j *journal) nextItem(ctx context.Context, subject string, seq uint64) (at, n uint64, err error) {
	for {
		m, err := j.stream.GetNext(ctx, subject, seq)
		if errors.Is(err, bus.ErrNotFound) {
			return 0, 0, nil
		}
		if err != nil {
			return 0, 0, err
		}
		if j.isDiscarded(m.Seq) {
			seq = m.Seq + 1
			continue
		}
		lb, err := parseLabel(m.Header.Get(headerItem))
		return m.Seq, lb.N, err
	}
}
