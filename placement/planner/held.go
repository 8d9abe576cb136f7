package planner

import (
	"cmp"
	"fmt"
	"slices"
)

// held is a reservation as the book counts it: with the stocks and positions that its nodes and devices resolve to.
type held struct {
	Reservation
	trial bool       // it is part of the very plan that is being made, and never in its own way
	runs  []*stock   // by worker; nil where the node is not there
	spots []heldSpot // the slots of all workers; those whose device is not there are left out
}

type heldSpot struct {
	stock *stock
	pos   int
	slot  *Slot
}

// resolve finds the stocks of h. Nodes and devices that are not there count again when they come back.
func (b *Book) resolve(h *held) {
	total := 0
	for i := range h.Workers {
		total += len(h.Workers[i].Slots)
	}
	h.runs = make([]*stock, len(h.Workers))
	h.spots = make([]heldSpot, 0, total)
	for i := range h.Workers {
		w := &h.Workers[i]
		h.runs[i] = b.byID[w.Node]
		for j := range w.Slots {
			slot := &w.Slots[j]
			s := h.runs[i]
			if slot.Node != w.Node {
				s = b.byID[slot.Node]
			}
			if s == nil {
				continue
			}
			if pos := s.position(slot); pos >= 0 {
				h.spots = append(h.spots, heldSpot{s, pos, slot})
			}
		}
	}
}

// enter counts h in the stocks it resolved to. It returns by how much more of the devices is used for it: what is
// shared on purpose is used already.
func (h *held) enter() Share {
	for i, s := range h.runs {
		if s != nil {
			s.cpus -= h.Workers[i].CPUs
			s.memory -= h.Workers[i].Memory
		}
	}
	var more Share
	for _, spot := range h.spots {
		more += spot.claim(h, spot.slot.Share)
	}
	return more
}

// leave is the inverse of enter.
func (h *held) leave() Share {
	for i, s := range h.runs {
		if s != nil {
			s.cpus += h.Workers[i].CPUs
			s.memory += h.Workers[i].Memory
		}
	}
	var less Share
	for _, spot := range h.spots {
		less -= spot.claim(h, -spot.slot.Share)
	}
	return less
}

// claim adds to h's hold on a device, or with a negative share takes from it, and returns what that changes of its use.
func (at heldSpot) claim(h *held, share Share) Share {
	s := at.stock
	if s.claims == nil {
		s.claims = make([][]claim, len(s.used))
	}
	group := h.group()
	before := s.claimedBy(at.pos, group)
	s.claims[at.pos] = claimed(s.claims[at.pos], h, share)
	change := s.claimedBy(at.pos, group) - before
	s.use(at.pos, change)
	return change
}

// claimed is claims with h's share changed.
func claimed(claims []claim, h *held, share Share) []claim {
	at := slices.IndexFunc(claims, func(c claim) bool { return c.held == h })
	if at < 0 {
		return append(claims, claim{h, share})
	}
	if claims[at].share += share; claims[at].share == 0 {
		return slices.Delete(claims, at, at+1)
	}
	return claims
}

// claimedBy is the share of a device that a group uses: reservations that share on purpose count once, with the largest
// of their holds.
func (s *stock) claimedBy(pos int, group string) Share {
	var most Share
	for _, c := range s.claims[pos] {
		if c.held.group() == group {
			most = max(most, c.share)
		}
	}
	return most
}

// holders are the reservations with a hold on a device, the oldest first.
func (s *stock) holders(pos int) []*held {
	if s.claims == nil {
		return nil
	}
	var holders []*held
	for _, c := range s.claims[pos] {
		holders = append(holders, c.held)
	}
	slices.SortFunc(holders, (*held).older)
	return holders
}

// conflict is the first device of h that is held beyond the whole of it; nil if none is.
func (h *held) conflict() *ConflictError {
	for _, spot := range h.spots {
		if spot.stock.used[spot.pos] <= Whole {
			continue
		}
		err := &ConflictError{Reservation: h.ID, Slot: *spot.slot}
		for _, other := range spot.stock.holders(spot.pos) {
			if other != h {
				err.Holders = append(err.Holders, other.ID)
			}
		}
		return err
	}
	return nil
}

// checkSlots refuses a hold that is no part of a device.
func (r *Reservation) checkSlots() error {
	for i := range r.Workers {
		for _, slot := range r.Workers[i].Slots {
			if slot.Share <= 0 || slot.Share > Whole {
				return fmt.Errorf("reservation %q: %w", r.ID, badShare(slot.Share.String(), "a hold is more than nothing and at most one device"))
			}
		}
	}
	return nil
}

// touches reports whether h has something on a node.
func (h *held) touches(node string) bool {
	return slices.ContainsFunc(h.Workers, func(w Worker) bool {
		return w.Node == node || slices.ContainsFunc(w.Slots, func(s Slot) bool { return s.Node == node })
	})
}

// older orders reservations by age.
func (h *held) older(other *held) int {
	return cmp.Or(h.Since.Compare(other.Since), cmp.Compare(h.ID, other.ID))
}
