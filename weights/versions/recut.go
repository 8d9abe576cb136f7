package versions

import (
	"slices"
	"time"

	"troupe/bus/wire"
	"troupe/weights/plan"
)

// recut is a version that is packed once more, for units that no rank knew when it was published. Buckets that a unit takes whole are
// used as they are.
type recut struct {
	number  uint64
	plan    *planned
	sources []recutSource
	pending map[string]bool // members that pack
	waiting []waiting
	err     error
}

// recutSource is a rank of a version as a source: its shards are the pieces that it has packed.
type recutSource struct {
	rank   int
	part   plan.Part
	pieces []int32 // by shard, its piece
	asIs   bool    // units take its buckets as they are
	offers []Offer // the new buckets
	sent   []int32 // their numbers in the plan
}

// recut answers a request with what the ranks of a version pack for its unit, when they have.
func (s *State) recut(now time.Time, w waiting, m *member, v *version) {
	r := v.recutFor(m)
	if r == nil {
		r = s.beginRecut(v)
		v.recuts = append(v.recuts, r)
	}
	if len(r.pending) > 0 && r.err == nil {
		r.waiting = append(r.waiting, w)
		return
	}
	s.finishRecut(v, r, w, m)
}

// recutFor is the recut that has a unit for a member.
func (v *version) recutFor(m *member) *recut {
	for _, r := range v.recuts {
		if r.err == nil {
			key, _ := r.plan.places.unit(m)
			if _, known := r.plan.units[key]; known {
				return r
			}
		}
	}
	return nil
}

// beginRecut plans what the ranks of a version pack for all receivers for which it is not packed, and asks them.
func (s *State) beginRecut(v *version) *recut {
	s.ids++
	r := &recut{number: uint64(s.ids), plan: &planned{id: s.newID(), ranks: v.ranks, index: map[int]int{}, units: map[unitKey]int{}}, pending: map[string]bool{}}
	sources := make([]plan.Source, len(v.ranks))
	for i, rank := range v.ranks {
		src, layout, err := s.packed(v, rank)
		if err != nil {
			r.err = err
			return r
		}
		r.plan.index[rank] = i
		pub := v.pubs[rank]
		sources[i] = plan.Source{Layout: layout, Place: r.plan.places.add(pub.host, pub.device)}
		r.sources = append(r.sources, src)
	}
	units := r.plan.addUnits(slices.DeleteFunc(s.receivers(), func(m *member) bool { return v.plannedFor(m) != nil || v.recutFor(m) != nil }))
	r.plan.plan = plan.Make(s.catalog, sources, units)
	r.plan.number()
	for i := range r.sources {
		s.ask(v, r, i, len(units))
	}
	return r
}

// packed is what a rank has packed, as the layout of a source.
func (s *State) packed(v *version, rank int) (recutSource, *plan.Layout, error) {
	part, err := v.pieces(s.catalog, rank)
	if err != nil {
		return recutSource{}, nil, wire.Errorf(wire.CodeMalformed, "weights %q: what rank %d says that it has packed: %v", s.name, rank, err)
	}
	layout, pieces := s.catalog.Packed(v.pubs[rank].layout, part)
	return recutSource{rank: rank, part: part, pieces: pieces}, layout, nil
}

// ask asks a source to pack, unless its units take buckets as they are.
func (s *State) ask(v *version, r *recut, source, units int) {
	src := &r.sources[source]
	part := r.plan.plan.WantedOf(source)
	if len(part.Pieces) == 0 {
		return
	}
	if src.asIs = r.takesWhole(source, units); src.asIs {
		return
	}
	for i := range part.Pieces {
		part.Pieces[i].Shard = src.pieces[part.Pieces[i].Shard]
	}
	for _, b := range part.Buckets {
		src.sent = append(src.sent, b.Number)
	}
	pub := v.pubs[src.rank]
	r.pending[pub.member] = true
	s.do(Cut{Session: pub.session, Member: pub.member, Request: CutRequest{Number: r.number, Version: v.Version, Part: part.Encode()}})
}

// takesWhole reports whether each unit takes whole buckets of a source, or nothing of them.
func (r *recut) takesWhole(source, units int) bool {
	src := &r.sources[source]
	count := make([]int, len(src.part.Buckets))
	for _, q := range src.part.Pieces {
		count[q.Bucket]++
	}
	for unit := range units {
		taken := make([]int, len(count))
		part := r.plan.plan.OfUnit(unit)
		for _, q := range part.Pieces {
			if int(r.plan.plan.Buckets[part.Buckets[q.Bucket].Number].Source) != source {
				continue
			}
			old := src.part.Pieces[src.pieces[q.From]]
			if !slices.Equal(old.Box, q.Box) {
				return false
			}
			taken[old.Bucket]++
		}
		for i, n := range taken {
			if n != 0 && n != count[i] {
				return false
			}
		}
	}
	return true
}

// CutDone is what a publisher has packed for a recut, or why it has not.
func (s *State) CutDone(now time.Time, id string, number uint64, offers []Offer, err error) {
	for _, v := range s.versions {
		for _, r := range v.recuts {
			if r.number == number && r.pending[id] {
				s.cutDone(v, r, id, offers, err)
				return
			}
		}
	}
}

func (s *State) cutDone(v *version, r *recut, id string, offers []Offer, err error) {
	delete(r.pending, id)
	for i := range r.sources {
		src := &r.sources[i]
		if v.pubs[src.rank].member == id && len(src.sent) > 0 {
			if src.offers = offers; err == nil && len(offers) != len(src.sent) {
				err = wire.Errorf(wire.CodeMalformed, "rank %d has packed %d buckets of %d", src.rank, len(offers), len(src.sent))
			}
		}
	}
	if err != nil {
		r.fail(s, v, wire.Errorf(wire.CodeOf(err), "weights %q: %s could not be packed for this layout: %w", s.name, v, err))
		return
	}
	if len(r.pending) > 0 {
		return
	}
	waiting := r.waiting
	r.waiting = nil
	for _, w := range waiting {
		if m := s.members[w.member]; m != nil {
			s.finishRecut(v, r, w, m)
		}
	}
}

// fail answers all that wait for a recut.
func (r *recut) fail(s *State, v *version, err error) {
	r.err, r.pending = err, nil
	for _, w := range r.waiting {
		delete(v.takers, w.member)
		s.refuse(w.to, err)
	}
	r.waiting = nil
}

// finishRecut answers a request when all that it needs is packed.
func (s *State) finishRecut(v *version, r *recut, w waiting, m *member) {
	if r.err != nil {
		delete(v.takers, m.ID)
		s.refuse(w.to, r.err)
		return
	}
	key, _ := r.plan.places.unit(m)
	unit := r.plan.units[key]
	if err := r.plan.plan.Refused[unit]; err != nil {
		delete(v.takers, m.ID)
		s.refuse(w.to, wire.Errorf(wire.CodeInvalid, "weights %q: %v", s.name, err))
		return
	}
	out := StageAnswer{Version: v.Version, PartName: r.plan.partName(unit)}
	part := r.resolve(v, unit, &out)
	if out.PartName != w.request.Part {
		out.Part = part.Encode()
	}
	s.answer(w.to, out)
}

// resolve is the part of a unit with the buckets that there are: new ones, and old ones that it takes as they are.
func (r *recut) resolve(v *version, unit int, out *StageAnswer) (part plan.Part) {
	type bucket struct{ rank, number int }
	local := map[bucket]int32{}
	planned := r.plan.plan.OfUnit(unit)
	for _, q := range planned.Pieces {
		number := planned.Buckets[q.Bucket].Number
		source := int(r.plan.plan.Buckets[number].Source)
		src := &r.sources[source]
		at := bucket{src.rank, int(number)}
		if src.asIs {
			old := src.part.Pieces[src.pieces[q.From]]
			at.number, q.Offset = -1-int(old.Bucket), old.Offset
		}
		if _, known := local[at]; !known {
			local[at] = int32(len(part.Buckets))
			offer := v.pubs[src.rank].Buckets[max(0, -1-at.number)]
			if !src.asIs {
				offer = src.offers[slices.Index(src.sent, number)]
			}
			part.Buckets = append(part.Buckets, plan.PartBucket{Number: int32(len(part.Buckets)), Bytes: offer.Bytes})
			out.Buckets = append(out.Buckets, offer)
		}
		q.Bucket = local[at]
		part.Pieces = append(part.Pieces, q)
	}
	slices.SortStableFunc(part.Pieces, func(a, b plan.Piece) int { return int(a.Bucket) - int(b.Bucket) })
	return part
}
