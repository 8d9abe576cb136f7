package roles

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/nodes"
	"troupe/placement"
	"troupe/roles/life"
	"troupe/roles/registry"
)

const (
	driverGrace     = 2 * time.Second        // how long the head waits for a live driver to start a restart
	restartPoll     = 2 * time.Second        // interval of reading the record during a restart by another process
	restartMargin   = 30 * time.Second       // how much longer than planned a restart may take, before another process takes over
	drainDelay      = 200 * time.Millisecond // how long the exits of a drained node's workers may take to arrive
	stateRestarted  = actors.State("restarted")
	stateRestarting = actors.State("restarting")
	stateResized    = actors.State("resized")
)

var (
	errRoleEnded       = errors.New("the role is stopping or has failed")
	errReplaced        = errors.New("its workers have been replaced")
	errElsewhere       = errors.New("another process restarts the role")
	errSuperseded      = errors.New("another process has taken the restart over")
	errTooManyRestarts = errors.New("no more restarts are allowed")
)

// Restarting is the ranks whose calls wait because their workers are being replaced, as far as this process knows:
// shortly before the record says so.
func (c *Cluster) Restarting() []int {
	away, _ := c.gate.Away()
	return away
}

// WaitReady returns when every rank takes calls, or an error if the role has failed or is destroyed, or ctx has ended.
func (c *Cluster) WaitReady(ctx context.Context) error {
	if c.Record().ReplacesWorkers() && c.origin != created {
		c.performer.reloadRecord() // messages about a restart may have been missed
	}
	for {
		if err := c.callable(""); err != nil {
			return err
		}
		away, changedCh := c.gate.Away()
		if len(away) == 0 {
			return nil
		}
		select {
		case <-changedCh:
		case <-ctx.Done():
			return bus.Errorf(bus.CodeOf(ctx.Err()), "role %s is not ready: %d of its ranks are restarting, rank %d among them: %w", c.Name(), len(away), away[0], ctx.Err())
		}
	}
}

// stillLost is the losses whose rank has no new worker.
func stillLost(rec registry.RoleRecord, lost []loss) []loss {
	return slices.DeleteFunc(slices.Clone(lost), func(l loss) bool {
		return l.rank >= rec.World || l.rank < len(rec.Placements) && rec.Placements[l.rank].Gen > l.gen
	})
}

// restartChanged makes the record be read: a restart has begun or ended elsewhere.
func (c *Cluster) restartChanged() { c.life.feed(life.Event{Kind: life.Changed}) }

// driverTimeLeft is how long a live driver has left to start a restart; zero: no limit.
func (m *recovery) driverTimeLeft() time.Duration {
	if m.c.origin != followed {
		return 0
	}
	begun, _ := m.times()
	return max(time.Until(begun.Add(driverGrace)), 0)
}

// mayRestart reports whether this process starts a restart now. A driver does at once; the head gives a live driver a
// moment, and both take over a restart whose process is dead or too slow.
func (m *recovery) mayRestart(rec registry.RoleRecord) bool {
	if m.c.origin != created && m.c.origin != followed || m.c.rt.currentLease() == nil || !rec.ReplacesWorkers() {
		return false
	}
	ctx, cancel := context.WithTimeout(m.c.rt.ctx, registryTimeout)
	defer cancel()
	reg, err := m.c.rt.registry(ctx)
	if err != nil {
		return false
	}
	if r := rec.Restart; rec.State == registry.RoleRestarting && r != nil && r.By != m.c.rt.ep.Session() {
		_, seen := m.times()
		slow := time.Since(seen) > r.Limit
		return slow || m.c.rt.judgeDriver(ctx, reg, registry.Owned{Driver: r.By, Lease: rec.Lease, Since: rec.Since}).Dead
	}
	return m.c.origin == created || m.driverTimeLeft() == 0 || !reg.DriverAlive(ctx, rec.Owner)
}

// restart replaces the lost workers, or all, and reports the result.
func (m *recovery) restart() {
	defer m.wake() // the record is read at once
	rec, lost := m.c.Record(), m.c.life.lost()
	if slices.ContainsFunc(lost, func(l loss) bool { return l.Evicted }) { // the other workers of its node exit at the same time
		m.wait(m.c.rt.ctx, drainDelay, 0)
		lost = m.c.life.lost()
	}
	lost = m.withExits(rec, stillLost(rec, lost))
	first := loss{Loss: life.Loss{Why: bus.Errorf(bus.CodeWorkerLost, "its restart was not completed")}}
	if rec.Restart != nil && len(rec.Restart.Ranks) > 0 {
		first.rank, first.Why = rec.Restart.Ranks[0], bus.Errorf(bus.CodeWorkerLost, "%s", rec.Restart.Why)
	}
	if len(lost) > 0 {
		first = lost[0]
	}
	giveUp := func(why *bus.Error, final bool) {
		m.c.life.feed(life.Event{Kind: life.GaveUp, Rank: first.rank, Loss: life.Loss{Why: why}, Final: final})
	}
	fails := func(why error) *bus.Error {
		e := bus.Errorf(bus.CodeWorkerLost, "%s; rank %d could not be restarted: %w", first.why().Message, first.rank, why)
		e.Node, e.Stack, e.Details = first.why().Node, first.why().Stack, first.why().Details
		return e
	}
	params, err := m.c.workforce.loadStartParams(m.c.rt.ctx, rec)
	if bus.CodeOf(err) == bus.CodeRefused && !m.ownerAlive(rec) { // otherwise the owner restarts them, or its lease ends
		giveUp(fails(err), true)
		return
	}
	if err == nil {
		err = m.beginRestart(rec, lost, first, params)
	}
	switch {
	case errors.Is(err, errTooManyRestarts):
		why := *first.why()
		why.Message = fmt.Sprintf("%s (after %d restarts within %v, the maximum%s)", why.Message, params.Restarts, restartWindow, earlierCauses(rec, why.Message))
		giveUp(&why, true)
		return
	case err != nil: // the record has changed, or the write failed
		m.wait(m.c.rt.ctx, restartPoll/4, 0)
		m.c.life.feed(life.Event{Kind: life.Deferred})
		return
	}
	err = m.performRestart(params, lost)
	m.begin()
	switch {
	case err == nil:
		m.applyOwn()
	case errors.Is(err, errSuperseded) || m.c.rt.ctx.Err() != nil:
		m.c.life.feed(life.Event{Kind: life.Deferred})
	default:
		giveUp(fails(err), false)
	}
}

// applyOwn applies the record that this process has written for a restart.
func (m *recovery) applyOwn() {
	read := lifeRecord(m.c.Record())
	read.Own = true
	m.c.life.feed(life.Event{Kind: life.Read, Record: read})
}

// withExits replaces guessed losses by the exits that agents know: a process that has just begun to monitor a role has
// missed them.
func (m *recovery) withExits(rec registry.RoleRecord, lost []loss) []loss {
	out := slices.Clone(lost)
	for i, l := range out {
		if !l.Guessed || l.rank >= len(rec.Placements) {
			continue
		}
		ctx, cancel := context.WithTimeout(m.c.rt.ctx, agentProbe)
		all, _ := m.c.rt.agents().Workers(ctx, rec.Placements[l.rank].Node) // a silent agent knows no exit
		cancel()
		id := rec.WorkerID(l.rank)
		if at := slices.IndexFunc(all, func(s nodes.Status) bool { return s.ID == id }); at >= 0 && all[at].Exit != nil {
			if kind, told := lossOfExit(*all[at].Exit); kind != life.Exited {
				out[i].Loss = told
			}
		}
	}
	return out
}

func (m *recovery) ownerAlive(rec registry.RoleRecord) bool {
	ctx, cancel := context.WithTimeout(m.c.rt.ctx, registryTimeout)
	defer cancel()
	reg, err := m.c.rt.registry(ctx)
	return err != nil || !m.c.rt.judgeDriver(ctx, reg, rec.Owned()).Dead
}

// beginRestart writes into the record that this process restarts the ranks. The first writer wins.
func (m *recovery) beginRestart(rec registry.RoleRecord, lost []loss, first loss, params *startParams) error {
	avoid := m.nodesToAvoid(rec, lost)
	counts := slices.ContainsFunc(lost, func(l loss) bool { return !l.Evicted && !l.Asked })
	before := uint32(0)
	if rec.Restart != nil {
		before = rec.Restart.Gen
	}
	ctx, cancel := context.WithTimeout(m.c.rt.ctx, 2*registryTimeout)
	defer cancel()
	err := m.c.record.alter(ctx, func(r *registry.RoleRecord) error {
		ranks, n := ranksOf(stillLost(*r, lost)), 0
		if r.Policy == RestartRole && len(ranks) > 0 {
			ranks = r.AllRanks()
		}
		switch old := r.Restart; {
		case r.State != registry.RoleReady && r.State != registry.RoleRestarting:
			return errRoleEnded
		case r.State == registry.RoleRestarting && old != nil && old.Gen != before:
			return errElsewhere
		case r.State == registry.RoleRestarting && old != nil:
			ranks, avoid, n = union(ranks, old.Ranks), union(avoid, old.Avoid), old.N
		}
		if len(ranks) == 0 {
			return errReplaced
		}
		if counts {
			now := time.Now().UTC()
			r.Recent = slices.DeleteFunc(slices.Clone(r.Recent), func(o registry.RecentRestart) bool { return now.Sub(o.At) > restartWindow })
			if len(r.Recent) >= params.Restarts {
				return errTooManyRestarts
			}
			r.Restarts++
			r.Recent = append(r.Recent, registry.RecentRestart{At: now, Why: wire.Clip(first.why().Message)})
			n = len(r.Recent)
		}
		r.Generations++
		for _, rank := range ranks {
			r.Replaced = append(r.Replaced, registry.ReplacedWorker{Node: r.Placements[rank].Node, Rank: rank, Gen: r.Placements[rank].Gen})
			r.Placements[rank].Gen = r.Generations
		}
		pause := params.restartProcess().pause(n)
		r.State, r.Since = registry.RoleRestarting, time.Now().UTC()
		r.Restart = &registry.Restart{
			Ranks: ranks, Gen: r.Generations, N: n, Of: params.Restarts, Why: first.why().Message, Avoid: avoid, By: m.c.rt.ep.Session(),
			Limit: pause + params.StartTimeout + restartMargin,
		}
		return nil
	})
	if err == nil {
		m.saw(m.c.Record())
	}
	return err
}

// earlierCauses is the causes of the restarts that count against the maximum, each once, except one that is told already.
func earlierCauses(rec registry.RoleRecord, told string) string {
	var causes []string
	for _, r := range rec.Recent {
		if r.Why != wire.Clip(told) && !slices.Contains(causes, r.Why) {
			causes = append(causes, r.Why)
		}
	}
	if len(causes) == 0 {
		return ""
	}
	return "; before: " + strings.Join(causes, "; ")
}

// nodesToAvoid is the nodes on which lost workers cannot be started again: those they were evicted from, and those that
// placement counts as lost.
func (m *recovery) nodesToAvoid(rec registry.RoleRecord, lost []loss) []string {
	var out []string
	for _, l := range lost {
		if l.Evicted {
			out = union(out, []string{rec.Placements[l.rank].Node})
		}
	}
	client, err := m.c.rt.placement()
	if err != nil {
		return out
	}
	ctx, cancel := context.WithTimeout(m.c.rt.ctx, registryTimeout)
	defer cancel()
	all, err := client.Nodes(ctx)
	if err != nil {
		return out // the launch reports the error
	}
	for _, placed := range rec.Placements {
		if nodeIsLost(all, placed.Node) {
			out = union(out, []string{placed.Node})
		}
	}
	return out
}

// nodeIsLost reports whether placement counts a node as lost: it is unknown, or its lease has ended.
func nodeIsLost(all []placement.NodeStatus, node string) bool {
	i := slices.IndexFunc(all, func(n placement.NodeStatus) bool { return n.Report.Node == node })
	return i < 0 || all[i].Rank < 0 || all[i].State != placement.NodeReady && all[i].Report.Session == ""
}

// performRestart performs the restart in the record.
func (m *recovery) performRestart(params *startParams, lost []loss) (err error) {
	rec := m.c.Record()
	r := rec.Restart
	end := m.recordRestart(r)
	defer func() { end(err) }()
	m.applyOwn() // later messages of the old workers are of another generation
	m.announce(r.Ranks, r.Gen, stateRestarting)
	then := "the rank is " + r.Outcome()
	if rec.Policy == RestartRole {
		then = "the role is " + r.Outcome()
	}
	for _, l := range lost {
		if !l.Asked {
			m.reportFailure(l, then)
		}
	}
	m.c.output.emit(eventRestart, nil, "", fmt.Sprintf("ranks %v, %s: %s", r.Ranks, r.Progress(), r.Why))
	if r.N > 0 {
		select {
		case <-m.c.rt.ctx.Done():
			return nil
		case <-time.After(params.restartProcess().pause(r.N)):
		}
	}
	ctx, cancel := context.WithTimeout(m.c.rt.ctx, params.StartTimeout)
	defer cancel()
	err = m.replace(ctx, params)
	if now := m.c.Record().Restart; now != nil {
		r = now // without the ranks for which no node had room
	}
	if err == nil {
		err = m.finishRestart(ctx, r.Gen)
	}
	if err == nil {
		m.announce(r.Ranks, r.Gen, stateRestarted)
		m.c.output.emit(eventRole, nil, "", fmt.Sprintf("ranks %v run again, %s", r.Ranks, r.Outcome()))
	} else if rec, lookErr := m.c.record.readRecord(); errors.Is(lookErr, bus.ErrNotFound) || lookErr == nil && (rec.Restart == nil || rec.Restart.Gen != r.Gen) {
		err = errSuperseded
	}
	return err
}

// replace kills the old processes of the ranks and starts new ones, on the same nodes or on others.
func (m *recovery) replace(ctx context.Context, params *startParams) error {
	if err := m.c.workforce.makeProgram(ctx); err != nil {
		return err
	}
	if err := m.c.workforce.killReplaced(ctx); err != nil {
		return err
	}
	if err := m.move(ctx, params); err != nil {
		return err
	}
	rec := m.c.Record()
	ranks := rec.Restart.Ranks
	if len(ranks) == 0 { // they have left, as no node had room
		return nil
	}
	if err := m.c.workforce.launch(ctx, ranks, rec); err != nil {
		return err
	}
	if err := m.c.workforce.awaitReady(ctx, ranks); err != nil {
		return err
	}
	if err := m.c.starter.barrier(ctx, ranks); err != nil {
		return err
	}
	return m.c.replayer.replay(ctx, ranks)
}

// finishRestart makes the role ready again, and releases reservations that no rank uses.
func (m *recovery) finishRestart(ctx context.Context, gen uint32) error {
	var unused []registry.ReservationRef
	err := m.c.record.alter(ctx, func(r *registry.RoleRecord) error {
		if r.State != registry.RoleRestarting || r.Restart == nil || r.Restart.Gen != gen {
			return errSuperseded
		}
		unused = r.DropUnusedReservations()
		r.NextEpoch(fmt.Sprintf("ranks %v %s: %s", r.Restart.Ranks, r.Restart.Outcome(), r.Restart.Why))
		r.State, r.Since, r.Restart, r.Replaced = registry.RoleReady, time.Now().UTC(), nil, nil
		return nil
	})
	if err != nil || len(unused) == 0 {
		return err
	}
	client, err := m.c.rt.placement()
	if err == nil {
		err = release(ctx, client, unused)
	}
	if err != nil { // the id belongs to the role: destroying the role releases it
		m.c.rt.log.Warn("roles: releasing an unused reservation failed; it is released with the role", "role", m.c.Name(), "error", err)
	}
	return nil
}

// announce tells other clusters of the role that its record has changed. A lost message is compensated by their periodic
// reading, and by the heartbeats of ranks that they do not know.
func (m *recovery) announce(ranks []int, gen uint32, state actors.State) {
	beats := make([]actors.Heartbeat, len(ranks))
	for i, rank := range ranks {
		beats[i] = actors.Heartbeat{Rank: rank, Gen: gen, State: state}
	}
	body, err := wire.Marshal(beats)
	if err == nil {
		err = m.c.rt.ep.Send(m.c.to.Life(), &wire.Frame{Kind: wire.KindBeat, Header: wire.Header{Session: m.c.rt.ep.Session()}, Body: body})
	}
	if err != nil {
		m.c.rt.log.Debug("roles: announcing a change of the record failed", "role", m.c.Name(), "error", err)
	}
}

// union is the elements of both, sorted, without duplicates.
func union[T int | string](a, b []T) []T {
	out := append(slices.Clone(a), b...)
	slices.Sort(out)
	return slices.Compact(out)
}
