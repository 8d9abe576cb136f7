package planner

// Try grants a request at once if it fits, and reports whether it did. An error is that of the request itself.
func (pl *Planner) Try(r *Request) (Reservation, bool, error) {
	g, err := pl.prepare(r)
	if err != nil {
		return Reservation{}, false, err
	}
	placement, ok := pl.place(g)
	if !ok {
		return Reservation{}, false, nil
	}
	granted := grantedPlan(placement, g).Reservation(*r, pl.Now)
	return granted, true, pl.Grant(granted)
}

// SetCPUs changes the CPUs of a reservation of one worker: those of a lease that waits for something else are free, and
// are taken back later even if others have them by then. An unknown id changes nothing.
func (pl *Planner) SetCPUs(id string, cpus Share) {
	alloc := pl.byReservation[id]
	if alloc == nil || len(alloc.Workers) != 1 {
		return
	}
	alloc.useNodes(-1)
	worker := alloc.Workers[0]
	worker.CPUs = cpus
	alloc.Workers = []Worker{worker} // a snapshot may have the old one
	alloc.useNodes(+1)
}

// NodeRoom is what a node has, and what is free of it.
type NodeRoom struct {
	Node          *Node
	CPUs          Share // free; below zero while leases have taken back their CPUs
	Memory        int64
	Devices       Share
	FreeResources map[string]Share
}

// Room returns what is free on each node, by rank. The caller does not change it.
func (pl *Planner) Room() []NodeRoom {
	out := make([]NodeRoom, len(pl.nodes))
	for i, s := range pl.nodes {
		out[i] = NodeRoom{Node: s.info, CPUs: s.cpus, Memory: s.memory, Devices: s.freeShare(), FreeResources: s.freeResources()}
	}
	return out
}

// CouldFit reports whether a bundle would fit on the node if all of it were free.
func (n *Node) CouldFit(b *Bundle) bool { return (&nodeState{info: n}).couldFit(b) }
