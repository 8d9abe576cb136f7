package roles

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/nodes"
	"troupe/placement"
	"troupe/roles/registry"
)

const (
	driverGrace     = 2 * time.Second        // how long the head waits for a live driver to start a restart
	restartPoll     = 2 * time.Second        // interval of reading the record during a restart by another process
	restartMargin   = 30 * time.Second       // how much longer than planned a restart may take, before another process takes over
	drainDelay      = 200 * time.Millisecond // how long the exits of a drained node's workers may take to arrive
	stateRestarted  = actors.State("restarted")
	stateRestarting = actors.State("restarting")
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
	if c.Record().ReplacesWorkers() && c.origin != created { // messages about a restart may have been missed
		if rec, ok := c.reloadRecord(); ok && rec.State == registry.RoleRestarting {
			c.restartChanged()
			c.holdRestarting(rec, nil)
		}
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

// alter changes the role's record, in any state.
func (c *Cluster) alter(ctx context.Context, change func(*registry.RoleRecord) error) error {
	reg, err := c.rt.registry(ctx)
	if err != nil {
		return err
	}
	rec, err := reg.Alter(ctx, c.Record(), change)
	if err == nil {
		c.setRecord(rec)
	}
	return err
}

func (c *Cluster) setRecord(rec registry.RoleRecord) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rec = rec
}

// holdCalls records a loss, and holds the calls to the ranks that the role's policy restarts.
func (c *Cluster) holdCalls(l loss) {
	c.recovery.gateMu.Lock()
	defer c.recovery.gateMu.Unlock()
	c.recovery.add(l)
	ranks := []int{l.rank}
	if c.Record().Policy == RestartRole {
		ranks = c.Record().AllRanks()
	}
	c.gate.Hold(ranks, func(rank int) *bus.Error {
		return c.withRank(rank, bus.Errorf(bus.CodeWorkerLost, "rank %d is restarting: %s", rank, l.why.Message).WithCause(l.why))
	})
}

// siblings is the other clusters of the role in this runtime: one it is attached to, and one it monitors. A call fails
// in all of them at once, because they share an endpoint; so the gate must be closed in all of them.
func (c *Cluster) siblings() []*Cluster {
	c.rt.mu.Lock()
	defer c.rt.mu.Unlock()
	var out []*Cluster
	for s := range c.rt.clusters {
		if s != c && s.to == c.to {
			out = append(out, s)
		}
	}
	return out
}

// holdSiblingCalls holds the calls of the siblings to the ranks of a restart, until they have read the record.
func (c *Cluster) holdSiblingCalls(r *registry.Restart) {
	for _, s := range c.siblings() {
		s.gate.Hold(r.Ranks, func(rank int) *bus.Error { return s.withRank(rank, r.CallError(rank)) })
		s.restartChanged()
	}
}

// withRank sets the role and rank of an error.
func (c *Cluster) withRank(rank int, e *bus.Error) *bus.Error {
	e.Role, e.Rank = c.Name(), rank
	return e
}

// holdRestarting holds the calls to the ranks that are restarting, or lost and not yet replaced, and releases those to the
// others.
func (c *Cluster) holdRestarting(rec registry.RoleRecord, lost []loss) {
	c.recovery.gateMu.Lock()
	defer c.recovery.gateMu.Unlock()
	var away []int
	for _, l := range stillLost(rec, append(slices.Clone(lost), c.recovery.pending()...)) {
		away = append(away, l.rank)
		if rec.Policy == RestartRole {
			away = union(away, rec.AllRanks())
		}
	}
	if r := rec.Restart; rec.State == registry.RoleRestarting && r != nil {
		c.gate.Hold(r.Ranks, func(rank int) *bus.Error {
			return c.withRank(rank, r.CallError(rank))
		})
		away = append(away, r.Ranks...)
	}
	c.gate.Release(away)
}

// stillLost is the losses whose rank has no new worker.
func stillLost(rec registry.RoleRecord, lost []loss) []loss {
	return slices.DeleteFunc(slices.Clone(lost), func(l loss) bool {
		return l.rank >= rec.World || l.rank < len(rec.Placements) && rec.Placements[l.rank].Gen > l.gen
	})
}

// restartChanged makes the record be read: a restart has begun or ended elsewhere.
func (c *Cluster) restartChanged() {
	m := &c.recovery
	m.mu.Lock()
	m.changed = true
	if !m.running {
		m.running = c.rt.spawn(c.runRecovery)
	}
	m.mu.Unlock()
	m.wake()
}

// recover returns when the lost ranks have new workers, or the role has ended: it restarts them, or waits for another
// process to do so. Its error is why the role fails.
func (c *Cluster) recover(lost []loss) *bus.Error {
	begun, seen := time.Now(), restartSeen{}
	first := driverGrace
	if c.origin == created {
		first = 0
	}
	for {
		lost = append(lost, c.recovery.take()...)
		rec, err := c.readRecord()
		switch {
		case c.isOver() || c.rt.ctx.Err() != nil:
			return nil
		case errors.Is(err, bus.ErrNotFound) || err == nil && rec.State == registry.RoleStopping:
			c.endedElsewhere(c.errDestroyed(), nil)
			return nil
		case err != nil: // unreachable; retried
		case rec.State == registry.RoleFailed:
			c.endedElsewhere(rec.Failure(), rec.Failure())
			return nil
		default:
			c.applyRecord(rec)
			c.holdRestarting(rec, lost)
			c.failRestarted(rec, &seen)
			if rec.State == registry.RoleReady && len(stillLost(rec, lost)) == 0 {
				c.liveness.expectAll()
				return nil
			}
			if c.mayRestart(rec, &seen, begun.Add(first)) {
				again, why := c.restart(rec, lost, &seen)
				if why != nil || !again {
					return why
				}
				continue
			}
		}
		c.recovery.wait(c.rt.ctx, restartPoll/2+rand.N(restartPoll/2), c.driverTimeLeft(begun.Add(first)))
	}
}

// driverTimeLeft is how long a live driver has left to start a restart; zero: no limit.
func (c *Cluster) driverTimeLeft(at time.Time) time.Duration {
	if c.origin != followed {
		return 0
	}
	return max(time.Until(at), 0)
}

// readRecord reads the record.
func (c *Cluster) readRecord() (registry.RoleRecord, error) {
	ctx, cancel := context.WithTimeout(c.rt.ctx, registryTimeout)
	defer cancel()
	reg, err := c.rt.registry(ctx)
	if err != nil {
		return registry.RoleRecord{}, err
	}
	rec, err := reg.Read(ctx, c.Name())
	if err == nil && rec.Incarnation != c.to.Incarnation {
		return rec, bus.ErrNotFound
	}
	return rec, err
}

// applyRecord applies the record: another process may have replaced workers or resized the role.
func (c *Cluster) applyRecord(rec registry.RoleRecord) {
	c.mu.Lock()
	same := c.rec.Mesh == rec.Mesh
	c.rec = rec
	c.mu.Unlock()
	c.liveness.resize(max(rec.World, len(rec.Placements)))
	c.liveness.applyPlacements(rec.Placements)
	if !same {
		c.applyMesh(rec)
	}
}

// endedElsewhere handles the end of the role by another process.
func (c *Cluster) endedElsewhere(why, failed *bus.Error) {
	c.endAs(why, failed)
	c.failPending()
	if c.origin == opened || c.origin == followed {
		c.rt.spawn(c.releaseSoon)
	}
}

// releaseSoon releases an ended role when its workers have reported their end, or after a timeout.
func (c *Cluster) releaseSoon() {
	defer c.release()
	limit := time.NewTimer(closeTimeout)
	defer limit.Stop()
	for {
		left, changedCh := c.liveness.notOver(c.Record().AllRanks())
		if len(left) == 0 {
			return
		}
		select {
		case <-changedCh:
		case <-limit.C:
			return
		case <-c.rt.ctx.Done():
			return
		}
	}
}

// restartSeen is the last seen restart of another process, and when it was seen first.
type restartSeen struct {
	gen uint32
	at  time.Time
}

// failRestarted fails the pending calls to workers that a restart replaces, once per restart.
func (c *Cluster) failRestarted(rec registry.RoleRecord, seen *restartSeen) {
	r := rec.Restart
	if rec.State != registry.RoleRestarting || r == nil || r.Gen == seen.gen {
		return
	}
	*seen = restartSeen{r.Gen, time.Now()}
	c.holdSiblingCalls(r)
	for _, rank := range r.Ranks {
		c.rt.ep.Lost(c.to, rank, r.Gen-1, c.withRank(rank, r.CallError(rank)))
	}
}

// mayRestart reports whether this process starts a restart now. A driver does at once; the head gives a live driver a
// moment, and both take over a restart whose process is dead or too slow.
func (c *Cluster) mayRestart(rec registry.RoleRecord, seen *restartSeen, notBefore time.Time) bool {
	if c.origin != created && c.origin != followed || c.rt.currentLease() == nil || !rec.ReplacesWorkers() {
		return false
	}
	ctx, cancel := context.WithTimeout(c.rt.ctx, registryTimeout)
	defer cancel()
	reg, err := c.rt.registry(ctx)
	if err != nil {
		return false
	}
	if r := rec.Restart; rec.State == registry.RoleRestarting && r != nil && r.By != c.rt.ep.Session() {
		slow := time.Since(seen.at) > r.Limit
		return slow || !reg.DriverAlive(ctx, r.By) && c.rt.uptime.Remaining(rec.Lease) == 0
	}
	return !time.Now().Before(notBefore) || c.origin == followed && !reg.DriverAlive(ctx, rec.Owner)
}

// restart replaces the lost workers, or all. again: the record has changed and must be read again.
func (c *Cluster) restart(rec registry.RoleRecord, lost []loss, seen *restartSeen) (again bool, _ *bus.Error) {
	for _, l := range lost {
		if l.evicted { // the other workers of its node exit at the same time
			c.recovery.wait(c.rt.ctx, drainDelay, 0)
			lost = append(lost, c.recovery.take()...)
			break
		}
	}
	lost = c.withExits(rec, stillLost(rec, lost))
	first := loss{why: bus.Errorf(bus.CodeWorkerLost, "its restart was not completed")}
	if rec.Restart != nil && len(rec.Restart.Ranks) > 0 {
		first.rank, first.why = rec.Restart.Ranks[0], bus.Errorf(bus.CodeWorkerLost, "%s", rec.Restart.Why)
	}
	if len(lost) > 0 {
		first = lost[0]
	}
	fails := func(why error) *bus.Error {
		e := bus.Errorf(bus.CodeWorkerLost, "%s; rank %d could not be restarted: %w", first.why.Message, first.rank, why)
		e.Node, e.Stack, e.Details = first.why.Node, first.why.Stack, first.why.Details
		return e
	}
	params, err := c.loadStartParams(c.rt.ctx, rec)
	if bus.CodeOf(err) == bus.CodeRefused {
		if c.ownerAlive(rec) {
			return c.waitAndRetry(), nil // the owner restarts them, or its lease ends
		}
		return false, fails(err)
	}
	if err == nil {
		err = c.beginRestart(rec, lost, first, params, seen)
	}
	switch {
	case errors.Is(err, errTooManyRestarts):
		why := *first.why
		why.Message = fmt.Sprintf("%s (after %d restarts, the maximum)", why.Message, params.Restarts)
		return false, &why
	case err != nil: // the record has changed, or the write failed
		return c.waitAndRetry(), nil
	}
	err = c.performRestart(params, lost)
	switch {
	case err == nil || c.isOver() || c.rt.ctx.Err() != nil:
		return false, nil
	case errors.Is(err, errSuperseded) || c.recovery.waiting():
		return true, nil
	}
	return false, fails(err)
}

// withExits replaces guessed losses by the exits that agents know: a process that has just begun to monitor a role has
// missed them.
func (c *Cluster) withExits(rec registry.RoleRecord, lost []loss) []loss {
	out := slices.Clone(lost)
	for i, l := range out {
		if !l.guessed || l.rank >= len(rec.Placements) {
			continue
		}
		ctx, cancel := context.WithTimeout(c.rt.ctx, agentProbe)
		all, _ := c.rt.agents().Workers(ctx, rec.Placements[l.rank].Node) // a silent agent knows no exit
		cancel()
		id := rec.WorkerID(l.rank)
		if at := slices.IndexFunc(all, func(s nodes.Status) bool { return s.ID == id }); at >= 0 && all[at].Exit != nil {
			if told := lossOfExit(*all[at].Exit); told.failed {
				out[i] = told
			}
		}
	}
	return out
}

func (c *Cluster) waitAndRetry() bool {
	c.recovery.wait(c.rt.ctx, restartPoll/4, 0)
	return true
}

func (c *Cluster) ownerAlive(rec registry.RoleRecord) bool {
	ctx, cancel := context.WithTimeout(c.rt.ctx, registryTimeout)
	defer cancel()
	reg, err := c.rt.registry(ctx)
	return err != nil || reg.DriverAlive(ctx, rec.Owner)
}

// beginRestart writes into the record that this process restarts the ranks. The first writer wins.
func (c *Cluster) beginRestart(rec registry.RoleRecord, lost []loss, first loss, params *startParams, seen *restartSeen) error {
	avoid := c.nodesToAvoid(rec, lost)
	counts := slices.ContainsFunc(lost, func(l loss) bool { return !l.evicted })
	before := uint32(0)
	if rec.Restart != nil {
		before = rec.Restart.Gen
	}
	ctx, cancel := context.WithTimeout(c.rt.ctx, 2*registryTimeout)
	defer cancel()
	err := c.alter(ctx, func(r *registry.RoleRecord) error {
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
			if r.Restarts++; r.Restarts > params.Restarts {
				return errTooManyRestarts
			}
			n = r.Restarts
		}
		r.Generations++
		for _, rank := range ranks {
			r.Replaced = append(r.Replaced, registry.ReplacedWorker{Node: r.Placements[rank].Node, Rank: rank, Gen: r.Placements[rank].Gen})
			r.Placements[rank].Gen = r.Generations
		}
		pause := params.restartProcess().pause(n)
		r.State, r.Since = registry.RoleRestarting, time.Now().UTC()
		r.Restart = &registry.Restart{
			Ranks: ranks, Gen: r.Generations, N: n, Of: params.Restarts, Why: first.why.Message, Avoid: avoid, By: c.rt.ep.Session(),
			Limit: pause + params.StartTimeout + restartMargin,
		}
		return nil
	})
	if err == nil {
		*seen = restartSeen{c.Record().Restart.Gen, time.Now()}
	}
	return err
}

// nodesToAvoid is the nodes on which lost workers cannot be started again: those they were evicted from, and those that
// placement counts as lost.
func (c *Cluster) nodesToAvoid(rec registry.RoleRecord, lost []loss) []string {
	var out []string
	for _, l := range lost {
		if l.evicted {
			out = union(out, []string{rec.Placements[l.rank].Node})
		}
	}
	client, err := c.rt.placement()
	if err != nil {
		return out
	}
	ctx, cancel := context.WithTimeout(c.rt.ctx, registryTimeout)
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
func (c *Cluster) performRestart(params *startParams, lost []loss) (err error) {
	rec := c.Record()
	r := rec.Restart
	end := c.recordRestart(r)
	defer func() { end(err) }()
	for _, rank := range r.Ranks {
		c.liveness.expect(rank, rec.Placements[rank].Gen) // later messages of the old workers are of another generation
	}
	c.holdRestarting(rec, nil)
	c.announceRestart(r, stateRestarting)
	then := "the rank is " + r.Outcome()
	if rec.Policy == RestartRole {
		then = "the role is " + r.Outcome()
	}
	for _, l := range lost {
		c.reportFailure(l, then)
	}
	c.emit(eventRestart, nil, "", fmt.Sprintf("ranks %v, %s: %s", r.Ranks, r.Progress(), r.Why))
	c.holdSiblingCalls(r)
	if rec.Policy == RestartRole {
		c.failOthers(r)
	}
	if r.N > 0 {
		select {
		case <-c.rt.ctx.Done():
			return nil
		case <-time.After(params.restartProcess().pause(r.N)):
		}
	}
	ctx, cancel := context.WithTimeout(c.rt.ctx, params.StartTimeout)
	defer cancel()
	err = c.replace(ctx, params)
	if err == nil {
		err = c.finishRestart(ctx, r.Gen)
	}
	if err == nil {
		c.announceRestart(r, stateRestarted)
		c.emit(eventRole, nil, "", fmt.Sprintf("ranks %v run again, %s", r.Ranks, r.Outcome()))
		c.holdRestarting(c.Record(), nil)
	} else if rec, lookErr := c.readRecord(); lookErr == nil && (rec.Restart == nil || rec.Restart.Gen != r.Gen) {
		err = errSuperseded
	}
	return err
}

// failOthers fails all calls of a role that is restarted because of one rank.
func (c *Cluster) failOthers(r *registry.Restart) {
	because := bus.Errorf(bus.CodeWorkerLost, "the role is restarted: %s", r.Why)
	for rank := range c.WorldSize() {
		c.rt.ep.Lost(c.to, rank, r.Gen-1, because)
	}
}

// replace kills the old processes of the ranks and starts new ones, on the same nodes or on others.
func (c *Cluster) replace(ctx context.Context, params *startParams) error {
	if err := c.makeProgram(ctx); err != nil {
		return err
	}
	if err := c.killReplaced(ctx); err != nil {
		return err
	}
	if err := c.move(ctx, params); err != nil {
		return err
	}
	rec := c.Record()
	ranks := rec.Restart.Ranks
	if err := c.launch(ctx, ranks, rec); err != nil {
		return err
	}
	if err := c.awaitReady(ctx, ranks); err != nil {
		return err
	}
	if err := c.barrier(ctx, ranks); err != nil {
		return err
	}
	if err := c.replay(ctx, ranks); err != nil {
		return err
	}
	c.liveness.expectAll()
	return nil
}

// finishRestart makes the role ready again, and releases reservations that no rank uses.
func (c *Cluster) finishRestart(ctx context.Context, gen uint32) error {
	var unused []registry.ReservationRef
	err := c.alter(ctx, func(r *registry.RoleRecord) error {
		if r.State != registry.RoleRestarting || r.Restart == nil || r.Restart.Gen != gen {
			return errSuperseded
		}
		unused = r.DropUnusedReservations()
		r.State, r.Since, r.Restart, r.Replaced = registry.RoleReady, time.Now().UTC(), nil, nil
		return nil
	})
	if err != nil || len(unused) == 0 {
		return err
	}
	client, err := c.rt.placement()
	if err == nil {
		err = release(ctx, client, unused)
	}
	if err != nil { // the id belongs to the role: destroying the role releases it
		c.rt.log.Warn("roles: releasing an unused reservation failed; it is released with the role", "role", c.Name(), "error", err)
	}
	return nil
}

// announceRestart tells other clusters of the role that its record has changed. A lost message is compensated by their periodic
// reading.
func (c *Cluster) announceRestart(r *registry.Restart, state actors.State) {
	beats := make([]actors.Heartbeat, len(r.Ranks))
	for i, rank := range r.Ranks {
		beats[i] = actors.Heartbeat{Rank: rank, Gen: r.Gen, State: state}
	}
	body, err := wire.Marshal(beats)
	if err == nil {
		err = c.rt.ep.Send(c.to.Life(), &wire.Frame{Kind: wire.KindBeat, Header: wire.Header{Session: c.rt.ep.Session()}, Body: body})
	}
	if err != nil {
		c.rt.log.Debug("roles: announcing a restart failed", "role", c.Name(), "error", err)
	}
}

// union is the elements of both, sorted, without duplicates.
func union[T int | string](a, b []T) []T {
	out := append(slices.Clone(a), b...)
	slices.Sort(out)
	return slices.Compact(out)
}
