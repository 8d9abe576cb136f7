package pipeline

import "slices"

// hand is one worker as the decision sees it: how much it may have at once, and how much it has.
type hand struct {
	id        int
	name      string
	credits   int
	running   int
	suspended bool // gets nothing new for now
	draining  bool // gets nothing new for ever
	queue     fifo[*work]
	solo      *work  // handed out when nothing else is in hand, and nothing beside it; nil: none
	soloOut   bool   // it is in hand
	gen       uint32 // of the worker, if it is a rank
}

func (h *hand) free() int {
	if h.suspended || h.draining || h.solo != nil {
		return 0
	}
	return h.credits - h.running
}

// hands are the workers of one stage, or of one router.
type hands struct {
	all    []*hand // by id
	sticky map[string]*hand
	recent fifo[string] // sticky keys, oldest first
	nextID int
}

// maxSticky is how many keys are remembered with their worker.
const maxSticky = 1 << 16

func (p *hands) add(name string, credits int) *hand {
	p.nextID++
	h := &hand{id: p.nextID, name: name, credits: credits}
	p.all = append(p.all, h)
	return h
}

// remove takes a worker out and gives back what waited for it.
func (p *hands) remove(h *hand) []*work {
	p.all = slices.DeleteFunc(p.all, func(o *hand) bool { return o == h })
	p.unstick(h)
	return h.empty()
}

// empty takes out what waits for the worker.
func (h *hand) empty() []*work {
	var waiting []*work
	if h.solo != nil && !h.soloOut {
		waiting, h.solo = append(waiting, h.solo), nil
	}
	waiting = append(waiting, h.queue.all()...)
	h.queue = fifo[*work]{}
	return waiting
}

// unstick forgets which keys belong to the worker.
func (p *hands) unstick(h *hand) {
	for k, o := range p.sticky {
		if o == h {
			delete(p.sticky, k)
		}
	}
}

// free is how many more items the workers may have now.
func (p *hands) free() int {
	n := 0
	for _, h := range p.all {
		n += max(0, h.free())
	}
	return n
}

// least is the worker with the most credits left; ties fall to the one that was there first.
func (p *hands) least() *hand {
	var best *hand
	for _, h := range p.all {
		if f := h.free(); f > 0 && (best == nil || f > best.free()) {
			best = h
		}
	}
	return best
}

// stuck is the worker that has the key, if it is still there.
func (p *hands) stuck(key string) *hand {
	h := p.sticky[key]
	if h != nil && h.draining {
		return nil
	}
	return h
}

// stick gives the key to the worker. The oldest keys are forgotten when there are too many.
func (p *hands) stick(key string, h *hand) {
	if p.sticky == nil {
		p.sticky = map[string]*hand{}
	}
	if _, known := p.sticky[key]; !known {
		p.recent.push(key)
	}
	p.sticky[key] = h
	for p.recent.len() > maxSticky {
		old, _ := p.recent.pop()
		delete(p.sticky, old)
	}
}
