package sessions

import (
	"fmt"
	"slices"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/roles"
	"troupe/roles/registry"
	"troupe/roles/sessions/book"
)

// actorState is the state of an actor.
//
//	pending ──resources──► starting ──constructor──► alive ──kill, exit, last handle──► dead
//	   ▲└─────────────────────┴── error, kill ─────────┼─────────────────────────────────►
//	   └── restarting ◄── the process died, restarts are left ──┘
type actorState string

const (
	statePending    actorState = "PENDING_CREATION"     // waits for resources
	stateStarting   actorState = "DEPENDENCIES_UNREADY" // its process starts, or its constructor runs
	stateAlive      actorState = "ALIVE"
	stateRestarting actorState = "RESTARTING" // its process has died: waits for resources again
	stateDead       actorState = "DEAD"
)

const (
	deathPatience = 10 * time.Second // for the end of a process to be seen that a caller has lost
	nodePatience  = 2 * time.Second  // for the end of a node to be seen that could start no process
	deadMost      = 10_000           // dead actors that are remembered
)

const (
	reasonGroupRemoved = "The actor is dead because its worker process was ended: its placement group was removed."
	reasonNodeDied     = "The actor died because its node has died."
	reasonOutOfScope   = "The actor is dead because all references to the actor were removed."
	reasonKilled       = "The actor is dead because it was killed by `ray.kill`."
	reasonOwnerDied    = "The actor is dead because its owner has died."
	reasonJobEnded     = "The actor is dead because its owner has died: the job has finished."
	reasonHeadDied     = "The actor died because the head was restarted before the actor was created."
)

// actorName is a name in Ray's sense.
type actorName struct{ namespace, name string }

// actor is an actor. The lock of the service guards it.
type actor struct {
	id         string
	order      int // of its creation
	spec       actorSpec
	held       []wire.Reference // inside the constructor's arguments
	state      actorState
	role       string      // of its process; a restart has another
	restarted  int         // times
	placed     bool        // the role and its resources are stored
	onPlaced   func()      // what waits for that; nil: nothing
	exiting    string      // why the process ends on purpose, which is no reason to restart it
	process    *process    // nil: it does not run yet
	group      *actorGroup // until its process runs; nil: the role of its process is its own
	at         book.Allocation
	cause      any // what callers are told: a cause, or the frame of an exception
	reason     string
	killReason string
	pid        int64
	holders    map[string]int // handles by process
	settled    []*waiter      // until it is alive or dead
	ended      []*waiter      // until the process of this role has ended
}

func (a *actor) isSettled() bool { return a.state == stateAlive || a.state == stateDead }

func (s *service) newActor(id string, spec actorSpec) *actor {
	a := &actor{id: id, spec: spec, state: statePending, role: s.unusedRole("actor-" + id), holders: map[string]int{}}
	s.creations++
	a.order = s.creations
	s.actors[id] = a
	s.order = append(s.order, a)
	return a
}

// unusedRole is a name for a role: another one if an earlier service has begun to start that role and has not stored it.
func (s *service) unusedRole(name string) string {
	if _, used := s.running[name]; used {
		return name + "-" + bus.NewID()
	}
	return name
}

// actorsInOrder lists the actors in the order of their creation.
func (s *service) actorsInOrder() []*actor { return slices.Clone(s.order) }

// createActor registers an actor and begins to start it. With a name that is taken it answers with that actor or refuses. A request
// that is repeated finds its own actor.
func (s *service) createActor(c *call) error {
	var id, process string
	var spec actorSpec
	if err := c.args.read(&id, &spec, &process); err != nil {
		return err
	}
	if err := bus.CheckName("actor", id); err != nil {
		return err
	}
	if s.actors[id] != nil {
		c.reply(map[string]any{})
		return nil
	}
	strategy, err := strategyOf(spec.Strategy)
	if err == nil {
		err = checkAmounts(spec.Demand)
	}
	switch g := spec.Group; {
	case err != nil:
		return err
	case g != nil && (g.Rank < 0 || g.Rank >= registry.MaxWorld):
		return bus.Errorf(bus.CodeInvalid, "rank %d of a group of actors: give 0 to %d", g.Rank, registry.MaxWorld-1)
	case !s.isKnown(c.caller):
		return errEnded(c.caller)
	}
	spec = spec.owned()
	if name := spec.name(); name != "" {
		key := actorName{spec.Namespace, name}
		if there := s.actors[s.names[key]]; there != nil {
			if spec.GetIfExists && there.state != stateDead {
				c.reply(map[string]any{"existing": there.descriptor()})
			} else {
				c.reply(map[string]any{"taken": true})
			}
			return nil
		}
		s.names[key] = id
	}
	a := s.newActor(id, spec)
	s.enterGroup(a, process)
	a.held = referencesIn(spec.Construct)
	s.rt.References().Retain(a.held...)
	if !s.created(a)[process] {
		a.holders[process]++
	}
	s.schedule(a, strategy)
	s.forgetDead()
	s.store.dirty(actorKey(id))
	if spec.name() != "" {
		c.replyStored(map[string]any{})
	} else {
		c.reply(map[string]any{})
	}
	return nil
}

// schedule requests the resources of an actor.
func (s *service) schedule(a *actor, strategy book.Strategy) {
	role := a.role
	request := s.requestOf(a)
	request.Strategy = strategy
	s.request(request, func(g grant) {
		if a.role != role || a.state == stateDead {
			return
		}
		if g.refused != nil {
			a.cause = cause{Kind: causeOf(g.refused), Text: g.refused.Text}
			s.endActor(a, g.refused.Text, false)
			return
		}
		a.state, a.at = stateStarting, g.allocation
		if !s.joinGroup(a) {
			s.start(a)
		}
	})
}

// requestOf is the request for the resources of an actor.
func (s *service) requestOf(a *actor) book.Request {
	return book.Request{Key: a.id, Demand: a.spec.Demand, Durable: true, Holder: s.holder(a.spec.Job, "actor", a.spec.ClassName)}
}

// start starts the process of an actor that has a node, in a role of its own.
func (s *service) start(a *actor) {
	role := a.role
	s.storePlace(a)
	s.background(func() { s.startActor(a, role) })
}

// storePlace stores the role and the resources of an actor.
func (s *service) storePlace(a *actor) {
	role := a.role
	a.placed = false
	s.store.dirty(actorKey(a.id))
	s.store.onStored(false, func() { s.do(func() { s.placed(a, role) }) })
}

// placed notes that the role and the resources of an actor are stored: callers may hear where it is.
func (s *service) placed(a *actor, role string) {
	if a.role != role {
		return
	}
	then := a.onPlaced
	if a.placed, a.onPlaced = true, nil; then != nil {
		then()
	}
}

// startActor starts the process of an actor and constructs the actor.
func (s *service) startActor(a *actor, role string) {
	plan, err := s.planActor(a)
	var cl *roles.Cluster
	if err == nil {
		cl, err = s.createRole(role, plan)
	}
	if err != nil {
		s.startFailed(a, role, nodePatience, err)
		return
	}
	s.constructActor(a, role, &process{cluster: cl})
}

// planActor describes the process of an actor that has a node.
func (s *service) planActor(a *actor) (*processPlan, error) {
	var at book.Allocation
	var assigned map[string]any
	var spec actorSpec
	s.do(func() {
		at, spec = a.at, a.spec
		assigned = map[string]any{"kind": spec.Kind, "groups": orNil(spec.Groups), "actor_id": a.id, "actor_name": spec.name(), "class_name": spec.ClassName,
			"placement": orNil(spec.Captures), "demand": spec.Demand, "namespace": spec.Namespace, "restarted": a.restarted}
	})
	devices := map[string][]string{}
	for name, ids := range at.Devices {
		if len(ids) > 0 {
			devices[name] = ids
		}
	}
	plan, err := s.plan(spec.Job, spec.Env, at, devices, assigned)
	if err == nil {
		plan.reserved = at.Record
	}
	return plan, err
}

// constructActor constructs an actor in its process, which runs.
func (s *service) constructActor(a *actor, role string, p *process) {
	gone := false
	var construct wire.Raw
	s.do(func() {
		if gone = a.state == stateDead || a.role != role; gone {
			return
		}
		a.process, a.group, construct = p, nil, a.spec.Construct
		s.processes[role] = a.spec.Job
		s.background(func() { s.watchActor(a, role, p) })
	})
	if gone {
		s.destroy(p, false)
		s.do(func() {
			if a.state == stateDead { // otherwise a later process has the resources
				s.release(a.id)
			}
		})
		return
	}
	kind, value, err := s.construct(p, construct)
	if err != nil {
		s.startFailed(a, role, deathPatience, err)
		return
	}
	s.do(func() { s.constructed(a, role, kind, value) })
}

// construct has a process construct its actor: ("ok", pid) or ("error", frame).
func (s *service) construct(p *process, construct wire.Raw) (kind string, value wire.Raw, err error) {
	args, err := plainArguments(construct)
	if err != nil {
		return "", nil, err
	}
	answer, err := askProcess[[]wire.Raw](s.ctx, p, dispatch.Call{Method: "construct", Args: args})
	if err != nil {
		return "", nil, err
	}
	if len(answer) != 2 {
		return "", nil, bus.Errorf(bus.CodeMalformed, "the answer of the constructor is malformed")
	}
	err = wire.Unmarshal(answer[0], &kind)
	return kind, answer[1], err
}

// startFailed ends an actor whose process did not start. The watch of the process, or of its node, may know the reason in a moment.
func (s *service) startFailed(a *actor, role string, patience time.Duration, why error) {
	if s.ctx.Err() != nil {
		return
	}
	s.do(func() {
		switch {
		case a.role != role:
			return
		case a.state == stateDead:
			if a.process == nil {
				s.release(a.id) // endActor has left it to the start
			}
			return
		}
		c := &call{s: s, ctx: s.ctx, answered: true}
		a.ended = s.wait(a.ended, c, patience, func() {
			if a.role == role {
				reason := a.killReason
				if reason == "" {
					reason = fmt.Sprintf("The actor died because it could not be started: %v", why)
				}
				if s.endActor(a, reason, false); a.process == nil { // endActor has left it to the start
					s.release(a.id)
				}
			}
		})
	})
}

func (s *service) constructed(a *actor, role, kind string, value wire.Raw) {
	if a.role != role || a.state == stateDead {
		return
	}
	if !a.placed { // otherwise the next service would not know the process that callers know
		a.onPlaced = func() { s.constructed(a, role, kind, value) }
		return
	}
	if kind == "error" {
		a.cause = slices.Clone(value)
		s.endActor(a, "", false)
		return
	}
	_ = wire.Unmarshal(value, &a.pid) // for display
	a.state = stateAlive
	if a.spec.Restarts == 0 {
		s.dropConstruct(a)
	}
	s.store.dirty(actorKey(a.id))
	wakeAll(a.settled)
	a.settled = nil
	if len(a.holders) == 0 && !a.spec.Detached && !s.isRecovering() {
		s.endActor(a, reasonOutOfScope, false)
	}
}

// dropConstruct drops the arguments of the constructor.
func (s *service) dropConstruct(a *actor) {
	a.spec.Construct = nil
	held := a.held
	a.held = nil
	if len(held) > 0 {
		s.later(func() { s.rt.References().Release(held...) })
	}
}

// watchActor waits for the end of an actor's process.
func (s *service) watchActor(a *actor, role string, p *process) {
	detail := s.died(p)
	if s.ctx.Err() != nil {
		return
	}
	s.do(func() {
		kind := "SYSTEM_ERROR"
		if a.exiting != "" {
			kind, detail = "INTENDED_USER_EXIT", a.exiting
		}
		reason := a.killReason
		if reason == "" {
			reason = fmt.Sprintf("The actor is dead because its worker process has died. Worker exit type: %s Worker exit detail: %s", kind, detail)
		}
		s.processLost(a, role, reason)
	})
}

// processLost restarts an actor whose process has died, where restarts are left; else the actor is dead.
func (s *service) processLost(a *actor, role, reason string) {
	if a.state == stateDead || a.role != role {
		return
	}
	left := a.spec.Restarts
	if reason == reasonNodeDied && !a.isSettled() && left >= 0 {
		left++ // it had not begun: another node takes it
	}
	if a.exiting != "" || left == 0 || a.cause != nil || len(a.holders) == 0 && !a.spec.Detached && !s.isRecovering() {
		s.endActor(a, reason, a.exiting == "")
		return
	}
	if left > 0 {
		left--
	}
	a.spec.Restarts = left
	s.restart(a)
}

// restart starts an actor again, in another process, after the old one has ended.
func (s *service) restart(a *actor) {
	old, role, group := a.process, a.role, a.group
	a.restarted++
	a.process, a.group, a.killReason, a.onPlaced = nil, nil, "", nil
	a.role = s.unusedRole(fmt.Sprintf("actor-%s-%d", a.id, a.restarted))
	a.state = stateRestarting
	s.breakUp(group)
	ended := a.ended
	a.ended = nil
	wakeAll(ended)
	s.endProcess(role)
	s.store.dirty(actorKey(a.id))
	again, next := a.role, func() {
		strategy, _ := strategyOf(a.spec.Strategy) // it was valid before
		s.release(a.id)
		s.schedule(a, strategy)
	}
	if old == nil {
		next()
		return
	}
	s.background(func() {
		s.destroy(old, false)
		s.do(func() {
			if a.role == again && a.state == stateRestarting {
				next()
			}
		})
	})
}

// endActor is the death of an actor: its resources are free, its process ends, callers are told the reason. Its name is free too; that
// of one whose process crashed once no handle is left.
func (s *service) endActor(a *actor, reason string, crashed bool) {
	if a.state == stateDead {
		return
	}
	if a.cause == nil {
		a.cause = cause{Kind: causeDied, Text: fmt.Sprintf("The actor %s (ActorID %s) died unexpectedly before finishing this task. %s", a.spec.ClassName, a.id, reason)}
	}
	starting := a.state == stateStarting && a.process == nil && !a.group.isForming()
	a.state, a.reason = stateDead, reason
	s.breakUp(a.group) // before the resources are free, which may be those that another of the group waits for
	s.deaths = append(s.deaths, a.id)
	if !crashed || len(a.holders) == 0 || a.spec.Detached {
		s.freeName(a)
	}
	s.dropConstruct(a)
	settled, ended := a.settled, a.ended
	a.settled, a.ended = nil, nil
	wakeAll(settled)
	wakeAll(ended)
	switch p, gentle := a.process, reason == reasonOutOfScope; {
	case p != nil:
		done := s.processEnding(a.spec.Job, a.at.NodeID)
		s.background(func() {
			s.destroy(p, gentle)
			s.do(func() {
				s.release(a.id)
				done()
			})
		})
	case !starting: // otherwise startActor releases it with the process
		s.release(a.id)
	}
	s.store.dirty(actorKey(a.id))
	s.endProcess(a.role)
	s.forgetJob(a.spec.Job)
}

// forgetDead drops the oldest dead actors of many.
func (s *service) forgetDead() {
	if len(s.deaths) <= deadMost {
		return
	}
	for _, id := range s.deaths[:deadMost/10] {
		if a := s.actors[id]; a != nil {
			s.freeName(a)
		}
		delete(s.actors, id)
	}
	s.deaths = slices.Clone(s.deaths[deadMost/10:])
	s.order = slices.DeleteFunc(s.order, func(a *actor) bool { return s.actors[a.id] == nil })
}

// killActor ends an actor at once, or with no_restart false its process: the actor is restarted where restarts are left. The answer
// is the cause for its callers, if it is dead.
func (s *service) killActor(c *call) error {
	var id string
	noRestart := true
	if err := c.args.read(&id, &noRestart); err != nil {
		return err
	}
	a := s.actors[id]
	switch {
	case a == nil:
		c.reply(nil)
	case a.state == stateDead:
		s.freeName(a)
		c.reply(a.cause)
	case noRestart:
		a.killReason = reasonKilled
		s.endActor(a, reasonKilled, false)
		c.replyStored(a.cause)
	default:
		if a.process != nil {
			a.killReason = reasonKilled
			s.processLost(a, a.role, reasonKilled)
		}
		c.reply(nil)
	}
	return nil
}

// actorExits notes that an actor ends its process on purpose.
func (s *service) actorExits(c *call) error {
	var id, why string
	if err := c.args.read(&id, &why); err != nil {
		return err
	}
	if a := s.actors[id]; a != nil {
		a.exiting = why
	}
	c.reply(nil)
	return nil
}

// owned is the spec without views of the request's body.
func (s actorSpec) owned() actorSpec {
	for _, raw := range []*wire.Raw{&s.Strategy, &s.Captures, &s.Env, &s.Groups, &s.Handle} {
		*raw = slices.Clone(*raw)
	}
	return s
}

// plainArguments decodes the arguments of a constructor, so that their arrays are aligned again when they are sent.
func plainArguments(construct wire.Raw) ([]any, error) {
	if construct.IsNil() {
		return nil, bus.Errorf(bus.CodeInternal, "the arguments of the constructor are gone")
	}
	var args []any
	if err := wire.UnmarshalShared(construct, &args); err == nil {
		return args, nil
	}
	var raw []wire.Raw // with values that Python alone knows
	if err := wire.UnmarshalShared(construct, &raw); err != nil {
		return nil, err
	}
	args = make([]any, len(raw))
	for i, r := range raw {
		args[i] = r
	}
	return args, nil
}

// referencesIn lists the references inside a value.
func referencesIn(raw wire.Raw) []wire.Reference {
	var value any
	if raw.IsNil() || wire.UnmarshalShared(raw, &value) != nil {
		return nil
	}
	var found []wire.Reference
	var walk func(any)
	walk = func(v any) {
		switch v := v.(type) {
		case wire.Reference:
			found = append(found, v)
		case []any:
			for _, e := range v {
				walk(e)
			}
		case map[string]any:
			for _, e := range v {
				walk(e)
			}
		}
	}
	walk(value)
	return found
}
