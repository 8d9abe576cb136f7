package planner

import (
	"cmp"
	"fmt"
	"slices"
)

// held is a reservation as the book counts it: with the stocks and positions that its nodes and devices resolve to.
type allocation struct {
	Reservation
	tentative   bool              // it is part of the very plan that is being made, and never in its own way
	workerNodes []*nodeState      // by worker; nil where the node is not there
	devices     []allocatedDevice // the slots of all workers; those whose device is not there are left out
}

type allocatedDevice struct {
	node *nodeState
	pos  int
	slot *Slot
}

// resolve finds the stocks of h. Nodes and devices that are not there count again when they come back.
func (pl *Planner) resolve(alloc *allocation) {
	total := 0
	for i := range alloc.Workers {
		total += len(alloc.Workers[i].Slots)
	}
	alloc.workerNodes = make([]*nodeState, len(alloc.Workers))
	alloc.devices = make([]allocatedDevice, 0, total)
	for i := range alloc.Workers {
		w := &alloc.Workers[i]
		alloc.workerNodes[i] = pl.byID[w.Node]
		for j := range w.Slots {
			slot := &w.Slots[j]
			s := alloc.workerNodes[i]
			if slot.Node != w.Node {
				s = pl.byID[slot.Node]
			}
			if s == nil {
				continue
			}
			if pos := s.position(slot); pos >= 0 {
				alloc.devices = append(alloc.devices, allocatedDevice{s, pos, slot})
			}
		}
	}
}

// enter counts h in the stocks it resolved to. It returns by how much more of the devices is used for it: what is
// shared on purpose is used already.
func (alloc *allocation) allocate() Share {
	for i, s := range alloc.workerNodes {
		if s != nil {
			s.cpus -= alloc.Workers[i].CPUs
			s.memory -= alloc.Workers[i].Memory
		}
	}
	var more Share
	for _, dev := range alloc.devices {
		more += dev.claim(alloc, dev.slot.Share)
	}
	return more
}

// leave is the inverse of enter.
func (alloc *allocation) free() Share {
	for i, s := range alloc.workerNodes {
		if s != nil {
			s.cpus += alloc.Workers[i].CPUs
			s.memory += alloc.Workers[i].Memory
		}
	}
	var less Share
	for _, dev := range alloc.devices {
		less -= dev.claim(alloc, -dev.slot.Share)
	}
	return less
}

// claim adds to h's hold on a device, or with a negative share takes from it, and returns what that changes of its use.
func (at allocatedDevice) claim(alloc *allocation, share Share) Share {
	s := at.node
	if s.claims == nil {
		s.claims = make([][]claim, len(s.used))
	}
	group := alloc.groupName()
	before := s.groupUse(at.pos, group)
	s.claims[at.pos] = changeClaim(s.claims[at.pos], alloc, share)
	change := s.groupUse(at.pos, group) - before
	s.use(at.pos, change)
	return change
}

// claimed is claims with h's share changed.
func changeClaim(claims []claim, alloc *allocation, share Share) []claim {
	at := slices.IndexFunc(claims, func(c claim) bool { return c.allocation == alloc })
	if at < 0 {
		return append(claims, claim{alloc, share})
	}
	if claims[at].share += share; claims[at].share == 0 {
		return slices.Delete(claims, at, at+1)
	}
	return claims
}

// claimedBy is the share of a device that a group uses: reservations that share on purpose count once, with the largest
// of their holds.
func (s *nodeState) groupUse(pos int, group string) Share {
	var most Share
	for _, c := range s.claims[pos] {
		if c.allocation.groupName() == group {
			most = max(most, c.share)
		}
	}
	return most
}

// holders are the reservations with a hold on a device, the oldest first.
func (s *nodeState) holders(pos int) []*allocation {
	if s.claims == nil {
		return nil
	}
	var holders []*allocation
	for _, c := range s.claims[pos] {
		holders = append(holders, c.allocation)
	}
	slices.SortFunc(holders, (*allocation).compareAge)
	return holders
}

// conflict is the first device of h that is held beyond the whole of it; nil if none is.
func (alloc *allocation) conflict() *ConflictError {
	for _, dev := range alloc.devices {
		if dev.node.used[dev.pos] <= Whole {
			continue
		}
		err := &ConflictError{Reservation: alloc.ID, Slot: *dev.slot}
		for _, other := range dev.node.holders(dev.pos) {
			if other != alloc {
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
func (alloc *allocation) usesNode(node string) bool {
	return slices.ContainsFunc(alloc.Workers, func(w Worker) bool {
		return w.Node == node || slices.ContainsFunc(w.Slots, func(s Slot) bool { return s.Node == node })
	})
}

// older orders reservations by age.
func (alloc *allocation) compareAge(other *allocation) int {
	return cmp.Or(alloc.Since.Compare(other.Since), cmp.Compare(alloc.ID, other.ID))
}
