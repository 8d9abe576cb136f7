package roles

import (
	"context"
	"time"

	"troupe/bus"
	"troupe/roles/life"
	"troupe/roles/registry"
)

const (
	failureSpread  = 50 * time.Millisecond  // how long the failure of a worker may take to reach all clusters of its role
	answersTransit = 300 * time.Millisecond // how long answers of a stopped worker may be in transit
)

// origin is how a runtime obtained a role: what it does in the role's life.
type origin = life.Part

const (
	created  = life.Creator // created here: destroyed with the runtime unless detached
	attached = life.Guest   // attached by name
	opened   = life.Reader  // opened from a handle and shared in the process, until the role ends
	followed = life.Monitor // monitored by a Local or a head, because its driver may be gone
	ending   = life.Ender   // destroyed here, because its driver or the worker that created it has ended
)

// lifeRecord is a record as the life of the role reads it.
func lifeRecord(rec registry.RoleRecord) life.Record {
	out := life.Record{Config: life.Config{Processes: rec.Process, Detached: rec.Detached, World: rec.World, Gens: make([]uint32, len(rec.Placements))}}
	for rank, placed := range rec.Placements {
		out.Gens[rank] = placed.Gen
	}
	switch rec.Policy {
	case RestartRank:
		out.Policy = life.ReplaceRank
	case RestartRole:
		out.Policy = life.ReplaceAll
	case Ignore:
		out.Policy = life.Continue
	}
	switch rec.State {
	case registry.RoleStarting:
		out.State = life.Unready
	case registry.RoleReady:
		out.State = life.Settled
	case registry.RoleRestarting:
		out.State = life.Unsettled
	case registry.RoleFailed:
		out.State, out.Why = life.Unworkable, rec.Failure()
	}
	out.Epoch = rec.Epoch
	if rec.Restart != nil {
		out.Restarting, out.RestartGen = rec.Restart.Ranks, rec.Restart.Gen
	}
	return out
}

// performer carries out what the life of a role asks for.
type performer struct{ c *Cluster }

// endError is the error of calls to a role that has ended.
func (p *performer) endError(end life.End) *bus.Error {
	switch {
	case end.Why == nil:
		return bus.Errorf(bus.CodeNotFound, "role %s has been destroyed", p.c.Name())
	case !end.Failure || end.Rank < 0:
		return bus.AsError(end.Why)
	case end.AtStart && p.c.starter.startedCh != nil:
		return startError(bus.AsError(end.Why))
	}
	why := bus.AsError(end.Why)
	because := bus.Errorf(bus.CodeWorkerLost, "the role failed because of rank %d: %s", end.Rank, why.Message).WithCause(why)
	because.Node, because.Stack, because.Details = why.Node, why.Stack, why.Details
	return because
}

// gateCalls holds calls, or sends those that wait.
func (p *performer) gateCalls(a life.Action) {
	if a.Kind == life.SendCalls {
		p.c.gate.Release(a.Ranks)
		return
	}
	r := p.c.Record().Restart
	p.c.gate.Hold(a.Ranks, func(rank int) *bus.Error {
		if a.Loss.Why == nil && r != nil {
			return p.withRank(rank, r.CallError(rank))
		}
		why := bus.AsError(a.Loss.Why)
		return p.withRank(rank, bus.Errorf(bus.CodeWorkerLost, "rank %d is restarting: %s", rank, why.Message).WithCause(why))
	})
}

// withRank sets the role and rank of an error.
func (p *performer) withRank(rank int, e *bus.Error) *bus.Error {
	e.Role, e.Rank = p.c.Name(), rank
	return e
}

// perform carries out an action.
func (p *performer) perform(a life.Action) {
	switch a.Kind {
	case life.TellSiblings:
		for _, s := range p.siblings() {
			if s.life.replaces() {
				s.life.feed(life.Event{Kind: life.Evicted, Rank: a.Rank, Gen: a.Gen, Loss: a.Loss})
			}
		}
	case life.FailCalls:
		p.failCalls(a)
	case life.FailReplaced:
		p.failReplaced(a)
	case life.FailPending:
		p.failPending()
	case life.EndCalls:
		p.c.replayer.close(p.c.rt.ep.References())
		p.c.gate.End(p.c.life.err())
		if p.c.origin == opened {
			p.c.rt.unshare(p.c)
		}
	case life.AwaitExit:
		p.c.liveness.awaitExit(a.Rank, a.Gen)
	case life.Check:
		p.c.rt.spawn(func() { p.check(a) })
	case life.Reshape:
		p.c.sizer.applyMesh(p.c.Record())
	case life.ExpectBeats:
		p.c.liveness.expectAll()
	case life.Publish:
		p.c.members.publish()
	case life.Recover:
		episode, _ := p.c.life.recovers(0)
		p.c.rt.spawn(func() { p.c.recovery.runRecovery(episode) })
	case life.Wake:
		p.c.recovery.wake()
	case life.Restart:
		p.c.recovery.restart()
	case life.Report:
		then := "the others continue"
		if a.Fails {
			then = "the role fails"
		}
		p.c.recovery.reportFailure(loss{rank: a.Rank, gen: a.Gen, Loss: a.Loss}, then)
	case life.TearDown:
		p.c.rt.spawn(func() {
			p.c.ender.cleanUp(func(ctx context.Context) error { return p.c.ender.fail(ctx, a.Loss.Why) })
			if p.c.Record().Process {
				p.c.ender.killFailed()
			}
		})
	case life.DestroyRole:
		p.c.rt.spawn(func() { p.c.ender.cleanUp(p.c.Destroy) })
	case life.Repeat:
		p.c.rt.spawn(p.c.ender.finishDestroy)
	case life.Leave:
		p.c.ender.release()
	case life.Complain:
		p.c.rt.log.Error("roles: an event that the state of the role does not allow is ignored", "role", p.c.Name(), "event", a.Event, "state", p.c.life.state())
	case life.LeaveSoon:
		p.c.rt.spawn(p.c.ender.releaseSoon)
	}
}

// siblings is the other clusters of the role in this runtime: one it is attached to, and one it monitors. A call fails
// in all of them at once, because they share an endpoint; so the gate must be closed in all of them.
func (p *performer) siblings() []*Cluster {
	p.c.rt.mu.Lock()
	defer p.c.rt.mu.Unlock()
	var out []*Cluster
	for s := range p.c.rt.clusters {
		if s != p.c && s.to == p.c.to {
			out = append(out, s)
		}
	}
	return out
}

// failCalls fails the calls that wait for a worker that has ended. One that stopped in order has answered every call before;
// answers in transit get a moment to arrive.
func (p *performer) failCalls(a life.Action) {
	why := a.Loss.Why
	if why == nil {
		why = p.withRank(a.Rank, bus.Errorf(bus.CodeWorkerLost, "the worker has been replaced"))
	}
	lose := func() { p.c.rt.ep.Lost(p.c.to, a.Rank, a.Gen, bus.AsError(why)) }
	if a.Slow {
		time.AfterFunc(answersTransit, bus.Guard(lose))
	} else {
		lose()
	}
}

// failReplaced fails the calls to workers that the restart in the record replaces, after the other clusters of the role in
// this runtime hold theirs.
func (p *performer) failReplaced(a life.Action) {
	rec := p.c.Record()
	r := rec.Restart
	if r == nil {
		return
	}
	for _, s := range p.siblings() {
		s.performer.applyRecord(rec)
	}
	for _, rank := range a.Ranks {
		why := p.withRank(rank, r.CallError(rank))
		if rec.Policy == RestartRole && r.By == p.c.rt.ep.Session() {
			why = bus.Errorf(bus.CodeWorkerLost, "the role is restarted: %s", r.Why)
		}
		p.c.rt.ep.Lost(p.c.to, rank, a.Gen, why)
	}
}

// failPending fails every pending call to a failed role.
func (p *performer) failPending() {
	if failed := p.c.life.failure(); failed != nil {
		p.failAll(failed)
	}
}

func (p *performer) failAll(why *bus.Error) {
	for rank := range p.c.WorldSize() {
		p.c.rt.ep.Lost(p.c.to, rank, ^uint32(0), why)
	}
}

// check reads the record because a worker has ended whose end the record may explain.
func (p *performer) check(a life.Action) {
	p.reloadRecord()
	again := life.Event{Kind: life.WorkerStopped, Rank: a.Rank, Gen: a.Gen, Again: true}
	if k, _ := p.c.life.rank(a.Rank); k.State == life.Lost {
		again.Kind, again.Loss = life.WorkerLost, k.Loss
	}
	p.c.life.feed(again)
}

// applyRecord applies a record that was read: another process may have replaced workers, or resized or ended the role.
func (p *performer) applyRecord(rec registry.RoleRecord) {
	if p.c.life.unlessRestarting(func() { p.c.record.setRecord(rec) }) {
		p.c.life.feed(life.Event{Kind: life.Read, Record: lifeRecord(rec)})
	}
}

// reloadRecord reads and applies the record.
func (p *performer) reloadRecord() {
	if rec, err := p.c.record.readRecord(); err == nil {
		p.applyRecord(rec)
	}
}
