package rendezvous

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"troupe/bus"
	"troupe/roles/registry"
)

// Verb is what a request does.
type Verb string

// The verbs.
const (
	Join   Verb = "join"   // begins a round: the group of a name is formed, or formed again
	Set    Verb = "set"    // several keys
	Get    Verb = "get"    // several keys; waits until there are all of them
	Check  Verb = "check"  // Get without the values
	Add    Verb = "add"    // to a number
	Append Verb = "append" // to a value
	Swap   Verb = "swap"   // if the value is the first of two, or there is none and the first is empty, it becomes the second
	Delete Verb = "delete"
	Count  Verb = "count"
)

// Bounds of the store of a role.
const (
	MostValue   = 512 << 10 // bytes of a value, and about those of the values in one answer
	MostBytes   = 64 << 20  // of all keys and values
	mostGroups  = 256
	mostWaiting = 1 << 14
	MostWait    = 10 * time.Second // of one request: it is repeated, in case its answer was lost
)

// Request is what a rank asks.
type Request struct {
	Verb   Verb          `msgpack:"verb"`
	Group  string        `msgpack:"group"` // a name that the ranks chose
	Epoch  uint64        `msgpack:"epoch,omitempty"`
	Round  uint64        `msgpack:"round,omitempty"` // how often the rank has joined the group in the epoch
	Rank   int           `msgpack:"rank"`
	Gen    uint32        `msgpack:"gen"`
	Seq    uint64        `msgpack:"seq,omitempty"` // of a change: grows with each, and stays when it is repeated
	Keys   []string      `msgpack:"keys,omitempty"`
	Values [][]byte      `msgpack:"values,omitempty"`
	Delta  int64         `msgpack:"delta,omitempty"`
	Wait   time.Duration `msgpack:"wait,omitempty"`
}

// Answer is the answer of the store.
type Answer struct {
	Epoch  uint64   `msgpack:"epoch,omitempty"`
	Round  uint64   `msgpack:"round,omitempty"`
	World  int      `msgpack:"world,omitempty"`
	Values [][]byte `msgpack:"values,omitempty"` // as many of the keys' as fit into an answer
	Number int64    `msgpack:"number,omitempty"`
	There  bool     `msgpack:"there,omitempty"`  // all keys are there, or were
	Absent []int    `msgpack:"absent,omitempty"` // ranks that have not joined the round, if keys are missing
}

// Epoch is a membership: the generation of each rank.
type Epoch struct {
	Number uint64
	Cause  string
	Gens   []uint32
}

// Store is the groups of a role in its present epoch.
type Store struct {
	role string

	mu      sync.Mutex // guards what follows
	epoch   Epoch
	groups  map[string]*group
	endedCh chan struct{} // closed and replaced with each epoch
	bytes   int
	waiting int
}

// group is what ranks call by one name. A rank that joins again begins a round of its own count, so that keys of an earlier group of the same
// epoch are not mistaken for those of the next.
type group struct {
	joined []uint64 // by rank
	joins  []uint64 // by rank, the number of its last request to join: a repeated one does not count
	rounds map[uint64]*round
}

type round struct {
	keys      map[string][]byte
	changedCh chan struct{} // closed and replaced when keys are set
	done      map[int]change
}

// change is the last one that a rank has made.
type change struct {
	seq    uint64
	answer Answer
}

// New makes the store of a role.
func New(role string, epoch Epoch) *Store {
	return &Store{role: role, epoch: epoch, groups: map[string]*group{}, endedCh: make(chan struct{})}
}

// Advance begins an epoch, if it is a later one than the present.
func (s *Store) Advance(epoch Epoch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if epoch.Number <= s.epoch.Number {
		return
	}
	s.epoch, s.groups, s.bytes = epoch, map[string]*group{}, 0
	close(s.endedCh)
	s.endedCh = make(chan struct{})
}

// Do carries out a request. It returns without the keys when those of a Get are not there after Wait.
func (s *Store) Do(ctx context.Context, q Request) (Answer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if q.Verb == Join && q.Wait > 0 {
		s.awaitPart(ctx, q)
	}
	if err := s.admit(q); err != nil {
		return Answer{}, err
	}
	if q.Verb == Join {
		return s.join(q)
	}
	r := s.groups[q.Group].round(q.Round)
	if r == nil {
		return Answer{}, bus.Errorf(bus.CodeInvalid, "role %s: rank %d uses round %d of the group %q, which all ranks have left; join it again", s.role, q.Rank, q.Round, q.Group)
	}
	switch q.Verb {
	case Get, Check:
		return s.read(ctx, r, q)
	case Count:
		return Answer{Number: int64(len(r.keys))}, nil
	case Set, Add, Append, Swap, Delete:
		if done := r.done[q.Rank]; done.seq == q.Seq {
			return done.answer, nil
		}
		answer, err := s.change(r, q)
		if err == nil {
			r.done[q.Rank] = change{q.Seq, answer}
		}
		return answer, err
	}
	return Answer{}, bus.Errorf(bus.CodeInvalid, "role %s: the store of the ranks has no verb %q", s.role, q.Verb)
}

// awaitPart waits for the epoch of which the process is part.
func (s *Store) awaitPart(ctx context.Context, q Request) {
	timer := time.NewTimer(min(q.Wait, MostWait))
	defer timer.Stop()
	for s.early(q) && s.await(ctx, timer.C, nil) {
	}
}

// early reports whether a process will be part of an epoch that has not begun.
func (s *Store) early(q Request) bool {
	return q.Rank >= len(s.epoch.Gens) || q.Rank >= 0 && q.Gen > s.epoch.Gens[q.Rank]
}

// await waits, without the lock, for a change or another epoch; false: the time is over.
func (s *Store) await(ctx context.Context, overCh <-chan time.Time, changedCh <-chan struct{}) bool {
	if s.waiting >= mostWaiting {
		return false // the caller's request is repeated
	}
	s.waiting++
	endedCh := s.endedCh
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.waiting--
	}()
	select {
	case <-changedCh:
	case <-endedCh:
	case <-overCh:
		return false
	case <-ctx.Done():
		return false
	}
	return true
}

// admit refuses requests of another epoch, and of processes that are not part of the present one.
func (s *Store) admit(q Request) error {
	switch {
	case q.Rank < 0 || s.early(q):
		return bus.Errorf(bus.CodeUnavailable, "role %s: this process of rank %d becomes part of the role when it is ready; form groups in a method that is called then, not in the constructor or a replayed method", s.role, q.Rank)
	case q.Gen < s.epoch.Gens[q.Rank]:
		return bus.Errorf(bus.CodeRefused, "role %s: this process was rank %d, and has been replaced in epoch %d", s.role, q.Rank, s.epoch.Number)
	case q.Verb == Join && q.Epoch == 0:
	case q.Epoch != s.epoch.Number:
		return s.changed(q.Epoch, nil)
	}
	if q.Verb == Join {
		return nil
	}
	if s.groups[q.Group] == nil || len(q.Keys) == 0 && q.Verb != Count {
		return bus.Errorf(bus.CodeInvalid, "role %s: rank %d has not joined the group %q, or named no key", s.role, q.Rank, q.Group)
	}
	return nil
}

// changed is the error of those who are in an earlier epoch. It names who has left, if the generations of that one are given.
func (s *Store) changed(from uint64, gens []uint32) error {
	err := bus.Errorf(bus.CodeWorkerLost, "the role is in epoch %d now (%s), and the group was formed in epoch %d; form it again", s.epoch.Number, s.epoch.Cause, from)
	var left []string
	for rank, gen := range gens {
		if rank >= len(s.epoch.Gens) || s.epoch.Gens[rank] != gen {
			left = append(left, strconv.Itoa(rank))
		}
	}
	err.Role, err.Details = s.role, map[string]string{registry.DetailLeft: strings.Join(left, ",")}
	return err
}

// join begins the next round of the rank.
func (s *Store) join(q Request) (Answer, error) {
	g := s.groups[q.Group]
	if g == nil {
		if len(s.groups) >= mostGroups {
			return Answer{}, bus.Errorf(bus.CodeRefused, "role %s: there are %d groups in this epoch; use names again", s.role, mostGroups)
		}
		n := len(s.epoch.Gens)
		g = &group{joined: make([]uint64, n), joins: make([]uint64, n), rounds: map[uint64]*round{}}
		s.groups[q.Group] = g
	}
	if g.joins[q.Rank] != q.Seq {
		g.joins[q.Rank] = q.Seq
		g.joined[q.Rank]++
		s.sweep(g)
	}
	number := g.joined[q.Rank]
	if g.rounds[number] == nil {
		g.rounds[number] = &round{keys: map[string][]byte{}, changedCh: make(chan struct{}), done: map[int]change{}}
	}
	return Answer{Epoch: s.epoch.Number, Round: number, World: len(s.epoch.Gens)}, nil
}

// sweep forgets the rounds that no rank is in.
func (s *Store) sweep(g *group) {
	first := slices.Min(g.joined)
	for number, r := range g.rounds {
		if number < first {
			for key, value := range r.keys {
				s.bytes -= len(key) + len(value)
			}
			delete(g.rounds, number)
		}
	}
}

// absent is the first ranks that have not joined a round.
func (g *group) absent(number uint64) (ranks []int) {
	for rank, joined := range g.joined {
		if joined < number && len(ranks) < 32 {
			ranks = append(ranks, rank)
		}
	}
	return ranks
}

func (g *group) round(number uint64) *round {
	if g == nil {
		return nil
	}
	return g.rounds[number]
}

// read answers when all keys are there, or with what there is after the wait.
func (s *Store) read(ctx context.Context, r *round, q Request) (Answer, error) {
	lacks := func() bool {
		return slices.ContainsFunc(q.Keys, func(key string) bool { _, there := r.keys[key]; return !there })
	}
	if q.Wait > 0 && lacks() {
		timer, gens := time.NewTimer(min(q.Wait, MostWait)), s.epoch.Gens
		defer timer.Stop()
		for lacks() && s.await(ctx, timer.C, r.changedCh) && s.epoch.Number == q.Epoch {
		}
		if s.epoch.Number != q.Epoch {
			return Answer{}, s.changed(q.Epoch, gens)
		}
	}
	if lacks() {
		return Answer{Absent: s.groups[q.Group].absent(q.Round)}, nil
	}
	answer := Answer{There: true}
	if q.Verb == Get {
		for room := MostValue; len(answer.Values) < len(q.Keys); {
			value := r.keys[q.Keys[len(answer.Values)]]
			if room -= len(value); room < 0 && len(answer.Values) > 0 {
				break
			}
			answer.Values = append(answer.Values, value)
		}
	}
	return answer, nil
}

// change carries out a verb that changes keys.
func (s *Store) change(r *round, q Request) (answer Answer, err error) {
	key := q.Keys[0]
	old, there := r.keys[key]
	value := func(i int) []byte {
		if i < len(q.Values) {
			return q.Values[i]
		}
		return nil
	}
	switch q.Verb {
	case Set:
		for i, key := range q.Keys {
			if err = s.put(r, key, value(i)); err != nil {
				return Answer{}, err
			}
		}
	case Add:
		n := int64(0)
		if there {
			if n, err = strconv.ParseInt(string(old), 10, 64); err != nil {
				return Answer{}, bus.Errorf(bus.CodeInvalid, "role %s: the value of %q is no number, to which %d could be added", s.role, key, q.Delta)
			}
		}
		answer.Number = n + q.Delta
		err = s.put(r, key, strconv.AppendInt(nil, answer.Number, 10))
	case Append:
		err = s.put(r, key, slices.Concat(old, value(0)))
	case Swap:
		now := old
		switch expected, desired := value(0), value(1); {
		case there && string(old) == string(expected), !there && len(expected) == 0:
			now = desired
			err = s.put(r, key, desired)
		case !there:
			now = expected
		}
		answer.Values = [][]byte{now}
	case Delete:
		answer.There = there
		if there {
			s.bytes -= len(key) + len(old)
			delete(r.keys, key)
		}
		return answer, nil
	}
	close(r.changedCh)
	r.changedCh = make(chan struct{})
	return answer, err
}

func (s *Store) put(r *round, key string, value []byte) error {
	grows := len(value)
	if old, there := r.keys[key]; there {
		grows -= len(old)
	} else {
		grows += len(key)
	}
	if len(value) > MostValue || s.bytes+grows > MostBytes {
		return bus.Errorf(bus.CodeRefused, "role %s: the value of %q has %d bytes; one has at most %d, and all of the role %d", s.role, key, len(value), MostValue, MostBytes)
	}
	s.bytes += grows
	r.keys[key] = value
	return nil
}
