package router

import (
	"slices"

	"troupe/roles"
)

// maxPinnedKeys bounds the keys that are remembered with their rank.
const maxPinnedKeys = 1 << 16

// slots is one rank: how many requests it may have and how many it has.
type slots struct {
	rank       roles.Worker
	generation uint32 // of its worker
	credits    int
	running    int
	keys       int  // that are pinned to it
	draining   bool // gets no new requests any more
}

func (s *slots) free() int {
	if s.draining {
		return 0
	}
	return s.credits - s.running
}

// pool is the ranks of a router, and which keys are pinned to them.
type pool struct {
	all   []*slots
	byKey map[string]*slots
	keys  []string // pinned keys, oldest first
}

func (p *pool) add(w roles.Worker, credits int) {
	p.all = append(p.all, &slots{rank: w, generation: w.Generation(), credits: credits})
}

func (p *pool) remove(s *slots) {
	p.all = slices.DeleteFunc(p.all, func(o *slots) bool { return o == s })
	p.unpin(s)
}

func (p *pool) contains(s *slots) bool { return slices.Contains(p.all, s) }

// has reports whether a rank is in the pool and not draining.
func (p *pool) has(w roles.Worker) bool {
	return slices.ContainsFunc(p.all, func(s *slots) bool { return s.rank == w && !s.draining })
}

// leastLoaded is the rank with the most free slots, on a tie the one with the fewest keys, then the oldest; nil: none is
// free.
func (p *pool) leastLoaded() *slots {
	var best *slots
	for _, s := range p.all {
		if s.free() > 0 && (best == nil || s.lessLoaded(best)) {
			best = s
		}
	}
	return best
}

// lessLoaded compares keys too: without them, the keys of requests that come one by one would all go to the first rank.
func (s *slots) lessLoaded(than *slots) bool {
	if s.free() != than.free() {
		return s.free() > than.free()
	}
	return s.keys < than.keys
}

// pinned is the rank that the key is pinned to; nil: none.
func (p *pool) pinned(key string) *slots { return p.byKey[key] }

// pin pins the key to the rank. Beyond maxPinnedKeys the oldest keys are forgotten.
func (p *pool) pin(key string, s *slots) {
	if p.byKey == nil {
		p.byKey = map[string]*slots{}
	}
	p.byKey[key] = s
	s.keys++
	p.keys = append(p.keys, key)
	if len(p.keys) > maxPinnedKeys {
		p.byKey[p.keys[0]].keys--
		delete(p.byKey, p.keys[0])
		p.keys = p.keys[1:]
	}
}

// unpin forgets the keys that are pinned to the rank.
func (p *pool) unpin(s *slots) {
	s.keys = 0
	p.keys = slices.DeleteFunc(p.keys, func(key string) bool {
		if p.byKey[key] != s {
			return false
		}
		delete(p.byKey, key)
		return true
	})
}
