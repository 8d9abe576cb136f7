package sessions

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"runtime"
	"slices"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/roles"
	"troupe/roles/sessions/book"
)

const (
	idleShort = time.Second      // that a process for tasks without work is kept beyond the number of CPUs
	idleLong  = 60 * time.Second // and up to that number
	reapEvery = time.Second
	ownsLimit = 10 * time.Second
)

// worker is a process that runs tasks. The lock of the service guards it.
type worker struct {
	id, key, role string
	job           string
	node          string   // id
	process       *process // nil: it starts
	idleSince     time.Time
	lease         string         // empty: it has no work
	lessee        string         // the process that has the lease
	granted       map[string]any // the answer to the request of the lease
	devices       bool           // its lease is a reservation with devices: it runs the tasks of one
	spent         bool           // it runs no more tasks
	retiring      bool
	dead          bool
}

// leaseRequest is a request for a lease that is not answered.
type leaseRequest struct{ c *call }

func (w *worker) isIdle() bool {
	return w.lease == "" && !w.dead && !w.spent && !w.retiring && w.process != nil
}

// leaseAsked leases a process for tasks with these resources: it answers when they are free and the process is up.
func (s *service) leaseAsked(c *call) error {
	var id, jobID string
	var demand map[string]float64
	var strategyRaw, env wire.Raw
	if err := c.args.read(&id, &jobID, &demand, &strategyRaw, &env); err != nil {
		return err
	}
	if err := bus.CheckName("lease", id); err != nil {
		return err
	}
	if s.leaseRepeated(id, c) {
		return nil
	}
	strategy, err := strategyOf(strategyRaw)
	if err == nil {
		err = checkAmounts(demand)
	}
	switch {
	case err != nil:
		return err
	case !s.isKnown(c.caller):
		return errEnded(c.caller)
	}
	env = slices.Clone(env)
	q := &leaseRequest{c}
	s.asking[id] = q
	s.request(book.Request{Key: id, Demand: demand, Strategy: strategy, Holder: s.holder(jobID, "tasks", "")}, func(g grant) {
		switch {
		case g.refused != nil && g.refused == withdrawn:
			s.answerLease(id, q, map[string]any{"cancelled": true})
		case g.refused != nil:
			s.answerLease(id, q, map[string]any{"error": g.refused.Text, "unschedulable": causeOf(g.refused)})
		default:
			s.lease(q, id, jobID, env, demand, g.allocation)
		}
	})
	return nil
}

// leaseRepeated handles a request that its caller repeats, because it had lost this service: it gets the same answer, once.
func (s *service) leaseRepeated(id string, c *call) bool {
	if w := s.leases[id]; w != nil {
		c.reply(w.granted)
		return true
	}
	q := s.asking[id]
	if q == nil {
		return false
	}
	q.c.abandon()
	q.c = c
	return true
}

func (s *service) answerLease(id string, q *leaseRequest, answer map[string]any) {
	delete(s.asking, id)
	q.c.reply(answer)
}

// endLeasesOf ends the leases of a process that has ended, with the processes that ran its tasks, and withdraws its requests.
func (s *service) endLeasesOf(process string) {
	for id, q := range s.asking {
		if q.c.caller == process {
			delete(s.asking, id)
			s.release(id)
		}
	}
	for _, w := range s.workers {
		if w.lessee == process && w.lease != "" {
			s.endWorker(w)
		}
	}
}

// lease gives a lease a process without work, or a new one.
func (s *service) lease(q *leaseRequest, id, jobID string, env wire.Raw, demand map[string]float64, at book.Allocation) {
	key := jobID + poolKey(env, demand, at)
	answer := func(w *worker) {
		w.lease, w.lessee = id, q.c.caller
		w.granted = map[string]any{"role": w.role, "devices": at.Devices, "node_id": at.NodeID, "group": at.Group, "bundle": at.Bundle}
		s.leases[id] = w
		s.answerLease(id, q, w.granted)
	}
	var found *worker
	for _, w := range s.workers {
		if w.key == key && w.isIdle() && (found == nil || w.idleSince.After(found.idleSince)) { // the one that worked last
			found = w
		}
	}
	if found != nil {
		answer(found)
		return
	}
	w := &worker{id: newWorkerID(), key: key, job: jobID, node: at.NodeID, lease: id, lessee: q.c.caller, devices: at.Record.Token != 0}
	w.role = "worker-" + w.id
	s.workers[w.id] = w
	s.background(func() {
		assigned := map[string]any{"kind": "task", "groups": map[string]any{}, "worker_id": w.id, "placement": nil}
		plan, err := s.plan(jobID, env, at, map[string][]string{}, assigned)
		if err == nil {
			plan.standby = book.StandbyOf(demand)
		}
		var cl *roles.Cluster
		if err == nil {
			cl, err = s.createRole(w.role, plan)
		}
		s.do(func() {
			switch {
			case err != nil:
				delete(s.workers, w.id)
				s.release(id)
				s.answerLease(id, q, map[string]any{"error": err.Error()})
			case w.dead: // its job, node or group has ended
				s.release(id)
				s.background(func() { s.destroy(&process{cluster: cl}, false) })
				s.answerLease(id, q, map[string]any{"error": "the process was ended"})
			default:
				w.process = &process{cluster: cl}
				s.processes[w.role] = jobID
				s.watchWorker(w)
				answer(w)
			}
		})
	})
}

func newWorkerID() string {
	b := make([]byte, 14)
	_, _ = rand.Read(b) // never fails
	return hex.EncodeToString(b)
}

// poolKey is the same for tasks that may run in one process, one after the other: they need the same, so that it is known what the lease
// of a process may hold.
func poolKey(env wire.Raw, demand map[string]float64, at book.Allocation) string {
	var value any
	_ = (arguments{env}).read(&value)
	canonical, err := wire.Marshal(value)
	if err != nil {
		canonical = env
	}
	return fmt.Sprintf("|%s|%v|%s", at.NodeID, demand, canonical) // keys of a map are printed in their order
}

func (s *service) watchWorker(w *worker) {
	p := w.process
	s.background(func() {
		s.died(p)
		if s.ctx.Err() == nil {
			s.do(func() { s.endWorker(w) })
		}
	})
}

// endWorker ends a process for tasks, or notes that it has ended.
func (s *service) endWorker(w *worker) {
	if w.dead {
		return
	}
	w.dead = true
	delete(s.workers, w.id)
	release := func() {}
	if s.leases[w.lease] == w {
		delete(s.leases, w.lease)
		release = func() { s.release(w.lease) }
	}
	if p := w.process; p == nil || !w.devices {
		release()
		release = func() {}
	}
	s.endProcess(w.role)
	if p := w.process; p != nil {
		done := s.processEnding(w.job, w.node)
		s.background(func() {
			s.destroy(p, false)
			s.do(func() {
				release() // devices are free when their process has ended
				done()
			})
		})
	}
}

// cancelLease withdraws a request that still waits.
func (s *service) cancelLease(c *call) error {
	var id string
	if err := c.args.read(&id); err != nil {
		return err
	}
	if then := s.requests[id]; then != nil && s.book.Withdraw(id) {
		delete(s.requests, id)
		then(grant{refused: withdrawn})
	}
	c.reply(nil)
	return nil
}

// endLease ends a lease: the caller has no more work for the process. spent: its process ends.
func (s *service) endLease(c *call) error {
	var id string
	spent := false
	if err := c.args.read(&id, &spent); err != nil {
		return err
	}
	if w := s.leases[id]; w != nil {
		delete(s.leases, id)
		w.lease, w.lessee, w.granted, w.idleSince, w.spent = "", "", nil, time.Now(), w.spent || spent || w.devices
		s.release(id)
		if w.spent && w.process != nil { // otherwise the reaper does when it runs
			s.retire(w)
		}
	}
	c.reply(nil)
	return nil
}

func (s *service) suspendLease(c *call) error {
	return s.onLease(c, s.book.Suspend)
}

func (s *service) resumeLease(c *call) error { return s.onLease(c, s.book.Resume) }

func (s *service) onLease(c *call, do func(id string)) error {
	var id string
	if err := c.args.read(&id); err != nil {
		return err
	}
	if s.leases[id] != nil {
		do(id)
	}
	c.reply(nil)
	return nil
}

// reapLoop ends processes for tasks that have had no work for long.
func (s *service) reapLoop() {
	tick := time.NewTicker(reapEvery)
	defer tick.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case now := <-tick.C:
			s.do(func() {
				s.reap(now)
				s.forgetCallers(now)
				s.breakUpLate(now)
				s.endIfIdle(now)
			})
		}
	}
}

func (s *service) reap(now time.Time) {
	var idle []*worker
	for _, w := range s.workers {
		if w.lease == "" && w.process != nil && !w.retiring {
			idle = append(idle, w)
		}
	}
	slices.SortFunc(idle, func(a, b *worker) int { return b.idleSince.Compare(a.idleSince) })
	for i, w := range idle {
		keep := idleShort
		if i < runtime.NumCPU() {
			keep = idleLong
		}
		if w.spent || now.Sub(w.idleSince) > keep {
			s.retire(w)
		}
	}
}

// retire ends a process without work, unless others need it: for objects or actors of its tasks.
func (s *service) retire(w *worker) {
	for _, a := range s.order {
		if a.spec.Owner == w.role && a.state != stateDead && !a.spec.Detached {
			return
		}
	}
	w.retiring = true
	p := w.process
	s.background(func() {
		needed := s.ownsObjects(p)
		s.do(func() {
			if w.retiring = false; !needed && w.lease == "" {
				s.endWorker(w)
			}
		})
	})
}

// ownsObjects reports whether other processes hold objects of this one.
func (s *service) ownsObjects(p *process) bool {
	owns, err := askProcess[bool](s.ctx, p, dispatch.Call{Method: "owns", Timeout: ownsLimit})
	return err == nil && owns
}
