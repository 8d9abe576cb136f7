package versions

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"troupe/bus/wire"
	"troupe/weights/plan"
)

// version is a version that is being published, or that can be taken.
type version struct {
	Version
	epoch    *epoch // nil: an earlier service knew it
	ranks    []int  // that publish it, sorted
	pubs     map[int]*publication
	shared   *planned         // by which all ranks pack it; nil: not all had bound when the first one began
	offered  map[int]*planned // by rank, what its part is of
	begun    time.Time
	done     time.Time // when it was complete
	restored bool      // an earlier service knew it; begun and done are unknown
	lost     string    // why it cannot be taken
	takers   map[string]bool
	recuts   []*recut
}

// publication is what one rank has published of a version.
type publication struct {
	Publication
	member, session string
	host, device    string
	plan            string
	planned         *planned // nil: an earlier service made the plan
	layout          *plan.Layout
	part            []byte // when planned is nil
	took            float64
}

func (v *version) isComplete() bool { return len(v.pubs) == len(v.ranks) }

// missing are the ranks that have not published.
func (v *version) missing() (out []int) {
	for _, rank := range v.ranks {
		if v.pubs[rank] == nil {
			out = append(out, rank)
		}
	}
	return out
}

// lose records that a member that published the version has ended, and its buckets with it.
func (v *version) lose(s *State, m *member, why string) {
	if pub := v.pubs[m.Rank]; pub != nil && pub.member == m.ID {
		v.lost = cmp.Or(v.lost, fmt.Sprintf("%s, which published it, has ended: %s", m, why))
	}
	for _, r := range v.recuts {
		if r.pending[m.ID] {
			r.fail(s, v, wire.Errorf(wire.CodeWorkerLost, "weights %q: %s, which was to pack %s, has ended: %s", s.name, m, v, why))
		}
	}
}

// move translates layouts into another catalog. A version with a tensor that has another shape there cannot be taken any more.
func (v *version) move(from, to *plan.Catalog) {
	for _, pub := range v.pubs {
		l, err := plan.DecodeLayout(to, plan.EncodeLayout(from, pub.layout))
		if err != nil {
			v.lost = cmp.Or(v.lost, "the model has changed: "+err.Error())
			return
		}
		if pub.planned != nil {
			part := pub.planned.plan.OfSource(pub.planned.index[v.rankOf(pub)])
			pub.part, pub.planned = part.Encode(), nil
		}
		pub.layout = l
	}
	v.recuts, v.shared, v.offered = nil, nil, map[int]*planned{}
}

func (v *version) rankOf(pub *publication) int {
	for rank, p := range v.pubs {
		if p == pub {
			return rank
		}
	}
	return -1
}

// pieces is what a publication has packed.
func (v *version) pieces(c *plan.Catalog, rank int) (plan.Part, error) {
	pub := v.pubs[rank]
	if pub.planned != nil {
		return pub.planned.plan.OfSource(pub.planned.index[rank]), nil
	}
	return plan.DecodePart(c, pub.layout, pub.part)
}

// Publish records what a member has packed. The version is complete with its last rank.
func (s *State) Publish(now time.Time, to any, id string, r PublishRequest) {
	m := s.need(to, id)
	if m == nil {
		return
	}
	v := s.find(r.Version)
	if v == nil || v.offered[m.Rank] == nil || v.epoch == nil || v.epoch.ranks[m.Rank] != id {
		s.refuse(to, s.abandoned(r.Version))
		return
	}
	p := v.offered[m.Rank]
	if p.id != r.Plan || len(p.plan.OfSource(p.index[m.Rank]).Buckets) != len(r.Content.Buckets) || len(r.Content.Deltas) > 0 && len(r.Content.Deltas) != len(r.Content.Buckets) {
		s.refuse(to, wire.Errorf(wire.CodeInvalid, "weights %q: %s was packed by another plan; publish it again", s.name, v))
		return
	}
	if v.pubs[m.Rank] == nil { // otherwise the answer was lost
		v.pubs[m.Rank] = &publication{Publication: r.Content, member: id, session: m.Session, host: m.Host, device: m.Device, plan: p.id, planned: p, layout: m.layout, took: r.Took}
		if v.isComplete() {
			s.becomeComplete(now, v)
		}
	}
	s.answer(to, nil)
	s.settle(now)
}

// abandoned is the error of a member that publishes a version which is not there any more.
func (s *State) abandoned(v Version) error {
	why := "a newer one was published, or this service does not know it"
	if e := s.epoch; e != nil && e.number == v.Epoch && e.over != "" {
		why = e.over
	} else if e != nil && v.Epoch < e.number {
		why = fmt.Sprintf("%s publishes in epoch %d now", e, e.number)
	}
	return superseded("weights %q: %s was given up: %s; go on with the next step", s.name, v, why)
}

func (s *State) becomeComplete(now time.Time, v *version) {
	v.done = now
	s.addComplete(v.Version)
	still := s.waiting[:0]
	for _, w := range s.waiting {
		if w.version == v.Version || w.version.IsZero() {
			s.stage(now, w.to, s.members[w.member], v, w.request)
		} else {
			still = append(still, w)
		}
	}
	clear(s.waiting[len(still):])
	s.waiting = still
}

// addComplete adds a version to those of which the age is known.
func (s *State) addComplete(v Version) {
	at, known := slices.BinarySearchFunc(s.complete, v, Version.Compare)
	if !known {
		s.complete = slices.Insert(s.complete, at, v)
	}
	if n := len(s.complete) - maxComplete; n > 0 {
		s.complete = slices.Delete(s.complete, 0, n)
	}
}

// restore records what a member has published and an earlier service knew.
func (s *State) restore(now time.Time, m *member, held []Held) {
	for _, h := range held {
		if h.Version.IsZero() || len(h.Ranks) == 0 || !slices.Contains(h.Ranks, m.Rank) {
			continue
		}
		s.last = max(s.last, h.Version.Epoch)
		v := s.find(h.Version)
		if v == nil {
			v = &version{Version: h.Version, epoch: s.restoreEpoch(m, h.Version.Epoch), ranks: slices.Sorted(slices.Values(h.Ranks)), begun: now, restored: true,
				pubs: map[int]*publication{}, offered: map[int]*planned{}, takers: map[string]bool{}}
			at, _ := slices.BinarySearchFunc(s.versions, v, func(a, b *version) int { return a.Compare(b.Version) })
			s.versions = slices.Insert(s.versions, at, v)
		}
		if v.pubs[m.Rank] != nil || !slices.Equal(v.ranks, slices.Sorted(slices.Values(h.Ranks))) {
			continue
		}
		layout := m.layout
		if len(h.Layout) > 0 {
			l, err := plan.DecodeLayout(s.catalog, h.Layout)
			if err != nil {
				continue // the model has changed since
			}
			layout = l
		}
		v.pubs[m.Rank] = &publication{Publication: h.Content, member: m.ID, session: m.Session, host: m.Host, device: m.Device, plan: h.Plan, layout: layout, part: h.Part}
		v.epoch.ranks[m.Rank], v.epoch.gens[m.Rank] = m.ID, m.Gen
		if v.isComplete() {
			s.becomeComplete(now, v)
		}
	}
	if len(held) > 0 {
		s.settle(now)
	}
}

// restoreEpoch is the epoch of that number, of which an earlier service knew: the newest goes on.
func (s *State) restoreEpoch(m *member, number uint64) *epoch {
	for _, v := range s.versions {
		if v.epoch.number == number {
			return v.epoch
		}
	}
	e := &epoch{number: number, role: m.Role, incarnation: m.Incarnation, world: m.World, ranks: map[int]string{}, gens: map[int]uint32{}}
	if s.epoch == nil || s.epoch.number < number {
		s.epoch, s.planned = e, nil
	} else {
		e.over = "a later epoch has begun"
	}
	return e
}

// names lists ranks for messages.
func names(ranks []int) string {
	if len(ranks) > 8 {
		return fmt.Sprintf("%s and %d more", names(ranks[:8]), len(ranks)-8)
	}
	out := make([]string, len(ranks))
	for i, rank := range ranks {
		out[i] = fmt.Sprint(rank)
	}
	return strings.Join(out, ", ")
}
