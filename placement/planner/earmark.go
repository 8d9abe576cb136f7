package planner

// earmark is what of a future plan is free today, taken out of the book so that nobody else plans with it.
type earmark struct {
	namespace string
	devices   Share // as the plan counts towards its namespace's quota
	parts     []keptPart
}

// keptPart is what is kept on one node, of one device or of its CPUs and memory.
type keptPart struct {
	stock  *stock
	pos    int // -1: no device
	share  Share
	cpus   Share
	memory int64
}

// keep takes out of the book what is free of what the workers will need, and charges the namespace for all of it.
func (b *Book) keep(workers []Worker, r *Request) earmark {
	k := earmark{namespace: r.Namespace, devices: r.Devices()}
	b.charge(k.namespace, k.devices)
	for i := range workers {
		w := &workers[i]
		if s := b.byID[w.Node]; s != nil {
			k.add(keptPart{stock: s, pos: -1, cpus: within(w.CPUs, s.cpus), memory: within(w.Memory, s.memory)})
		}
		for j := range w.Slots {
			slot := &w.Slots[j]
			s := b.byID[slot.Node]
			if s == nil || r.Colocate != "" {
				continue
			}
			if pos := s.position(slot); pos >= 0 {
				k.add(keptPart{stock: s, pos: pos, share: within(slot.Share, Whole-s.used[pos])})
			}
		}
	}
	return k
}

// within is as much of want as there is.
func within[T Share | int64](want, there T) T { return min(want, max(0, there)) }

func (k *earmark) add(p keptPart) {
	p.take(+1)
	k.parts = append(k.parts, p)
}

// take takes what is kept out of the book, or with -1 gives it back for a while.
func (k *earmark) take(sign Share) {
	for _, p := range k.parts {
		p.take(sign)
	}
}

// drop gives back what was kept, for good.
func (k *earmark) drop(b *Book) {
	k.take(-1)
	k.parts = nil
	b.charge(k.namespace, -k.devices)
	k.devices = 0
}

func (p keptPart) take(sign Share) {
	p.stock.cpus -= sign * p.cpus
	p.stock.memory -= int64(sign) * p.memory
	if p.pos >= 0 {
		p.stock.use(p.pos, sign*p.share)
	}
}
