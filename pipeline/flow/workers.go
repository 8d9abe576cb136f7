package flow

import "slices"

// hand is one worker as the decision sees it: how much it may have at once, and how much it has.
type WorkerSlots struct {
	id              int
	name            string
	Credits         int
	Running         int
	Suspended       bool // gets nothing new for now
	Draining        bool // gets nothing new for ever
	queue           fifo[*Work]
	isolated        *Work  // handed out when nothing else is in hand, and nothing beside it; nil: none
	isolatedStarted bool   // it is in hand
	Generation      uint32 // of the worker, if it is a rank
}

func (h *WorkerSlots) Free() int {
	if h.Suspended || h.Draining || h.isolated != nil {
		return 0
	}
	return h.Credits - h.Running
}

// hands are the workers of one stage, or of one router.
type WorkerPool struct {
	All    []*WorkerSlots // by id
	byKey  map[string]*WorkerSlots
	keys   fifo[string] // sticky keys, oldest first
	nextID int
}

// maxSticky is how many keys are remembered with their worker.
const maxPinnedKeys = 1 << 16

func (p *WorkerPool) Add(name string, credits int) *WorkerSlots {
	p.nextID++
	h := &WorkerSlots{id: p.nextID, name: name, Credits: credits}
	p.All = append(p.All, h)
	return h
}

// remove takes a worker out and gives back what waited for it.
func (p *WorkerPool) Remove(h *WorkerSlots) []*Work {
	p.All = slices.DeleteFunc(p.All, func(o *WorkerSlots) bool { return o == h })
	p.Unpin(h)
	return h.takeQueued()
}

// empty takes out what waits for the worker.
func (h *WorkerSlots) takeQueued() []*Work {
	var waiting []*Work
	if h.isolated != nil && !h.isolatedStarted {
		waiting, h.isolated = append(waiting, h.isolated), nil
	}
	waiting = append(waiting, h.queue.all()...)
	h.queue = fifo[*Work]{}
	return waiting
}

// unstick forgets which keys belong to the worker.
func (p *WorkerPool) Unpin(h *WorkerSlots) {
	for k, o := range p.byKey {
		if o == h {
			delete(p.byKey, k)
		}
	}
}

// free is how many more items the workers may have now.
func (p *WorkerPool) freeSlots() int {
	n := 0
	for _, h := range p.All {
		n += max(0, h.Free())
	}
	return n
}

// least is the worker with the most credits left; ties fall to the one that was there first.
func (p *WorkerPool) LeastLoaded() *WorkerSlots {
	var best *WorkerSlots
	for _, h := range p.All {
		if f := h.Free(); f > 0 && (best == nil || f > best.Free()) {
			best = h
		}
	}
	return best
}

// stuck is the worker that has the key, if it is still there.
func (p *WorkerPool) Pinned(key string) *WorkerSlots {
	h := p.byKey[key]
	if h != nil && h.Draining {
		return nil
	}
	return h
}

// stick gives the key to the worker. The oldest keys are forgotten when there are too many.
func (p *WorkerPool) Pin(key string, h *WorkerSlots) {
	if p.byKey == nil {
		p.byKey = map[string]*WorkerSlots{}
	}
	if _, known := p.byKey[key]; !known {
		p.keys.push(key)
	}
	p.byKey[key] = h
	for p.keys.len() > maxPinnedKeys {
		old, _ := p.keys.pop()
		delete(p.byKey, old)
	}
}

// returnQueue makes runnable again what waited for a worker that gets nothing more.
func (f *Flow) Unassign(s *StageState, h *WorkerSlots) {
	s.parked -= h.queue.len()
	s.requeue(h.takeQueued())
	s.Workers.Unpin(h)
}
