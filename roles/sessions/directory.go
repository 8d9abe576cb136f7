package sessions

import (
	"time"

	"troupe/bus"
	"troupe/bus/wire"
)

// expectPatience is how long the request of a creator may take to come after a handle of its actor.
const expectPatience = 10 * time.Second

// expectation is an actor whose handles came before the request of its creator.
type expectation struct {
	holders map[string]int
	waiting []*waiter
}

// expect waits for the request of an actor's creator, and calls then with the actor, or nil.
func (s *service) expect(id string, c *call, then func(*actor)) {
	e := s.expectation(id)
	e.waiting = s.wait(e.waiting, c, expectPatience, func() { then(s.actors[id]) })
}

func (s *service) expectation(id string) *expectation {
	e := s.expected[id]
	if e == nil {
		e = &expectation{holders: map[string]int{}}
		s.expected[id] = e
		time.AfterFunc(2*expectPatience, bus.Guard(func() {
			s.do(func() {
				if s.expected[id] == e {
					delete(s.expected, id)
				}
			})
		}))
	}
	return e
}

// created gives an actor the handles that came before it. It returns the processes that have one.
func (s *service) created(a *actor) map[string]bool {
	had := map[string]bool{}
	if e := s.expected[a.id]; e != nil {
		delete(s.expected, a.id)
		for process, n := range e.holders {
			a.holders[process] += n
			had[process] = true
		}
		wakeAll(e.waiting)
	}
	return had
}

// actorInfo answers where an actor is, once that is known.
func (s *service) actorInfo(c *call) error {
	var id string
	if err := c.args.read(&id); err != nil {
		return err
	}
	then := func(a *actor) {
		switch {
		case a == nil:
			c.reply(map[string]any{"dead": nil})
		case a.isSettled():
			c.reply(a.info())
		default:
			a.settled = s.wait(a.settled, c, -1, func() { c.reply(a.info()) })
		}
	}
	if a := s.actors[id]; a != nil {
		then(a)
	} else {
		s.expect(id, c, then)
	}
	return nil
}

func (a *actor) info() map[string]any {
	if a.state == stateDead {
		return map[string]any{"dead": a.cause}
	}
	return map[string]any{"role": a.role, "restarts": a.spec.Restarts != 0}
}

// actorLost answers what became of an actor whose process of that role is gone, once that is known: dead, restarts, or nothing if the
// process lives on. With patience nil it waits for its end.
func (s *service) actorLost(c *call) error {
	var id, role string
	seconds := deathPatience.Seconds()
	if err := c.args.read(&id, &role, &seconds); err != nil {
		return err
	}
	patience := time.Duration(seconds * float64(time.Second))
	if len(c.args) > 2 && c.args[2].IsNil() {
		patience = -1
	}
	a := s.actors[id]
	if a == nil {
		c.reply(map[string]any{"dead": nil})
		return nil
	}
	answer := func() {
		switch {
		case a.state == stateDead:
			c.reply(map[string]any{"dead": a.cause})
		case a.role != role:
			c.reply(map[string]any{"restarts": true})
		default:
			c.reply(map[string]any{})
		}
	}
	if a.state == stateDead || a.role != role {
		answer()
		return nil
	}
	a.ended = s.wait(a.ended, c, patience, answer)
	return nil
}

func (s *service) actorState(c *call) error {
	var id string
	if err := c.args.read(&id); err != nil {
		return err
	}
	state := stateDead
	if a := s.actors[id]; a != nil {
		state = a.state
	}
	c.reply(string(state))
	return nil
}

func (s *service) actorHandle(c *call) error {
	var id string
	if err := c.args.read(&id); err != nil {
		return err
	}
	if a := s.actors[id]; a != nil {
		c.reply(a.descriptor())
	} else {
		c.reply(nil)
	}
	return nil
}

func (a *actor) descriptor() map[string]any {
	return map[string]any{"handle": orNil(a.spec.Handle), "actor_id": a.id}
}

func (s *service) namedActor(c *call) error {
	var key actorName
	if err := c.args.read(&key.namespace, &key.name); err != nil {
		return err
	}
	if a := s.actors[s.names[key]]; a != nil && a.state != stateDead {
		c.reply(a.descriptor())
	} else {
		c.reply(nil)
	}
	return nil
}

// namedActors lists [namespace, name] of the living actors with a name, of one namespace or of all.
func (s *service) namedActors(c *call) error {
	var namespace *string
	if err := c.args.read(&namespace); err != nil {
		return err
	}
	found := [][]string{}
	for _, a := range s.order {
		name := a.spec.name()
		if name != "" && a.state != stateDead && (namespace == nil || *namespace == a.spec.Namespace) {
			found = append(found, []string{a.spec.Namespace, name})
		}
	}
	c.reply(found)
	return nil
}

func (s *service) listActors(c *call) error {
	rows := make([]map[string]any, 0, len(s.order))
	for _, a := range s.order {
		var reason any
		if a.state == stateDead {
			reason = a.reason
		}
		rows = append(rows, map[string]any{
			"actor_id": a.id, "class_name": a.spec.ClassName, "state": string(a.state), "name": a.spec.name(), "job_id": a.spec.Job, "node_id": a.at.NodeID, "pid": a.pid,
			"ray_namespace": a.spec.Namespace, "death_cause": reason, "is_detached": a.spec.Detached, "required_resources": a.spec.Demand, "num_restarts": a.restarted,
		})
	}
	c.reply(rows)
	return nil
}

// freeName makes the name of an actor available.
func (s *service) freeName(a *actor) {
	key := actorName{a.spec.Namespace, a.spec.name()}
	if key.name != "" && s.names[key] == a.id {
		delete(s.names, key)
	}
}

// handleTaken notes that a process has a handle that it had not.
func (s *service) handleTaken(c *call) error {
	var id, process string
	if err := c.args.read(&id, &process); err != nil {
		return err
	}
	if !s.isKnown(c.caller) {
		return errEnded(c.caller)
	}
	if a := s.actors[id]; a == nil {
		s.expectation(id).holders[process]++
	} else if a.state != stateDead {
		a.holders[process]++
	}
	c.reply(nil)
	return nil
}

// handleDropped notes that a process has a handle no more; the last one ends the actor.
func (s *service) handleDropped(c *call) error {
	var id, process string
	if err := c.args.read(&id, &process); err != nil {
		return err
	}
	defer c.reply(nil)
	a := s.actors[id]
	if a == nil {
		if e := s.expected[id]; e != nil && e.holders[process] > 0 {
			if e.holders[process]--; e.holders[process] == 0 {
				delete(e.holders, process)
			}
		}
		return nil
	}
	if a.holders[process] == 0 {
		return nil
	}
	if a.holders[process]--; a.holders[process] == 0 {
		delete(a.holders, process)
	}
	switch {
	case len(a.holders) > 0:
	case a.state == stateDead:
		s.freeName(a)
	case !a.spec.Detached:
		s.outOfScope(a)
	}
	return nil
}

// outOfScope ends an actor without handles. One that is being constructed ends when it is: its constructor may matter.
func (s *service) outOfScope(a *actor) {
	if a.state != stateStarting && a.state != stateDead && !s.isRecovering() {
		s.endActor(a, reasonOutOfScope, false)
	}
}

// rejoin is what a process that knew an earlier service says of itself: the handles that it has by actor, and the leases.
func (s *service) rejoin(c *call) error {
	var process, jobID string
	var holds map[string]int
	var leases []claimedLease
	if err := c.args.read(&process, &jobID, &holds, &leases); err != nil {
		return err
	}
	if !s.isKnown(process) {
		return errEnded(process)
	}
	if j := s.jobs[jobID]; j != nil && !j.ended {
		s.processes[process] = jobID
	}
	for id, n := range holds {
		if a := s.actors[id]; a == nil {
			s.expectation(id).holders[process] = n
		} else if a.state != stateDead {
			a.holders[process] = n
		}
	}
	for _, l := range leases {
		if err := checkAmounts(l.Demand); err != nil {
			return err
		}
		s.claim(l, process)
	}
	c.reply(nil)
	return nil
}

// present waits for the end of the service, so that its callers hear of it.
func (s *service) present(c *call) error {
	if !s.isKnown(c.caller) {
		return errEnded(c.caller)
	}
	return nil
}

// claimedLease is a lease of an earlier service that a process has.
type claimedLease struct {
	ID      string              `msgpack:"id"`
	Job     string              `msgpack:"job"`
	Demand  map[string]float64  `msgpack:"demand"`
	Role    string              `msgpack:"role"`
	NodeID  string              `msgpack:"node_id"`
	Group   string              `msgpack:"group"`
	Bundle  int                 `msgpack:"bundle"`
	Devices map[string][]string `msgpack:"devices"`
	Env     wire.Raw            `msgpack:"env"`
}
