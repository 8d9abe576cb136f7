package sessions

import (
	"context"
	"maps"
	"math"
	"slices"
	"time"

	"troupe/placement"
	"troupe/roles/sessions/scheduler"
)

const (
	refreshEvery   = 500 * time.Millisecond // between two looks at the nodes
	refreshTimeout = 10 * time.Second
	returnGrace    = 15 * time.Second // for the nodes of an earlier service to return
	ipLabel        = "ray-node-ip"
)

var withdrawn = &scheduler.RefusedError{Text: "the request was withdrawn"}

// request asks the scheduler for resources; then is called with the decision.
func (s *service) request(key string, demand map[string]float64, strategy scheduler.Strategy, then func(grant)) {
	s.requests[key] = then
	s.decided(s.sched.Request(key, demand, strategy), "")
}

// release gives back what a key holds, or withdraws its request.
func (s *service) release(key string) {
	delete(s.requests, key)
	s.decided(s.sched.Release(key), "")
}

// decided carries out decisions. reason is why what was evicted ends.
func (s *service) decided(d scheduler.Decisions, reason string) {
	for _, a := range d.Granted {
		if then := s.requests[a.Key]; then != nil {
			delete(s.requests, a.Key)
			then(grant{allocation: a})
		} else {
			s.later(func() { s.do(func() { s.release(a.Key) }) }) // nothing waits for it any more
		}
	}
	for _, r := range d.Refused {
		if then := s.requests[r.Key]; then != nil {
			delete(s.requests, r.Key)
			then(grant{refused: r.Why})
		}
	}
	for _, id := range slices.Concat(d.Created, d.Removed) {
		s.groupChanged(id)
	}
	for _, key := range d.Evicted {
		s.evict(key, reason)
	}
}

// evict ends the actor or the lease whose resources are gone.
func (s *service) evict(key, reason string) {
	if a := s.actors[key]; a != nil {
		if reason == reasonNodeDied {
			s.processLost(a, a.role, reason)
		} else {
			s.endActor(a, reason, false)
		}
	} else if w := s.leases[key]; w != nil {
		s.endWorker(w)
	} else {
		for _, w := range s.workers {
			if w.lease == key { // it starts
				s.endWorker(w)
			}
		}
	}
}

// refreshLoop looks at the nodes now and then.
func (s *service) refreshLoop() {
	tick := time.NewTicker(refreshEvery)
	defer tick.Stop()
	for {
		if err := s.refresh(); err != nil && s.ctx.Err() == nil {
			s.log.Debug("sessions: the nodes are not known", "error", err) // the next look may find them
		}
		select {
		case <-s.ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// refresh takes over the nodes that the head knows.
func (s *service) refresh() error {
	ctx, cancel := context.WithTimeout(s.ctx, refreshTimeout)
	defer cancel()
	rows, err := s.placement.Nodes(ctx)
	if err != nil {
		return err
	}
	s.do(func() { s.takeNodes(rows) })
	return nil
}

func (s *service) takeNodes(rows []placement.NodeStatus) {
	rows = slices.DeleteFunc(rows, func(n placement.NodeStatus) bool { return n.Rank < 0 || n.State == placement.NodeLost })
	slices.SortFunc(rows, func(a, b placement.NodeStatus) int { return a.Rank - b.Rank })
	known := s.sched.Nodes()
	if len(rows) == 0 {
		return // a head that has just returned knows none yet
	}
	first := rows[0].Report.Node
	if len(known) > 0 {
		first = known[0].Name
	}
	var found []scheduler.NodeInfo
	there := map[string]bool{}
	for _, n := range rows {
		info := s.nodeInfo(n, n.Report.Node == first)
		there[info.Name] = true
		found = append(found, info)
	}
	if s.restored && time.Since(s.began) < returnGrace { // agents of an earlier head return one after the other
		for _, info := range s.meta.Nodes {
			if !there[info.Name] {
				found = append(found, info)
			}
		}
	}
	if !sameNodes(s.meta.Nodes, found) {
		s.meta.Nodes = found
		s.store.dirty(metaKey)
	}
	s.decided(s.sched.SetNodes(found), reasonNodeDied)
	for _, j := range s.jobs {
		s.tellEnded(j) // a node may have died
	}
}

func sameNodes(a, b []scheduler.NodeInfo) bool {
	return slices.EqualFunc(a, b, func(x, y scheduler.NodeInfo) bool {
		return x.Name == y.Name && x.Address == y.Address && maps.Equal(x.Total, y.Total)
	})
}

// nodeInfo is a node with its totals: what was found, then what the node declares, then for the head's node what the first driver
// pretends.
func (s *service) nodeInfo(n placement.NodeStatus, head bool) scheduler.NodeInfo {
	address := n.Report.Labels[ipLabel]
	if address == "" {
		address = s.meta.Address
	}
	if address == "" {
		address = "127.0.0.1"
	}
	total := map[string]float64{"CPU": float64(n.Report.CPUs), "GPU": float64(len(n.Report.Devices)), "memory": float64(n.Report.Memory)}
	for name, amount := range n.Report.Resources {
		total[name] = float64(amount) / 1000
	}
	if head {
		for name, amount := range s.meta.Declared {
			total[name] = amount
		}
	}
	if _, declared := total["object_store_memory"]; !declared {
		total["object_store_memory"] = math.Trunc(total["memory"] * 0.3)
	}
	total["node:"+address] = 1
	if head {
		total["node:__internal_head__"] = 1
	}
	for name, amount := range total {
		if amount == 0 {
			delete(total, name)
		}
	}
	return scheduler.NodeInfo{Name: n.Report.Node, Address: address, Total: total}
}

func (s *service) refreshAsked(c *call) error {
	s.background(func() {
		err := s.refresh()
		s.do(func() {
			if err != nil {
				c.fail(err)
			} else {
				c.reply(nil)
			}
		})
	})
	return nil
}
