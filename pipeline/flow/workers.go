package flow

import "slices"

// WorkerSlots is one worker as the scheduler sees it: how many tasks it may have and how many it has.
type WorkerSlots struct {
	id              int
	name            string
	Credits         int
	Running         int
	keys            int  // that are pinned to it
	Suspended       bool // gets no new tasks for now
	Draining        bool // gets no new tasks any more
	queue           fifo[*Work]
	isolated        *Work  // work that runs as the worker's only task; nil: none
	isolatedStarted bool   // that work is running
	Generation      uint32 // of the worker process, if the worker is a rank
}

func (slots *WorkerSlots) Free() int {
	if slots.Suspended || slots.Draining || slots.isolated != nil {
		return 0
	}
	return slots.Credits - slots.Running
}

// WorkerPool is the workers of one stage.
type WorkerPool struct {
	All    []*WorkerSlots // by id
	byKey  map[string]*WorkerSlots
	keys   fifo[string] // pinned keys, oldest first
	nextID int
}

// maxPinnedKeys bounds the keys that are remembered with their worker.
const maxPinnedKeys = 1 << 16

func (p *WorkerPool) Add(name string, credits int) *WorkerSlots {
	p.nextID++
	slots := &WorkerSlots{id: p.nextID, name: name, Credits: credits}
	p.All = append(p.All, slots)
	return slots
}

// Remove removes a worker and returns the work that was queued for it.
func (p *WorkerPool) Remove(slots *WorkerSlots) []*Work {
	p.All = slices.DeleteFunc(p.All, func(o *WorkerSlots) bool { return o == slots })
	p.Unpin(slots)
	return slots.takeQueued()
}

// takeQueued removes and returns the work that is queued for the worker.
func (slots *WorkerSlots) takeQueued() []*Work {
	var waiting []*Work
	if slots.isolated != nil && !slots.isolatedStarted {
		waiting, slots.isolated = append(waiting, slots.isolated), nil
	}
	waiting = append(waiting, slots.queue.all()...)
	slots.queue = fifo[*Work]{}
	return waiting
}

// Unpin forgets the keys that are pinned to the worker.
func (p *WorkerPool) Unpin(slots *WorkerSlots) {
	for k, o := range p.byKey {
		if o == slots {
			delete(p.byKey, k)
		}
	}
	slots.keys = 0
}

// freeSlots is how many more tasks the workers may have.
func (p *WorkerPool) freeSlots() int {
	n := 0
	for _, slots := range p.All {
		n += max(0, slots.Free())
	}
	return n
}

// LeastLoaded is the worker with the most free slots, on a tie the one with the fewest keys, then the oldest; nil: none
// is free.
func (p *WorkerPool) LeastLoaded() *WorkerSlots {
	var best *WorkerSlots
	for _, slots := range p.All {
		if slots.Free() > 0 && (best == nil || slots.lessLoaded(best)) {
			best = slots
		}
	}
	return best
}

// lessLoaded compares keys too: without them, the keys of items that come one by one would all go to the first worker.
func (slots *WorkerSlots) lessLoaded(than *WorkerSlots) bool {
	if slots.Free() != than.Free() {
		return slots.Free() > than.Free()
	}
	return slots.keys < than.keys
}

// Pinned is the worker that the key is pinned to; nil: none, or it is draining.
func (p *WorkerPool) Pinned(key string) *WorkerSlots {
	slots := p.byKey[key]
	if slots != nil && slots.Draining {
		return nil
	}
	return slots
}

// Pin pins the key to the worker. Beyond maxPinnedKeys the oldest keys are forgotten.
func (p *WorkerPool) Pin(key string, slots *WorkerSlots) {
	if p.byKey == nil {
		p.byKey = map[string]*WorkerSlots{}
	}
	if before := p.byKey[key]; before != nil {
		before.keys--
	} else {
		p.keys.push(key)
	}
	p.byKey[key] = slots
	slots.keys++
	for p.keys.len() > maxPinnedKeys {
		old, _ := p.keys.pop()
		if slots := p.byKey[old]; slots != nil {
			slots.keys--
			delete(p.byKey, old)
		}
	}
}

// Unassign stops giving a worker keys and work; work that was queued for it becomes runnable.
func (f *Flow) Unassign(s *StageState, slots *WorkerSlots) {
	s.parked -= slots.queue.len()
	s.requeue(slots.takeQueued())
	s.Workers.Unpin(slots)
}
