package versions

import (
	"slices"

	"troupe/weights/plan"
)

// packedBy is the plan by which all ranks have packed a version; nil: they have by several, or by one of an earlier service.
func (v *version) packedBy() (p *planned) {
	for _, pub := range v.pubs {
		if pub.planned == nil || p != nil && p != pub.planned {
			return nil
		}
		p = pub.planned
	}
	return p
}

// base is the version from which the deltas of all ranks lead to this one, and their bytes; no version: there are none.
func (v *version) base() (base Version, bytes int64) {
	first := true
	for _, pub := range v.pubs {
		if !first && pub.Base != base || len(pub.Deltas) == 0 && len(pub.Buckets) > 0 {
			return Version{}, 0
		}
		base, first = pub.Base, false
		for _, d := range pub.Deltas {
			bytes += d.Bytes
		}
	}
	return base, bytes
}

func (v *version) bytes() (n int64) {
	for _, pub := range v.pubs {
		for _, b := range pub.Buckets {
			n += b.Bytes
		}
	}
	return n
}

// chain is those of the versions that lead to the newest by deltas which have fewer bytes together than the version itself. The deltas
// of the others are not needed.
func (s *State) chain(all []*version) (kept []*version) {
	newest := s.newest()
	if newest == nil || !newest.isComplete() {
		return nil
	}
	left := newest.bytes()
	for at := newest; at != nil && at.lost == ""; {
		base, bytes := at.base()
		if left -= bytes; base.IsZero() || left <= 0 {
			break
		}
		if at != newest {
			kept = append(kept, at)
		}
		at = findVersion(all, base)
		if at == nil || at.packedBy() != newest.packedBy() || at.packedBy() == nil {
			break
		}
	}
	slices.Reverse(kept)
	return kept
}

// deltas are the deltas from a base to a version for a part, the oldest first; nil: there are none, or the buckets are smaller.
func (s *State) deltas(v *version, p *planned, part plan.Part, base Version) (out [][]Offer) {
	var bytes, whole int64
	for _, b := range part.Buckets {
		whole += b.Bytes
	}
	for at := v; at != nil && at.Version != base; at = findVersion(s.earlier, baseOf(at)) {
		if baseOf(at).IsZero() || at.lost != "" || at.packedBy() != p {
			return nil
		}
		step := make([]Offer, len(part.Buckets))
		for i, b := range part.Buckets {
			step[i] = at.pubs[p.rank(b.Number)].Deltas[p.local[b.Number]]
			bytes += step[i].Bytes
		}
		if out = append(out, step); bytes >= whole {
			return nil
		}
		if baseOf(at) == base {
			slices.Reverse(out)
			return out
		}
	}
	return nil
}

func baseOf(v *version) Version {
	base, _ := v.base()
	return base
}
