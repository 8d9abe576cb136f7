package planner

// earmark is what of a future plan is free today, taken out of the book so that nobody else plans with it.
type headReserve struct {
	namespace string
	devices   Share // as the plan counts towards its namespace's quota
	parts     []reservedPart
}

// keptPart is what is kept on one node, of one device or of its CPUs and memory.
type reservedPart struct {
	node   *nodeState
	pos    int // -1: no device
	share  Share
	cpus   Share
	memory int64
}

// keep takes out of the book what is free of what the workers will need, and charges the namespace for all of it.
func (pl *Planner) reserveForHead(workers []Worker, r *Request) headReserve {
	k := headReserve{namespace: r.Namespace, devices: r.Devices()}
	pl.charge(k.namespace, k.devices)
	for i := range workers {
		w := &workers[i]
		if s := pl.byID[w.Node]; s != nil {
			k.add(reservedPart{node: s, pos: -1, cpus: atMost(w.CPUs, s.cpus), memory: atMost(w.Memory, s.memory)})
		}
		for j := range w.Slots {
			slot := &w.Slots[j]
			s := pl.byID[slot.Node]
			if s == nil || r.Colocate != "" {
				continue
			}
			if pos := s.position(slot); pos >= 0 {
				k.add(reservedPart{node: s, pos: pos, share: atMost(slot.Share, Whole-s.used[pos])})
			}
		}
	}
	return k
}

// within is as much of want as there is.
func atMost[T Share | int64](want, there T) T { return min(want, max(0, there)) }

func (k *headReserve) add(p reservedPart) {
	p.apply(+1)
	k.parts = append(k.parts, p)
}

// take takes what is kept out of the book, or with -1 gives it back for a while.
func (k *headReserve) apply(sign Share) {
	for _, p := range k.parts {
		p.apply(sign)
	}
}

// drop gives back what was kept, for good.
func (k *headReserve) release(pl *Planner) {
	k.apply(-1)
	k.parts = nil
	pl.charge(k.namespace, -k.devices)
	k.devices = 0
}

func (p reservedPart) apply(sign Share) {
	p.node.cpus -= sign * p.cpus
	p.node.memory -= int64(sign) * p.memory
	if p.pos >= 0 {
		p.node.use(p.pos, sign*p.share)
	}
}
