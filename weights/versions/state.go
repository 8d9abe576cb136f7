package versions

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"time"

	"troupe/bus/wire"
	"troupe/weights/plan"
)

const (
	maxMembers  = 100_000
	maxComplete = 128 // versions whose age is known
)

// State is the versions of one name. One goroutine uses it.
type State struct {
	name    string
	catalog *plan.Catalog
	members map[string]*member
	ids     int // of plans and cuts; unique with the prefix
	prefix  string

	epoch    *epoch // nil: nothing was published
	last     uint64 // the newest epoch that any member knows
	versions []*version
	earlier  []*version // that were dropped, and whose deltas are kept; the newest last
	complete []Version  // the newest last
	planned  *planned   // nil: members or epoch have changed since
	waiting  []waiting
	number   uint64
	told     News
	effects  []Effect
}

// member is a process that has bound tensors.
type member struct {
	Member
	layout    *plan.Layout
	digest    layoutDigest
	since     time.Time
	committed Version
	staged    Version
	failed    string // why its last commit failed
	report    map[Done]Report
	bytes     map[string]int64
}

// String names the member for messages.
func (m *Member) String() string {
	if m.Role == "" {
		return "process " + m.Session
	}
	return fmt.Sprintf("rank %d of %s", m.Rank, m.Role)
}

type layoutDigest [32]byte

// Effect is something that follows a change: an Answer, a Cut, a KeepEpoch or a News.
type Effect interface{ effect() }

// Answer answers a request.
type Answer struct {
	To    any
	Value any
	Err   error
}

// Cut is a request to a member, by its session. Its outcome comes with CutDone.
type Cut struct {
	Session, Member string
	Request         CutRequest
}

// KeepEpoch is a number that must not be given again, whatever ends: it is stored before the effects that follow.
type KeepEpoch struct{ Epoch uint64 }

func (Answer) effect()    {}
func (Cut) effect()       {}
func (KeepEpoch) effect() {}
func (News) effect()      {}

// New returns the state of a name without members. prefix is unique among the services that there ever are, and epoch is the
// last one that was stored.
func New(name, prefix string, epoch uint64) *State {
	return &State{name: name, catalog: &plan.Catalog{}, members: map[string]*member{}, prefix: prefix, last: epoch}
}

// Take returns the effects since the last call, in order.
func (s *State) Take() []Effect {
	out := s.effects
	s.effects = nil
	return out
}

func (s *State) do(e Effect)              { s.effects = append(s.effects, e) }
func (s *State) answer(to, value any)     { s.do(Answer{To: to, Value: value}) }
func (s *State) refuse(to any, err error) { s.do(Answer{To: to, Err: err}) }
func (s *State) newID() string            { s.ids++; return s.prefix + "-" + strconv.Itoa(s.ids) }
func (s *State) find(v Version) *version  { return findVersion(s.versions, v) }

// Empty reports whether no process has bound the name.
func (s *State) Empty() bool { return len(s.members) == 0 }

func findVersion(all []*version, v Version) *version {
	if i := slices.IndexFunc(all, func(x *version) bool { return x.Version == v }); i >= 0 {
		return all[i]
	}
	return nil
}

// need returns a member, or refuses its request: it binds again then.
func (s *State) need(to any, id string) *member {
	m := s.members[id]
	if m == nil {
		s.refuse(to, ErrUnbound)
	}
	return m
}

// Bind registers a member, or what it has bound anew. Versions that it took before are not affected.
func (s *State) Bind(now time.Time, to any, r BindRequest) {
	l, err := s.decode(r.Member.ID, r.Layout)
	if err != nil {
		s.refuse(to, wire.Errorf(wire.CodeInvalid, "weights %q: %v", s.name, err))
		return
	}
	if len(s.members) >= maxMembers && s.members[r.Member.ID] == nil {
		s.refuse(to, wire.Errorf(wire.CodeBusy, "weights %q: %d processes have bound tensors already", s.name, len(s.members)))
		return
	}
	m := &member{Member: r.Member, layout: l, digest: l.Digest(s.catalog), since: now, committed: r.Committed, report: map[Done]Report{}, bytes: map[string]int64{}}
	if old := s.members[m.ID]; old != nil {
		s.forgetWaiting(m.ID)
		m.since, m.committed, m.report, m.bytes = old.since, old.committed, old.report, old.bytes
	}
	s.members[m.ID] = m
	s.planned = nil
	s.last = max(s.last, r.Epoch, r.Committed.Epoch)
	s.restore(now, m, r.Held)
	s.answer(to, s.News())
}

// decode reads a layout. A tensor that only processes which have ended had with another shape may have a new one.
func (s *State) decode(id string, data []byte) (*plan.Layout, error) {
	l, err := plan.DecodeLayout(s.catalog, data)
	if err == nil {
		return l, nil
	}
	fresh := &plan.Catalog{}
	others := map[*member]*plan.Layout{}
	for _, m := range s.members {
		if m.ID != id {
			moved, moveErr := plan.DecodeLayout(fresh, plan.EncodeLayout(s.catalog, m.layout))
			if moveErr != nil {
				return nil, moveErr
			}
			others[m] = moved
		}
	}
	l, err = plan.DecodeLayout(fresh, data)
	if err != nil {
		return nil, err
	}
	for m, moved := range others {
		m.layout = moved
	}
	for _, v := range s.versions {
		v.move(s.catalog, fresh)
	}
	s.catalog, s.planned = fresh, nil
	return l, nil
}

// Gone ends a member: its process has ended, or has not been heard for long.
func (s *State) Gone(now time.Time, id, why string) {
	m := s.members[id]
	if m == nil {
		return
	}
	delete(s.members, id)
	s.planned = nil
	s.forgetWaiting(id)
	for _, v := range slices.Concat(s.versions, s.earlier) {
		delete(v.takers, id)
		v.lose(s, m, why)
	}
	if e := s.epoch; e != nil && e.ranks[m.Rank] == id && e.over == "" {
		e.over = fmt.Sprintf("%s has ended: %s", m, why)
	}
	s.settle(now)
}

// Lasting are the versions that a member still takes, as it says regularly: others it has given up.
func (s *State) Lasting(now time.Time, id string, taking []Version) {
	changed := false
	for _, v := range s.versions {
		if v.takers[id] && !slices.Contains(taking, v.Version) {
			delete(v.takers, id)
			changed = true
		}
	}
	if changed {
		s.settle(now)
	}
}

// Report records what a member has done.
func (s *State) Report(now time.Time, to any, id string, r Report) {
	m := s.need(to, id)
	if m == nil {
		return
	}
	r.Error = clip(r.Error)
	m.report[r.What] = r
	switch r.What {
	case Staged:
		m.staged = r.Version
		for way, n := range r.Bytes {
			if len(m.bytes) < maxWays || m.bytes[way] > 0 {
				m.bytes[way] += n
			}
		}
	case Committed:
		m.committed, m.failed = r.Version, ""
	case Failed:
		m.failed = cmp.Or(r.Error, "unknown")
	}
	if v := s.find(r.Version); v != nil {
		delete(v.takers, id)
	}
	s.answer(to, nil)
	s.settle(now)
}

const (
	maxWays = 16  // of bytes of one member
	maxText = 500 // bytes of an error that is shown
)

func clip(text string) string {
	if len(text) > maxText {
		return text[:maxText]
	}
	return text
}

// settle drops versions that are not needed any more, and tells members of changes.
func (s *State) settle(now time.Time) {
	newest := s.newest()
	s.versions = slices.DeleteFunc(s.versions, func(v *version) bool {
		switch {
		case v.lost != "" && len(v.takers) == 0:
		case v.isComplete() && v != newest && len(v.takers) == 0:
		case !v.isComplete() && (v.epoch != s.epoch || v.epoch.over != "" || newest != nil && v.Compare(newest.Version) < 0):
			v.lost = cmp.Or(v.lost, v.epoch.over, "a newer one was published")
		default:
			return false
		}
		s.failWaiting(v)
		s.earlier = append(s.earlier, v)
		return true
	})
	s.earlier = s.chain(s.earlier)
	s.announce()
}

// newest is the newest complete version that can be taken; nil: there is none.
func (s *State) newest() *version {
	for i := len(s.versions) - 1; i >= 0; i-- {
		if v := s.versions[i]; v.isComplete() && v.lost == "" {
			return v
		}
	}
	return nil
}

// announce tells members of a change.
func (s *State) announce() {
	if n := s.News(); !n.equal(s.told) {
		s.number++
		n.Number = s.number
		s.told = n
		s.do(n)
	}
}

// News is what members are told now.
func (s *State) News() News {
	n := News{Service: s.prefix, Epoch: s.last, Number: s.number, Complete: slices.Clone(s.complete)}
	for _, v := range s.versions {
		n.Kept = append(n.Kept, v.Version)
		if v.isComplete() && v.lost == "" {
			n.Available = append(n.Available, v.Version)
		}
	}
	for _, v := range s.earlier {
		n.Deltas = append(n.Deltas, v.Version)
	}
	return n
}

// equal reports whether two news say the same.
func (n *News) equal(o News) bool {
	return n.Epoch == o.Epoch && slices.Equal(n.Complete, o.Complete) && slices.Equal(n.Available, o.Available) && slices.Equal(n.Kept, o.Kept) && slices.Equal(n.Deltas, o.Deltas)
}
