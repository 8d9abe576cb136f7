package planner

// headReserve is the currently free part of the resources that the head of the queue will use. It is taken out of the
// planner's state so that no other request is placed on it.
type headReserve struct {
	namespace string
	devices   Share // charged to the quota of the namespace
	parts     []reservedPart
}

// reservedPart is the part on one node: of one device, or CPUs and memory.
type reservedPart struct {
	node   *nodeState
	pos    int // -1: no device
	share  Share
	cpus   Share
	memory int64

	resources map[string]Share
}

// reserveForHead takes the free part of what the workers need out of the planner's state, and charges the namespace for
// all of it.
func (pl *Planner) reserveForHead(workers []Worker, r *Request) headReserve {
	k := headReserve{namespace: r.Namespace, devices: r.Devices()}
	pl.charge(k.namespace, k.devices)
	for i := range workers {
		w := &workers[i]
		if s := pl.byID[w.Node]; s != nil {
			k.add(reservedPart{node: s, pos: -1, cpus: atMost(w.CPUs, s.cpus), memory: atMost(w.Memory, s.memory), resources: s.atMostResources(w.Resources)})
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

// atMost limits want to what is there.
func atMost[T Share | int64](want, there T) T { return min(want, max(0, there)) }

// atMostResources limits amounts of declared resources to what is free.
func (s *nodeState) atMostResources(want map[string]Share) map[string]Share {
	if len(want) == 0 {
		return nil
	}
	limited := make(map[string]Share, len(want))
	for name, amount := range want {
		limited[name] = atMost(amount, s.freeResources()[name])
	}
	return limited
}

func (k *headReserve) add(p reservedPart) {
	p.apply(+1)
	k.parts = append(k.parts, p)
}

// apply takes the reserve out of the planner's state; with -1 it returns it temporarily.
func (k *headReserve) apply(sign Share) {
	for _, p := range k.parts {
		p.apply(sign)
	}
}

// release returns the reserve for good.
func (k *headReserve) release(pl *Planner) {
	k.apply(-1)
	k.parts = nil
	pl.charge(k.namespace, -k.devices)
	k.devices = 0
}

func (p reservedPart) apply(sign Share) {
	p.node.cpus -= sign * p.cpus
	p.node.memory -= int64(sign) * p.memory
	p.node.useResources(p.resources, sign)
	if p.pos >= 0 {
		p.node.use(p.pos, sign*p.share)
	}
}
