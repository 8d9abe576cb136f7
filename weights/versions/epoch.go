package versions

import (
	"fmt"
	"slices"
	"time"

	"troupe/bus/wire"
)

// epoch is one set of processes that publish: an incarnation of a role with one process on each rank. Another process on a rank
// begins the next epoch, and so does the first version after one of them has ended. Numbers come from here alone.
type epoch struct {
	number            uint64
	role, incarnation string
	world             int
	ranks             map[int]string // members that have begun a version, by rank
	gens              map[int]uint32
	over              string   // why nothing becomes complete in it any more; empty: it goes on
	earlier           []string // incarnations of the role that have published before: what is left of them is refused
}

const maxEarlier = 16

// join makes a member part of the epoch, or begins the next one.
func (s *State) join(m *member) (*epoch, error) {
	e := s.epoch
	if e == nil || !e.includes(m) {
		switch {
		case e != nil && e.role == m.Role && slices.Contains(e.earlier, m.Incarnation):
			return nil, wire.Errorf(wire.CodeFenced, "weights %q: %s is of a role that was started again since", s.name, m)
		case e != nil && s.lives(e) && (e.role != m.Role || e.role == ""):
			return nil, wire.Errorf(wire.CodeExists, "weights %q are published by %s; one role publishes a name: choose another name, or end that role", s.name, e)
		}
		return s.begin(m), nil
	}
	if m.Gen < e.gens[m.Rank] {
		return nil, wire.Errorf(wire.CodeFenced, "weights %q: %s was replaced by a later process", s.name, m)
	}
	if at := e.ranks[m.Rank]; e.over != "" || at != "" && at != m.ID {
		return s.begin(m), nil
	}
	e.ranks[m.Rank], e.gens[m.Rank] = m.ID, m.Gen
	return e, nil
}

// begin begins the next epoch.
func (s *State) begin(m *member) *epoch {
	e := &epoch{role: m.Role, incarnation: m.Incarnation, world: m.World, ranks: map[int]string{m.Rank: m.ID}, gens: map[int]uint32{m.Rank: m.Gen}}
	if old := s.epoch; old != nil {
		if old.over == "" {
			old.over = fmt.Sprintf("%s has begun the next epoch", m)
		}
		if old.role == m.Role {
			e.earlier = old.earlier
		}
		switch {
		case old.includes(m): // later processes keep fencing earlier ones of their ranks
			for rank, gen := range old.gens {
				if rank != m.Rank {
					e.gens[rank] = gen
				}
			}
		case old.role == m.Role && old.incarnation != m.Incarnation:
			e.earlier = append(slices.Clone(e.earlier[max(0, len(e.earlier)-maxEarlier+1):]), old.incarnation)
		}
	}
	s.last++
	e.number = s.last
	s.epoch, s.planned = e, nil
	s.do(KeepEpoch{e.number})
	return e
}

// includes reports whether a member is of the role that publishes in the epoch.
func (e *epoch) includes(m *member) bool {
	return e.role == m.Role && e.incarnation == m.Incarnation && e.world == m.World
}

// lives reports whether a process of the epoch lives.
func (s *State) lives(e *epoch) bool {
	for _, id := range e.ranks {
		if s.members[id] != nil {
			return true
		}
	}
	return false
}

func (e *epoch) String() string {
	if e.role == "" {
		return "a driver"
	}
	return "role " + e.role
}

// publishes reports whether a member publishes, in the epoch that goes on, rather than takes.
func (s *State) publishes(m *member) bool {
	switch {
	case m.Use == Publish:
		return true
	case m.Use == Take || s.epoch == nil:
		return false
	}
	return s.epoch.role == m.Role && s.epoch.incarnation == m.Incarnation
}

// Begin gives a version its number, and the member its part of the plan.
func (s *State) Begin(now time.Time, to any, id string, r BeginRequest) {
	m := s.need(to, id)
	if m == nil {
		return
	}
	if m.Use == Take {
		s.refuse(to, wire.Errorf(wire.CodeInvalid, "weights %q: these tensors were bound to take weights; bind what is published without that", s.name))
		return
	}
	ranks, err := ranksOf(m, r.Ranks)
	if err != nil {
		s.refuse(to, err)
		return
	}
	e, err := s.join(m)
	if err != nil {
		s.refuse(to, err)
		return
	}
	v, err := s.beginVersion(now, m, Version{e.number, r.Step}, ranks)
	if err != nil {
		s.refuse(to, err)
		return
	}
	p := s.planFor(v, m)
	out := BeginAnswer{Version: v.Version, Ranks: ranks, Plan: p.id, Far: s.hasFar(ranks), Service: s.prefix, Number: s.number}
	if p.id != r.Plan {
		part := p.plan.OfSource(p.index[m.Rank])
		out.Part = part.Encode()
	}
	v.offered[m.Rank] = p
	s.answer(to, out)
	s.settle(now)
}

// ranksOf are the ranks that publish, sorted.
func ranksOf(m *member, asked []int) ([]int, error) {
	world := max(m.World, 1)
	if len(asked) == 0 {
		for rank := range world {
			asked = append(asked, rank)
		}
		return asked, nil
	}
	ranks := slices.Compact(slices.Sorted(slices.Values(asked)))
	if ranks[0] < 0 || ranks[len(ranks)-1] >= world || !slices.Contains(ranks, m.Rank) {
		return nil, wire.Errorf(wire.CodeInvalid, "rank %d cannot publish for the ranks %v of a role of %d", m.Rank, asked, world)
	}
	return ranks, nil
}

// beginVersion finds the version that other ranks have begun, or adds it. A rank may begin again what it has not published.
func (s *State) beginVersion(now time.Time, m *member, number Version, ranks []int) (*version, error) {
	if n := len(s.complete); n > 0 && number.Compare(s.complete[n-1]) <= 0 {
		return nil, wire.Errorf(wire.CodeExists, "weights %q: %s is not newer than %s, which is complete; publish a greater step", s.name, number, s.complete[n-1])
	}
	v := s.find(number)
	if v == nil {
		v = &version{Version: number, epoch: s.epoch, ranks: ranks, begun: now, pubs: map[int]*publication{}, offered: map[int]*planned{}, takers: map[string]bool{}}
		at, _ := slices.BinarySearchFunc(s.versions, v, func(a, b *version) int { return a.Compare(b.Version) })
		s.versions = slices.Insert(s.versions, at, v)
		return v, nil
	}
	switch {
	case v.pubs[m.Rank] != nil:
		return nil, wire.Errorf(wire.CodeExists, "weights %q: rank %d has published %s; publish a greater step", s.name, m.Rank, number)
	case !slices.Equal(v.ranks, ranks):
		return nil, wire.Errorf(wire.CodeInvalid, "weights %q: another rank publishes %s for the ranks %v, and this one for %v", s.name, number, v.ranks, ranks)
	}
	return v, nil
}
