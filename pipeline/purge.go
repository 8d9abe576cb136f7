package pipeline

import (
	"context"
	"sync"
	"time"
)

// garbage is what of the log and of the bodies is done, and is to be let go of.
type garbage struct {
	wakeCh chan struct{} // holds one: there is something

	mu     sync.Mutex // guards what follows
	lanes  map[*lane]mark
	strays map[*lane][]stray
	freed  []uint64 // bodies of dead letters
}

func newGarbage() *garbage {
	return &garbage{wakeCh: make(chan struct{}, 1), lanes: map[*lane]mark{}, strays: map[*lane][]stray{}}
}

// take returns what there is.
func (g *garbage) take() (lanes map[*lane]mark, strays map[*lane][]stray, freed []uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	lanes, strays, freed = g.lanes, g.strays, g.freed
	g.lanes, g.strays, g.freed = map[*lane]mark{}, map[*lane][]stray{}, nil
	return lanes, strays, freed
}

// letGo notes what is done now that the commit is in the log.
func (p *Pipeline) letGo(c *commit) {
	g := p.garbage
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, ch := range c.changes {
		g.freed = append(g.freed, ch.freed...)
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
	if len(g.lanes)+len(g.strays)+len(g.freed) > 0 {
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
func (p *Pipeline) purge(lanes map[*lane]mark, strays map[*lane][]stray, freed []uint64) {
	warn := func(stream string, err error) {
		if err != nil && p.ctx.Err() == nil {
			p.cfg.Logger.Warn("pipeline: what is done stays in the log until what comes after it is let go of", "pipeline", p.at.Name, "stream", stream, "error", err)
		}
	}
	for l, some := range strays {
		warn(l.stream.spec.Name, p.journal.remove(p.ctx, l, some))
	}
	for l, m := range lanes {
		ctx, cancel := context.WithTimeout(p.ctx, attemptLimit)
		warn(l.stream.spec.Name, p.journal.purge(ctx, l, m))
		cancel()
	}
	if len(freed) > 0 {
		warn(deadShelf, p.journal.removeBodies(p.ctx, p.flow.dead, freed))
	}
}
