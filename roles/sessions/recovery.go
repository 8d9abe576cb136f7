package sessions

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/placement"
	"troupe/roles/registry"
	"troupe/roles/sessions/book"
)

const (
	claimGrace = 30 * time.Second // for the processes that an earlier service knew to say which handles and leases they have
	leaseGrace = 10 * time.Second // the same for leases, without which nothing is granted
)

// recover takes over what an earlier service has stored: jobs, groups, actors and their names. Processes that run are adopted.
func (s *service) recover(ctx context.Context) error {
	found, err := s.store.load(ctx)
	if err != nil {
		return err
	}
	running, err := s.rt.Roles(ctx)
	if err != nil {
		return err
	}
	running = slices.DeleteFunc(running, func(r registry.RoleRecord) bool { return r.Class != processClass || !r.Process })
	if len(found) == 0 && len(running) == 0 {
		s.do(s.book.Continue)
		return nil
	}
	s.do(func() {
		s.restored = true
		s.running = map[string]registry.RoleRecord{}
		for _, rec := range running {
			s.running[rec.Name] = rec
		}
		s.restore(found)
		s.adoptProcesses()
		s.background(s.endGrace)
	})
	return nil
}

// restore reads the records.
func (s *service) restore(found map[string][]byte) {
	decode := func(key string, into any) bool {
		if err := wire.Unmarshal(found[key], into); err != nil {
			s.log.Error("sessions: a stored record is malformed", "key", key, "error", err)
			return false
		}
		return true
	}
	if _, there := found[metaKey]; there {
		decode(metaKey, &s.meta)
		s.book.RestoreNodes(s.meta.Nodes)
	}
	var actors []actorRecord
	var ids []string
	for _, key := range slices.Sorted(maps.Keys(found)) {
		kind, id, _ := strings.Cut(key, ".")
		switch kind {
		case "job":
			var rec jobRecord
			if decode(key, &rec) {
				s.restoreJob(id, rec)
			}
		case "group":
			var rec groupRecord
			if decode(key, &rec) {
				times := rec.Times
				s.groups[id] = &times
				s.book.RestoreGroup(rec.Info, book.GroupState(rec.State), rec.Parts)
			}
		case "actor":
			var rec actorRecord
			if decode(key, &rec) {
				actors, ids = append(actors, rec), append(ids, id)
			}
		}
	}
	order := make([]int, len(actors))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return actors[a].Order - actors[b].Order })
	for _, i := range order {
		s.restoreActor(ids[i], actors[i])
	}
}

func (s *service) restoreJob(id string, rec jobRecord) {
	j := &job{id: id, spec: rec.Spec, ended: rec.Ended, ending: map[string]int{}}
	s.jobs[id] = j
	if !j.ended {
		s.processes[j.spec.Process] = id
		s.watchDriver(j)
	}
}

// restoreActor takes over an actor. One that was not constructed is started again.
func (s *service) restoreActor(id string, rec actorRecord) {
	a := s.newActor(id, rec.Spec)
	a.role, a.restarted, a.pid, a.state = rec.Role, rec.Restarted, rec.PID, rec.State
	a.at = book.Allocation{Key: id, Node: rec.Node, NodeID: rec.NodeID, Group: rec.Group, Bundle: rec.Bundle, Devices: rec.Devices}
	if name := a.spec.name(); name != "" {
		s.names[actorName{a.spec.Namespace, name}] = id
	}
	alive := a.state == stateAlive
	role, _ := roleOf(a.role)
	if record, runs := s.running[role]; !alive && (!runs || record.State != registry.RoleReady || rec.NodeID == "") {
		s.startAgain(a)
		return
	}
	s.processes[a.role] = a.spec.Job
	a.at.Record = s.reservationOf(a.role)
	if !s.book.Restore(s.requestOf(a), a.at) {
		s.later(func() { s.do(func() { s.processLost(a, a.role, reasonNodeDied) }) })
		return
	}
	if a.placed = true; !alive {
		a.state = stateStarting
	}
	process := a.role
	s.background(func() { s.adopt(a, process, alive) })
}

// reservationOf is the reservation of a process of an earlier service: its id and token.
func (s *service) reservationOf(process string) (rec placement.Record) {
	role, rank := roleOf(process)
	if held := s.running[role]; max(rank, 0) < len(held.Placements) {
		if i := held.Placements[max(rank, 0)].Reservation; i < len(held.Reservations) {
			rec.ID, rec.Token = held.Reservations[i].ID, held.Reservations[i].Token
		}
	}
	return rec
}

// openFunc attaches to a role of several actors, once.
type openFunc func() (*sharedRole, error)

// openProcess attaches to a process of an earlier service.
func (s *service) openProcess(name string) (*process, error) {
	role, rank := roleOf(name)
	if rank < 0 {
		cl, err := s.attach(s.ctx, role)
		return &process{cluster: cl}, err
	}
	var open openFunc
	s.do(func() {
		if open = s.adopted[role]; open == nil {
			open = sync.OnceValues(func() (*sharedRole, error) {
				cl, err := s.attach(s.ctx, role)
				if err != nil {
					return nil, err
				}
				return s.share(cl), nil
			})
			s.adopted[role] = open
		}
	})
	shared, err := open()
	if err == nil && rank >= len(shared.deadCh) {
		err = bus.Errorf(bus.CodeNotFound, "the role %s has no rank %d", role, rank)
	}
	if err != nil {
		return nil, err
	}
	return shared.process(rank), nil
}

// adopt attaches to the process of an actor. One that was not known to be constructed is asked.
func (s *service) adopt(a *actor, role string, alive bool) {
	p, err := s.openProcess(role)
	if s.ctx.Err() != nil {
		return
	}
	late := false
	s.do(func() {
		switch late = a.state == stateDead || a.role != role; {
		case late:
		case err != nil:
			s.processLost(a, role, "The actor is dead because its worker process died with the head: "+err.Error())
		default:
			a.process = p
		}
	})
	if late && err == nil {
		s.destroy(p, false)
	}
	if late || err != nil {
		s.do(func() {
			if a.state == stateDead { // otherwise a later process has the resources
				s.release(a.id)
			}
		})
		return
	}
	if !alive {
		s.spawn(func() { s.adoptStarting(a, role, p) })
	}
	s.watchActor(a, role, p)
}

// adoptStarting waits until the process of an actor has constructed it. One that has not is replaced.
func (s *service) adoptStarting(a *actor, role string, p *process) {
	for {
		making, pid, err := s.askConstructed(p)
		switch {
		case s.ctx.Err() != nil || err != nil: // its death is seen by the watch
			return
		case making == "yes":
			s.do(func() { s.constructed(a, role, "ok", pid) })
			return
		case making == "no":
			s.do(func() {
				if a.role == role && a.state == stateStarting {
					a.process = nil
					s.endProcess(role)
					s.release(a.id)
					s.startAgain(a)
				}
			})
			s.destroy(p, false)
			return
		}
		_ = bus.Sleep(s.ctx, pollEvery) // the end is seen above
	}
}

func (s *service) askConstructed(p *process) (making string, pid wire.Raw, err error) {
	answer, err := askProcess[[]wire.Raw](s.ctx, p, dispatch.Call{Method: "constructed"})
	switch {
	case err != nil:
		return "", nil, err
	case len(answer) != 2:
		return "", nil, bus.Errorf(bus.CodeMalformed, "the process does not say whether its actor is constructed")
	}
	err = wire.Unmarshal(answer[0], &making)
	return making, answer[1], err
}

// startAgain starts an actor whose start was interrupted, under another role.
func (s *service) startAgain(a *actor) {
	if a.spec.Construct.IsNil() {
		s.later(func() { s.do(func() { s.endActor(a, reasonHeadDied, false) }) })
		return
	}
	a.state, a.role = statePending, "actor-"+a.id+"-"+bus.NewID()
	s.store.dirty(actorKey(a.id))
	s.later(func() {
		s.do(func() {
			strategy, _ := strategyOf(a.spec.Strategy) // it was valid before
			s.schedule(a, strategy)
		})
	})
}

// adoptProcesses sorts the processes that run: those of actors are attached to, those of tasks wait to be claimed, others end.
func (s *service) adoptProcesses() {
	known := map[string]bool{}
	for _, a := range s.order {
		role, _ := roleOf(a.role)
		known[role], known[a.role] = true, true
	}
	for _, rec := range s.running {
		switch {
		case known[rec.Name] && rec.World > 1:
			for rank := range rec.World {
				if name := processName(rec.Name, rank); !known[name] {
					s.background(func() { s.endUnknownRank(name) })
				}
			}
		case known[rec.Name]:
		case strings.HasPrefix(rec.Name, "worker-"):
			s.unclaimed[rec.Name] = true
		default:
			s.endUnknown(rec)
		}
	}
	if len(s.unclaimed) == 0 {
		s.later(func() { s.do(s.book.Continue) })
	} else {
		s.book.Pause()
		s.background(func() {
			_ = bus.Sleep(s.ctx, leaseGrace) // at the end of the service nothing is granted
			s.do(s.book.Continue)
		})
	}
}

// claimed ends the pause of the scheduler when every lease is known.
func (s *service) claimed() {
	if len(s.unclaimed) == 0 {
		s.book.Continue()
	}
}

// endUnknown ends a process that nothing needs.
func (s *service) endUnknown(rec registry.RoleRecord) {
	s.background(func() {
		ctx, cancel := context.WithTimeout(s.ctx, destroyLimit)
		defer cancel()
		if err := s.rt.EndRole(ctx, rec); err != nil && s.ctx.Err() == nil {
			s.log.Warn("sessions: a process may still run", "role", rec.Name, "error", err)
		}
	})
}

// endUnknownRank ends a process that nothing needs, of a role with others.
func (s *service) endUnknownRank(name string) {
	if p, err := s.openProcess(name); err == nil { // otherwise the role has ended
		s.destroy(p, false)
	}
}

// claim takes over a lease of an earlier service. Its process runs no other tasks.
func (s *service) claim(l claimedLease, lessee string) {
	if s.leases[l.ID] != nil || !s.unclaimed[l.Role] || s.jobs[l.Job] == nil {
		return
	}
	delete(s.unclaimed, l.Role)
	w := &worker{id: strings.TrimPrefix(l.Role, "worker-"), key: l.Job + "|claimed", role: l.Role, job: l.Job, node: l.NodeID, lease: l.ID, lessee: lessee, spent: true}
	w.granted = map[string]any{"role": l.Role, "devices": l.Devices, "node_id": l.NodeID, "group": l.Group, "bundle": l.Bundle}
	s.workers[w.id], s.leases[l.ID] = w, w
	s.processes[w.role] = l.Job
	s.book.RestoreLease(book.Request{Key: l.ID, Demand: l.Demand, Holder: s.holder(l.Job, "tasks", "")},
		book.Allocation{Node: s.book.NodeName(l.NodeID), NodeID: l.NodeID, Group: l.Group, Bundle: l.Bundle, Devices: l.Devices})
	s.claimed()
	s.background(func() {
		p, err := s.openProcess(l.Role)
		if err == nil {
			s.do(func() {
				if w.process = p; w.dead {
					s.background(func() { s.destroy(p, false) })
				}
			})
			s.died(p)
		}
		if s.ctx.Err() == nil {
			s.do(func() { s.endWorker(w) })
		}
	})
}

// isRecovering reports whether processes may not have said yet which handles they have.
func (s *service) isRecovering() bool { return s.restored && time.Since(s.began) < claimGrace }

// endGrace ends what no process has claimed.
func (s *service) endGrace() {
	select {
	case <-s.ctx.Done():
		return
	case <-time.After(claimGrace + time.Second):
	}
	s.do(func() {
		for _, a := range s.actorsInOrder() {
			if len(a.holders) == 0 && !a.spec.Detached {
				s.outOfScope(a)
			}
		}
		for role := range s.unclaimed {
			s.endUnknown(s.running[role])
		}
		clear(s.unclaimed)
		s.claimed()
		used := map[string]bool{}
		for _, rec := range s.running {
			for _, held := range rec.Reservations {
				used[held.ID] = true
			}
		}
		s.book.ReleaseUnknown(used)
		s.forgetGangs("")
	})
}
