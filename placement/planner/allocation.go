package planner

import (
	"cmp"
	"fmt"
	"slices"
)

// allocation is a reservation in the planner's state, resolved to nodes and device positions.
type allocation struct {
	Reservation
	tentative   bool              // part of the request that is being planned; never counts as a blocker of it
	workerNodes []*nodeState      // by worker; nil if the node is absent
	devices     []allocatedDevice // of all workers; devices that are absent are left out
}

type allocatedDevice struct {
	node *nodeState
	pos  int
	slot *Slot
}

// resolve sets the nodes and devices of alloc. Absent nodes and devices are resolved again when the node is set.
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

// allocate subtracts alloc from the free resources of its nodes. It returns by how much the use of devices grows;
// devices shared with colocated reservations are in use already.
func (alloc *allocation) allocate() Share {
	alloc.useNodes(+1)
	var more Share
	for _, dev := range alloc.devices {
		more += dev.claim(alloc, dev.slot.Share)
	}
	return more
}

// free is the inverse of allocate.
func (alloc *allocation) free() Share {
	alloc.useNodes(-1)
	var less Share
	for _, dev := range alloc.devices {
		less -= dev.claim(alloc, -dev.slot.Share)
	}
	return less
}

// useNodes takes the CPUs, memory and declared resources of alloc from its nodes; with -1 it returns them. What a parent
// provides is taken already.
func (alloc *allocation) useNodes(sign Share) {
	if alloc.Parent != "" {
		return
	}
	for i, s := range alloc.workerNodes {
		if s != nil {
			w := &alloc.Workers[i]
			s.cpus -= sign * w.CPUs
			s.memory -= int64(sign) * w.Memory
			s.useResources(w.Resources, sign)
		}
	}
}

// claim changes the allocation's share of a device by the given amount, which may be negative, and returns the change
// of the device's use.
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

// changeClaim returns claims with the share of alloc changed.
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

// groupUse returns the share of a device that a group uses: colocated reservations count once, with the largest of
// their shares.
func (s *nodeState) groupUse(pos int, group string) Share {
	var most Share
	for _, c := range s.claims[pos] {
		if c.allocation.groupName() == group {
			most = max(most, c.share)
		}
	}
	return most
}

// holders returns the allocations with a share of a device, the oldest first.
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

// conflict returns the first device of alloc that is allocated beyond its whole; nil if there is none.
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

// checkSlots refuses shares that are not part of one device.
func (r *Reservation) checkSlots() error {
	for i := range r.Workers {
		for _, slot := range r.Workers[i].Slots {
			if slot.Share <= 0 || slot.Share > Whole {
				return fmt.Errorf("reservation %q: %w", r.ID, badShare(slot.Share.String(), "a share of a device must be above 0 and at most 1"))
			}
		}
	}
	return nil
}

// usesNode reports whether alloc has a worker or a device on a node.
func (alloc *allocation) usesNode(node string) bool {
	return slices.ContainsFunc(alloc.Workers, func(w Worker) bool {
		return w.Node == node || slices.ContainsFunc(w.Slots, func(s Slot) bool { return s.Node == node })
	})
}

// compareAge orders allocations by age, then by id.
func (alloc *allocation) compareAge(other *allocation) int {
	return cmp.Or(alloc.Since.Compare(other.Since), cmp.Compare(alloc.ID, other.ID))
}
