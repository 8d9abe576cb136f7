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
)

const (
	driverFirst   = 2 * time.Second        // for a driver that lives to begin a restart, before the head does
	restartLook   = 2 * time.Second        // how often the registry is looked at during a restart that another process carries out
	restartMargin = 30 * time.Second       // how much longer than planned a restart may take, before another process takes it over
	drainSpread   = 200 * time.Millisecond // for the exits of a drained node's workers to arrive together
	noteFinished  = actors.State("restarted")
	noteBegun     = actors.State("restarting")
)

// Restart is a restart that is under way: it is in the role's record while the state is restarting. Exactly one process
// carries it out, the one whose session is By; it writes that by compare-and-set before it does anything. When that process
// is gone, or takes longer than Limit, another may replace it, with a new generation.
type Restart struct {
	Ranks []int         `json:"ranks"`
	Gen   uint32        `json:"gen"`             // of the workers that are being started
	N     int           `json:"n"`               // how many restarts there have been, with this one
	Of    int           `json:"of"`              // how many there may be
	Why   string        `json:"why"`             // what was lost
	Avoid []string      `json:"avoid,omitempty"` // nodes that the ranks are moved away from: drained, or lost
	By    string        `json:"by"`              // session of the process that carries it out
	Limit time.Duration `json:"limit"`           // how long it may take
}

// Former is a worker process that was replaced.
type Former struct {
	Node string `json:"node"`
	Rank int    `json:"rank"`
	Gen  uint32 `json:"gen"`
}

var (
	errRoleEnded   = errors.New("the role is being taken down, or has failed")
	errReplaced    = errors.New("its workers have been replaced")
	errElsewhere   = errors.New("another process restarts it")
	errDeposed     = errors.New("another process has taken the restart over")
	errNoneAllowed = errors.New("no more restarts are allowed")
)

// Restarting are the ranks whose calls wait because their workers were lost and are being replaced, as far as this process
// knows: a moment before the record says so, and as long as nobody has begun to replace them.
func (c *Cluster) Restarting() []int {
	away, _ := c.gate.Away()
	return away
}

// WaitReady returns when every rank of the role takes calls, or why that will not be: the role has failed or been taken
// down, or ctx has ended.
func (c *Cluster) WaitReady(ctx context.Context) error {
	if c.Record().restarts() && c.tie != created { // a restart may not have been heard of
		if rec, ok := c.reread(); ok && rec.State == RoleRestarting {
			c.restartNews()
			c.holdFor(rec, nil)
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

// alter changes one incarnation's record by compare-and-set, whatever its state; change may refuse.
func (g registry) alter(ctx context.Context, r Record, change func(*Record) error) (Record, error) {
	for {
		held, rev, err := g.read(ctx, r.Name)
		if err == nil && held.Incarnation != r.Incarnation {
			err = bus.Errorf(bus.CodeNotFound, "this role %s has ended; there is another", r.Name)
		}
		if err == nil {
			err = change(&held)
		}
		if err != nil {
			return held, err
		}
		value, err := encodeRecord(held)
		if err != nil {
			return r, err
		}
		if _, err = g.kv.Update(ctx, g.key(roleKey(r.Name)), value, rev); !errors.Is(err, bus.ErrConflict) {
			return held, err
		}
	}
}

// alter changes the role's record, whatever its state.
func (c *Cluster) alter(ctx context.Context, change func(*Record) error) error {
	reg, err := c.rt.registry(ctx)
	if err != nil {
		return err
	}
	rec, err := reg.alter(ctx, c.Record(), change)
	if err == nil {
		c.setRecord(rec)
	}
	return err
}

func (c *Cluster) setRecord(rec Record) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rec = rec
}

// hold notes a loss, and keeps back the calls to ranks that are about to be restarted, as far as the role's policy says which
// they are.
func (c *Cluster) hold(l loss) {
	c.mending.gateMu.Lock()
	defer c.mending.gateMu.Unlock()
	c.mending.add(l)
	ranks := []int{l.rank}
	if c.Record().Policy == RestartRole {
		ranks = c.Record().allRanks()
	}
	c.gate.Hold(ranks, func(rank int) *bus.Error {
		return c.away(rank, bus.Errorf(bus.CodeWorkerLost, "rank %d is restarting: %s", rank, l.why.Message).WithCause(l.why))
	})
}

// siblings are the other clusters that this runtime has of the role: one it is attached to, and one it watches over. A call
// fails in all of them at once, because they share an endpoint; so its next one must find the gate closed in all of them.
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

// holdSiblings keeps back the calls of the siblings to the ranks of a restart, until they have looked at the record.
func (c *Cluster) holdSiblings(r *Restart) {
	for _, s := range c.siblings() {
		s.gate.Hold(r.Ranks, func(rank int) *bus.Error { return s.away(rank, r.why(rank)) })
		s.restartNews()
	}
}

// why is what a call is told whose rank is away.
func (r *Restart) why(rank int) *bus.Error {
	return bus.Errorf(bus.CodeWorkerLost, "rank %d is %s: %s", rank, r.doing(), r.Why)
}

// away is what a call is told that does not wait for a rank.
func (c *Cluster) away(rank int, e *bus.Error) *bus.Error {
	e.Role, e.Rank = c.Name(), rank
	return e
}

// holdFor keeps back the calls to the ranks that the record says are restarting and to those that are lost and not yet
// replaced, and lets those to the others go.
func (c *Cluster) holdFor(rec Record, lost []loss) {
	c.mending.gateMu.Lock()
	defer c.mending.gateMu.Unlock()
	var away []int
	for _, l := range stillLost(rec, append(slices.Clone(lost), c.mending.pending()...)) {
		away = append(away, l.rank)
		if rec.Policy == RestartRole {
			away = union(away, rec.allRanks())
		}
	}
	if r := rec.Restart; rec.State == RoleRestarting && r != nil {
		c.gate.Hold(r.Ranks, func(rank int) *bus.Error {
			return c.away(rank, r.why(rank))
		})
		away = append(away, r.Ranks...)
	}
	c.gate.Release(away)
}

// doing is what happens to a rank, in words.
func (r *Restart) doing() string {
	if r.N == 0 {
		return "moved to another node"
	}
	return fmt.Sprintf("restarting (%d of %d)", r.N, r.Of)
}

// done is the same of one that is over, or about to be.
func (r *Restart) done() string {
	if r.N == 0 {
		return "moved to another node"
	}
	return fmt.Sprintf("restarted (%d of %d)", r.N, r.Of)
}

// stillLost are the losses whose rank has not got another worker.
func stillLost(rec Record, lost []loss) []loss {
	return slices.DeleteFunc(slices.Clone(lost), func(l loss) bool {
		return l.rank >= rec.World || l.rank < len(rec.Seats) && rec.Seats[l.rank].Gen > l.gen
	})
}

// restartNews has the registry looked at: a restart has begun or ended elsewhere.
func (c *Cluster) restartNews() {
	m := &c.mending
	m.mu.Lock()
	m.news = true
	if !m.running {
		m.running = c.rt.spawn(c.mendAll)
	}
	m.mu.Unlock()
	m.wake()
}

// recover returns when the ranks that were lost have other workers, or the role has ended: it restarts them itself, or waits
// for whoever does. Its error is why the role fails.
func (c *Cluster) recover(lost []loss) *bus.Error {
	begun, seen := time.Now(), restartSeen{}
	first := driverFirst
	if c.tie == created {
		first = 0
	}
	for {
		lost = append(lost, c.mending.take()...)
		rec, err := c.look()
		switch {
		case c.isOver() || c.rt.ctx.Err() != nil:
			return nil
		case errors.Is(err, bus.ErrNotFound) || err == nil && rec.State == RoleStopping:
			c.overElsewhere(c.takenDown(), nil)
			return nil
		case err != nil: // it cannot be reached; later
		case rec.State == RoleFailed:
			c.overElsewhere(rec.failure(), rec.failure())
			return nil
		default:
			c.adopt(rec)
			c.holdFor(rec, lost)
			c.failRestarted(rec, &seen)
			if rec.State == RoleReady && len(stillLost(rec, lost)) == 0 {
				c.life.expectAll()
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
		c.mending.await(c.rt.ctx, restartLook/2+rand.N(restartLook/2), c.waitFirst(begun.Add(first)))
	}
}

// waitFirst is how long the driver still has to begin a restart; zero: as long as it wants.
func (c *Cluster) waitFirst(at time.Time) time.Duration {
	if c.tie != followed {
		return 0
	}
	return max(time.Until(at), 0)
}

// look reads the record.
func (c *Cluster) look() (Record, error) {
	ctx, cancel := context.WithTimeout(c.rt.ctx, registryActs)
	defer cancel()
	reg, err := c.rt.registry(ctx)
	if err != nil {
		return Record{}, err
	}
	rec, _, err := reg.read(ctx, c.Name())
	if err == nil && rec.Incarnation != c.to.Incarnation {
		return rec, bus.ErrNotFound
	}
	return rec, err
}

// adopt takes the record in: another process may have replaced workers or changed the role's size.
func (c *Cluster) adopt(rec Record) {
	c.mu.Lock()
	same := c.rec.Mesh == rec.Mesh
	c.rec = rec
	c.mu.Unlock()
	c.life.makeRoom(max(rec.World, len(rec.Seats)))
	c.life.adopt(rec.Seats)
	if !same {
		c.takeShape(rec)
	}
}

// failure is why calls to a role that has failed cannot be made.
func (r Record) failure() *bus.Error {
	return bus.Errorf(bus.CodeWorkerLost, "role %s has failed, at %s: %s", r.Name, r.Since.Format(time.RFC3339), r.Cause)
}

// overElsewhere takes in that the role has ended.
func (c *Cluster) overElsewhere(why, failed *bus.Error) {
	c.endAs(why, failed)
	c.failPending()
	if c.tie == opened || c.tie == followed {
		c.rt.spawn(c.releaseSoon)
	}
}

// releaseSoon lets go of a role that has ended, when its workers have said their last words or had time to.
func (c *Cluster) releaseSoon() {
	defer c.release()
	limit := time.NewTimer(lastActs)
	defer limit.Stop()
	for {
		left, changedCh := c.life.notOver(c.Record().allRanks())
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

// restartSeen is the restart of another process that was last seen, and since when.
type restartSeen struct {
	gen uint32
	at  time.Time
}

// failRestarted fails the calls that were under way to workers which a restart replaces, once for each restart.
func (c *Cluster) failRestarted(rec Record, seen *restartSeen) {
	r := rec.Restart
	if rec.State != RoleRestarting || r == nil || r.Gen == seen.gen {
		return
	}
	*seen = restartSeen{r.Gen, time.Now()}
	c.holdSiblings(r)
	for _, rank := range r.Ranks {
		c.rt.ep.Lost(c.to, rank, r.Gen-1, c.away(rank, r.why(rank)))
	}
}

// mayRestart reports whether this process is to restart what is lost, now. A driver does at once; the head gives a driver
// that lives a moment to do so, and both take a restart over whose process is gone or too slow.
func (c *Cluster) mayRestart(rec Record, seen *restartSeen, notBefore time.Time) bool {
	if c.tie != created && c.tie != followed || c.rt.currentLease() == nil || !rec.restarts() {
		return false
	}
	ctx, cancel := context.WithTimeout(c.rt.ctx, registryActs)
	defer cancel()
	reg, err := c.rt.registry(ctx)
	if err != nil {
		return false
	}
	if r := rec.Restart; rec.State == RoleRestarting && r != nil && r.By != c.rt.ep.Session() {
		slow := time.Since(seen.at) > r.Limit
		return slow || !reg.alive(ctx, r.By) && c.rt.reach.missing(rec.Lease) == 0
	}
	return !time.Now().Before(notBefore) || c.tie == followed && !reg.alive(ctx, rec.Owner)
}

// restart puts new workers in the place of those that were lost, or of all. It reports true if the record has changed
// meanwhile and is to be looked at again.
func (c *Cluster) restart(rec Record, lost []loss, seen *restartSeen) (again bool, _ *bus.Error) {
	for _, l := range lost {
		if l.evicted { // the others of its node end at the same moment
			c.mending.await(c.rt.ctx, drainSpread, 0)
			lost = append(lost, c.mending.take()...)
			break
		}
	}
	lost = c.explained(rec, stillLost(rec, lost))
	first := loss{why: bus.Errorf(bus.CodeWorkerLost, "its restart was not finished")}
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
	recipe, err := c.startedWith(c.rt.ctx, rec)
	if bus.CodeOf(err) == bus.CodeRefused {
		if c.ownerLives(rec) {
			return c.sleepABit(), nil // it restarts them, or its lease ends
		}
		return false, fails(err)
	}
	if err == nil {
		err = c.beginRestart(rec, lost, first, recipe, seen)
	}
	switch {
	case errors.Is(err, errNoneAllowed):
		why := *first.why
		why.Message = fmt.Sprintf("%s (after %d restarts, and no more are allowed)", why.Message, recipe.Restarts)
		return false, &why
	case err != nil: // the record has changed, or cannot be written
		return c.sleepABit(), nil
	}
	err = c.carryOut(recipe, lost)
	switch {
	case err == nil || c.isOver() || c.rt.ctx.Err() != nil:
		return false, nil
	case errors.Is(err, errDeposed) || c.mending.waiting():
		return true, nil
	}
	return false, fails(err)
}

// explained is losses with what the agents know of those that were only guessed: a process that has just begun to follow a
// role has not heard how its workers ended.
func (c *Cluster) explained(rec Record, lost []loss) []loss {
	out := slices.Clone(lost)
	for i, l := range out {
		if !l.guessed || l.rank >= len(rec.Seats) {
			continue
		}
		ctx, cancel := context.WithTimeout(c.rt.ctx, agentThere)
		all, _ := c.rt.agents().Workers(ctx, rec.Seats[l.rank].Node) // an agent that is silent knows no more
		cancel()
		id := rec.workerID(l.rank)
		if at := slices.IndexFunc(all, func(s nodes.Status) bool { return s.ID == id }); at >= 0 && all[at].Exit != nil {
			if told := lossOfExit(*all[at].Exit); told.failed {
				out[i] = told
			}
		}
	}
	return out
}

func (c *Cluster) sleepABit() bool {
	c.mending.await(c.rt.ctx, restartLook/4, 0)
	return true
}

func (c *Cluster) ownerLives(rec Record) bool {
	ctx, cancel := context.WithTimeout(c.rt.ctx, registryActs)
	defer cancel()
	reg, err := c.rt.registry(ctx)
	return err != nil || reg.alive(ctx, rec.Owner)
}

// beginRestart writes into the record that this process restarts the ranks. Whoever wrote it first does.
func (c *Cluster) beginRestart(rec Record, lost []loss, first loss, recipe *recipe, seen *restartSeen) error {
	avoid := c.unusable(rec, lost)
	counts := slices.ContainsFunc(lost, func(l loss) bool { return !l.evicted })
	before := uint32(0)
	if rec.Restart != nil {
		before = rec.Restart.Gen
	}
	ctx, cancel := context.WithTimeout(c.rt.ctx, 2*registryActs)
	defer cancel()
	err := c.alter(ctx, func(r *Record) error {
		ranks, n := ranksOf(stillLost(*r, lost)), 0
		if r.Policy == RestartRole && len(ranks) > 0 {
			ranks = r.allRanks()
		}
		switch old := r.Restart; {
		case r.State != RoleReady && r.State != RoleRestarting:
			return errRoleEnded
		case r.State == RoleRestarting && old != nil && old.Gen != before:
			return errElsewhere
		case r.State == RoleRestarting && old != nil:
			ranks, avoid, n = union(ranks, old.Ranks), union(avoid, old.Avoid), old.N
		}
		if len(ranks) == 0 {
			return errReplaced
		}
		if counts {
			if r.Restarts++; r.Restarts > recipe.Restarts {
				return errNoneAllowed
			}
			n = r.Restarts
		}
		r.Gens++
		for _, rank := range ranks {
			r.Former = append(r.Former, Former{r.Seats[rank].Node, rank, r.Seats[rank].Gen})
			r.Seats[rank].Gen = r.Gens
		}
		pause := recipe.process().pause(n)
		r.State, r.Since = RoleRestarting, time.Now().UTC()
		r.Restart = &Restart{
			Ranks: ranks, Gen: r.Gens, N: n, Of: recipe.Restarts, Why: first.why.Message, Avoid: avoid, By: c.rt.ep.Session(),
			Limit: pause + recipe.StartTimeout + restartMargin,
		}
		return nil
	})
	if err == nil {
		*seen = restartSeen{c.Record().Restart.Gen, time.Now()}
	}
	return err
}

// unusable are the nodes that lost workers cannot be started on again: those they were evicted from, and those that
// placement counts as lost.
func (c *Cluster) unusable(rec Record, lost []loss) []string {
	var out []string
	for _, l := range lost {
		if l.evicted {
			out = union(out, []string{rec.Seats[l.rank].Node})
		}
	}
	client, err := c.rt.placement()
	if err != nil {
		return out
	}
	ctx, cancel := context.WithTimeout(c.rt.ctx, registryActs)
	defer cancel()
	all, err := client.Nodes(ctx)
	if err != nil {
		return out // the launch says what is wrong
	}
	for _, seat := range rec.Seats {
		if nodeGone(all, seat.Node) {
			out = union(out, []string{seat.Node})
		}
	}
	return out
}

// nodeGone reports whether the placement service counts a node as lost: it is not there, or its lease has ended.
func nodeGone(all []placement.NodeStatus, node string) bool {
	i := slices.IndexFunc(all, func(n placement.NodeStatus) bool { return n.Report.Node == node })
	return i < 0 || all[i].Rank < 0 || all[i].State != placement.NodeReady && all[i].Report.Session == ""
}

// carryOut does what the record says this process does.
func (c *Cluster) carryOut(recipe *recipe, lost []loss) error {
	rec := c.Record()
	r := rec.Restart
	for _, rank := range r.Ranks {
		c.life.renew(rank, rec.Seats[rank].Gen) // what the old ones say from now on is of another generation
	}
	c.holdFor(rec, nil)
	c.note(r, noteBegun)
	then := "the rank is " + r.done()
	if rec.Policy == RestartRole {
		then = "the role is " + r.done()
	}
	for _, l := range lost {
		c.tell(l, then)
	}
	c.emit(eventRestart, nil, "", fmt.Sprintf("ranks %v, %s: %s", r.Ranks, r.doing(), r.Why))
	c.holdSiblings(r)
	if rec.Policy == RestartRole {
		c.failOthers(r)
	}
	if r.N > 0 {
		select {
		case <-c.rt.ctx.Done():
			return nil
		case <-time.After(recipe.process().pause(r.N)):
		}
	}
	ctx, cancel := context.WithTimeout(c.rt.ctx, recipe.StartTimeout)
	defer cancel()
	err := c.replace(ctx, recipe)
	if err == nil {
		err = c.finishRestart(ctx, r.Gen)
	}
	if err == nil {
		c.note(r, noteFinished)
		c.emit(eventRole, nil, "", fmt.Sprintf("ranks %v run again, %s", r.Ranks, r.done()))
		c.holdFor(c.Record(), nil)
	} else if rec, lookErr := c.look(); lookErr == nil && (rec.Restart == nil || rec.Restart.Gen != r.Gen) {
		err = errDeposed
	}
	return err
}

// failOthers fails the calls of a role that is restarted because of one of its ranks.
func (c *Cluster) failOthers(r *Restart) {
	because := bus.Errorf(bus.CodeWorkerLost, "the role is restarted: %s", r.Why)
	for rank := range c.WorldSize() {
		c.rt.ep.Lost(c.to, rank, r.Gen-1, because)
	}
}

// replace ends what is left of the ranks' processes and starts others, on the same seats or on those they are moved to.
func (c *Cluster) replace(ctx context.Context, recipe *recipe) error {
	if err := c.makeProgram(ctx); err != nil {
		return err
	}
	if err := c.endFormer(ctx); err != nil {
		return err
	}
	if err := c.move(ctx, recipe); err != nil {
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
	c.life.expectAll()
	return nil
}

// finishRestart makes the role ready again, and gives back what none of its workers is on any more.
func (c *Cluster) finishRestart(ctx context.Context, gen uint32) error {
	var unused []Held
	err := c.alter(ctx, func(r *Record) error {
		if r.State != RoleRestarting || r.Restart == nil || r.Restart.Gen != gen {
			return errDeposed
		}
		unused = r.dropUnused()
		r.State, r.Since, r.Restart, r.Former = RoleReady, time.Now().UTC(), nil, nil
		return nil
	})
	if err != nil || len(unused) == 0 {
		return err
	}
	client, err := c.rt.placement()
	if err == nil {
		err = release(ctx, client, unused)
	}
	if err != nil { // its id is the role's, so whoever takes the role down finds it
		c.rt.log.Warn("roles: a reservation that a role has left was not given back; it goes with the role", "role", c.Name(), "error", err)
	}
	return nil
}

// dropUnused takes the reservations off the record that no seat is on.
func (r *Record) dropUnused() (unused []Held) {
	var kept []Held
	place := map[int]int{}
	for i, h := range r.Held {
		if slices.ContainsFunc(r.Seats, func(s Seat) bool { return s.Held == i }) {
			place[i] = len(kept)
			kept = append(kept, h)
		} else {
			unused = append(unused, h)
		}
	}
	for i := range r.Seats {
		r.Seats[i].Held = place[r.Seats[i].Held]
	}
	r.Held = kept
	return unused
}

// note tells those who follow the role that its record has changed. One that is lost is made up for by their looking now
// and then.
func (c *Cluster) note(r *Restart, state actors.State) {
	beats := make([]actors.Heartbeat, len(r.Ranks))
	for i, rank := range r.Ranks {
		beats[i] = actors.Heartbeat{Rank: rank, Gen: r.Gen, State: state}
	}
	body, err := wire.Marshal(beats)
	if err == nil {
		err = c.rt.ep.Send(c.to.Life(), &wire.Frame{Kind: wire.KindBeat, Header: wire.Header{Session: c.rt.ep.Session()}, Body: body})
	}
	if err != nil {
		c.rt.log.Debug("roles: a restart is not told", "role", c.Name(), "error", err)
	}
}

// union is the elements of both, sorted, each once.
func union[T int | string](a, b []T) []T {
	out := append(slices.Clone(a), b...)
	slices.Sort(out)
	return slices.Compact(out)
}
