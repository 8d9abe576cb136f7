package pipeline

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
)

// garbage is what of the log and of the bodies is done, and is to be let go of.
type garbage struct {
	wakeCh chan struct{} // holds one: there is something

	mu     sync.Mutex // guards what follows
	lanes  map[*lane]mark
	strays map[*lane][]stray
	freed  []uint64 // bodies of dead letters
	stale  []uint64 // messages of the log: what the record says is over, and lies there all the same
}

func newGarbage() *garbage {
	return &garbage{wakeCh: make(chan struct{}, 1), lanes: map[*lane]mark{}, strays: map[*lane][]stray{}}
}

// take returns what there is.
func (g *garbage) take() *garbage {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := &garbage{lanes: g.lanes, strays: g.strays, freed: g.freed, stale: g.stale}
	g.lanes, g.strays, g.freed, g.stale = map[*lane]mark{}, map[*lane][]stray{}, nil, nil
	return out
}

// add notes messages of the log that are over.
func (g *garbage) add(stale []uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stale = append(g.stale, stale...)
}

// letGo notes what is done now that the commit is in the log; nil: what is known to be without one.
func (p *Pipeline) letGo(c *commit) {
	g := p.garbage
	g.mu.Lock()
	defer g.mu.Unlock()
	if c != nil {
		for _, ch := range c.changes {
			g.freed = append(g.freed, ch.freed...)
		}
	}
	for _, s := range p.flow.streams {
		for _, l := range s.lanes {
			if strays := l.passedBy(); len(strays) > 0 {
				g.strays[l] = append(g.strays[l], strays...)
			}
			if m := l.passed(); m.seq > 0 {
				g.lanes[l] = mark{seq: m.seq, body: max(m.body, g.lanes[l].body)}
			}
		}
	}
	if len(g.lanes)+len(g.strays)+len(g.freed)+len(g.stale) > 0 {
		select {
		case g.wakeCh <- struct{}{}:
		default:
		}
	}
}

// purgeEvery is how long what is done may lie in the log before it is let go of: each time costs the server a
// millisecond, whatever there is.
const purgeEvery = time.Second

func (p *Pipeline) purgeLoop() {
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-p.garbage.wakeCh:
		}
		p.purge(p.garbage.take())
		if wait(p.ctx, purgeEvery) != nil {
			return
		}
	}
}

// purge lets go of what is done. What could not be let go of goes with what comes after it, or stays until then.
func (p *Pipeline) purge(g *garbage) {
	warn := func(stream string, err error) {
		if err != nil && p.ctx.Err() == nil {
			p.cfg.Logger.Warn("pipeline: what is done stays in the log until what comes after it is let go of", "pipeline", p.at.Name, "stream", stream, "error", err)
		}
	}
	for l, some := range g.strays {
		warn(l.stream.spec.Name, p.journal.remove(p.ctx, l, some))
	}
	for l, m := range g.lanes {
		ctx, cancel := context.WithTimeout(p.ctx, attemptLimit)
		warn(l.stream.spec.Name, p.journal.purge(ctx, l, m))
		cancel()
	}
	if len(g.freed) > 0 {
		warn(deadShelf, p.journal.removeBodies(p.ctx, p.flow.dead, g.freed))
	}
	warn("", removeAll(p.ctx, p.journal.stream, g.stale))
}

// makeRoom lets go of what the record says is done before anything is written, if the log is more than half full: what came
// back when a server was killed counts against its bound, and nothing could be written to go on. It may be done beside
// another engine: what is done stays so.
func (p *Pipeline) makeRoom(ctx context.Context, rec *record) error {
	info, err := p.journal.stream.Info(ctx)
	if err != nil {
		return bus.Errorf(bus.CodeUnavailable, "pipeline %s: read its log: %w", p.at.Name, err)
	}
	if rec == nil || int64(info.State.Bytes) < info.Config.MaxBytes/2 {
		return nil
	}
	for name, sr := range rec.Streams {
		for priority, l := range sr.Lanes {
			if err := p.journal.purgeDone(ctx, p.at.Items(name, priority), l.Floor, info.State); err != nil {
				return bus.Errorf(bus.CodeUnavailable, "pipeline %s: make room in its log: %w", p.at.Name, err)
			}
		}
	}
	_, ended, err := p.journal.letters(ctx)
	if err != nil {
		return err
	}
	return removeAll(ctx, p.journal.stream, append(ended, p.garbage.take().stale...))
}

// purgeDone lets go of the items of a lane up to its floor. Numbers rise along the log, so it is halved until the first item
// above the floor is found.
func (j *journal) purgeDone(ctx context.Context, subject string, floor uint64, state jetstream.StreamState) error {
	from, to := state.FirstSeq, state.LastSeq+1 // the first one lies in between, or there is none
	for from < to {
		middle := from + (to-from)/2
		seq, n, err := j.itemFrom(ctx, subject, middle)
		switch {
		case err != nil:
			return err
		case seq == 0 || n > floor:
			to = middle
		default:
			from = seq + 1
		}
	}
	return j.stream.Purge(ctx, jetstream.WithPurgeSubject(subject), jetstream.WithPurgeSequence(from))
}

// itemFrom is where the next item of a lane lies, and its number; 0: there is none.
func (j *journal) itemFrom(ctx context.Context, subject string, seq uint64) (at, n uint64, err error) {
	for {
		m, err := j.stream.GetMsg(ctx, seq, jetstream.WithGetMsgSubject(subject))
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			return 0, 0, nil
		}
		if err != nil {
			return 0, 0, err
		}
		if j.isVoid(m.Sequence) {
			seq = m.Sequence + 1
			continue
		}
		lb, err := parseLabel(m.Header.Get(headerLabel))
		return m.Sequence, lb.N, err
	}
}
