package roles

import (
	"context"
	"errors"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/nodes"
	"troupe/placement"
)

const (
	killGrace   = 2 * time.Second         // for a process that was told to end, before it is made to
	agentThere  = 1500 * time.Millisecond // for an agent to show that it is there
	agentAnswer = 5 * time.Second         // what an agent may take to see its processes end, beyond the grace
	lookEvery   = 3 * time.Second         // for the agents of workers that are not ready yet
	releaseActs = 5 * time.Second         // and the placement service to take a reservation back
)

// services are what a runtime asks when workers are processes on nodes. They are made when they are first needed.
type services struct {
	mu        sync.Mutex
	agents    *nodes.Client
	placement *placement.Client
}

func (rt *Runtime) agents() *nodes.Client {
	rt.services.mu.Lock()
	defer rt.services.mu.Unlock()
	if rt.services.agents == nil {
		rt.services.agents = nodes.NewClient(rt.bus)
	}
	return rt.services.agents
}

func (rt *Runtime) placement() (*placement.Client, error) {
	rt.services.mu.Lock()
	defer rt.services.mu.Unlock()
	if rt.services.placement == nil {
		client, err := placement.NewClient(rt.bus, rt.cfg.Namespace)
		if err != nil {
			return nil, err
		}
		rt.services.placement = client
	}
	return rt.services.placement, nil
}

// used reports whether something may be held.
func (s *services) used() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.placement != nil
}

func (s *services) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.placement != nil {
		s.placement.Close()
	}
}

// startProcesses takes a role from its name to processes that are ready: reservation, seats, a port for rank 0, launch.
// Each step is in the registry before the next, so that whoever has to take the role down finds all of it.
func (c *Cluster) startProcesses(ctx context.Context, config wire.Raw) error {
	if err := c.reserve(ctx); err != nil {
		return err
	}
	if err := c.meetAt(ctx); err != nil {
		return err
	}
	if err := c.makeProgram(ctx); err != nil {
		return err
	}
	if err := c.keepRecipe(ctx, config); err != nil {
		return err
	}
	if err := c.showOutput(); err != nil {
		return err
	}
	rec := c.Record()
	all := rec.allRanks()
	if err := c.launch(ctx, all, rec); err != nil {
		return err
	}
	return c.awaitReady(ctx, all)
}

// reserve holds what the workers need.
func (c *Cluster) reserve(ctx context.Context) error {
	client, err := c.rt.placement()
	if err != nil {
		return err
	}
	request := c.spec.Process.request(c.Record())
	if over := c.spec.Process.Over; over != "" {
		if request.Colocate, err = c.reservationOf(ctx, over); err != nil {
			return err
		}
	}
	instances, err := request.Instances()
	if err != nil {
		return bus.Errorf(bus.CodeOf(err), "role %s: %w", c.Name(), err)
	}
	var seats []Seat
	for i, one := range instances {
		got, err := c.reserveAs(ctx, client, one)
		if err != nil {
			return err
		}
		for _, seat := range seatsOf(c.Name(), got.Workers) {
			seat.Held = i
			seats = append(seats, seat)
		}
		if err := c.edit(ctx, func(r *Record) { r.Held = append(r.Held, Held{ID: got.ID, Token: got.Token, Over: got.SharesWith}) }); err != nil {
			return err
		}
	}
	return c.edit(ctx, func(r *Record) { r.Seats, r.Policy = seats, c.spec.Process.Policy })
}

func (c *Cluster) reserveAs(ctx context.Context, client *placement.Client, request placement.Request) (placement.Record, error) {
	ctx, cancel := context.WithTimeout(ctx, c.spec.Process.PlaceTimeout)
	defer cancel()
	got, err := client.Reserve(ctx, request)
	if err != nil {
		return got, bus.Errorf(bus.CodeOf(err), "role %s: %w", c.Name(), err)
	}
	return got, nil
}

// reservationOf is the reservation of another role, to be laid over.
func (c *Cluster) reservationOf(ctx context.Context, role string) (string, error) {
	reg, err := c.rt.registry(ctx)
	if err != nil {
		return "", err
	}
	rec, err := reg.get(ctx, role)
	if err == nil && len(rec.Held) == 0 {
		err = bus.Errorf(bus.CodeInvalid, "role %s runs in its driver's process and holds no devices", role)
	}
	if err != nil {
		return "", bus.Errorf(bus.CodeOf(err), "role %s, which is to lie over %s: %w", c.Name(), role, err)
	}
	return rec.Held[0].ID, nil
}

// meetAt finds an address for rank 0 that the others can reach, and a port that nobody else gets.
func (c *Cluster) meetAt(ctx context.Context) error {
	rec := c.Record()
	host, ports, err := c.rt.agents().Ports(ctx, rec.Seats[0].Node, rec.workerID(0), 1)
	if err != nil {
		return bus.Errorf(bus.CodeOf(err), "role %s: a port for rank 0: %w", c.Name(), err)
	}
	return c.edit(ctx, func(r *Record) { r.Master = net.JoinHostPort(host, strconv.Itoa(ports[0])) })
}

// makeProgram is what the processes are started with. A folder that is shipped is stored for a day; so it is shipped
// again, which costs nothing while it is there, before workers are restarted.
func (c *Cluster) makeProgram(ctx context.Context) error {
	p := c.spec.Process
	if p == nil { // it was not created here: what was shipped is at the head, or it is not
		return nil
	}
	program := nodes.Program{Command: p.Command, Dir: p.Dir, Env: p.Env, Visible: p.Visible}
	if p.Ship != "" {
		hash, err := c.rt.agents().Ship(ctx, p.Ship, p.Exclude...)
		if err != nil {
			return bus.Errorf(bus.CodeOf(err), "role %s: %w", c.Name(), err)
		}
		program.Folder = hash
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.program = program
	return nil
}

// launch starts the processes of some ranks, on all their nodes at once. The first that cannot be started is the error.
func (c *Cluster) launch(ctx context.Context, ranks []int, rec Record) error {
	around := rec.surroundings()
	order, groups := rec.berths(ranks)
	errs := make([]error, len(order))
	var group sync.WaitGroup
	for i, at := range order {
		group.Go(bus.Guard(func() { errs[i] = c.launchOn(ctx, at, groups[at], rec, around) }))
	}
	group.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *Cluster) launchOn(ctx context.Context, at berth, ranks []int, rec Record, around surroundings) error {
	node, held := at.node, rec.Held[at.held]
	recipe, err := c.startedWith(ctx, rec)
	if err != nil {
		return err
	}
	c.mu.Lock()
	program := c.program
	c.mu.Unlock()
	order := nodes.Launch{Node: node, Reservation: held.ID, Token: held.Token, Over: held.Over, Program: program}
	for _, rank := range ranks {
		assignment, err := wire.Marshal(recipe.assignment(rec, rank))
		if err != nil {
			return bus.Errorf(bus.CodeInternal, "role %s: the assignment of rank %d: %w", c.Name(), rank, err)
		}
		order.Workers = append(order.Workers, nodes.Start{
			ID: rec.workerID(rank), Name: rec.Seats[rank].Name, Env: around.environment(rank, recipe.LateRendezvous),
			Devices: rec.Seats[rank].UUIDs, Share: rec.Seats[rank].Share, Assignment: assignment,
		})
	}
	started, err := c.rt.agents().Launch(ctx, order)
	if err != nil {
		return bus.Errorf(bus.CodeOf(err), "role %s: start rank %d on node %s: %w", c.Name(), ranks[0], node, err)
	}
	for _, s := range started {
		if s.Err != nil {
			e := *s.Err
			e.Role, e.Rank, e.Node = c.Name(), s.ID.Rank, node
			return &e
		}
	}
	return nil
}

func (r *recipe) assignment(rec Record, rank int) Assignment {
	return Assignment{
		Namespace: rec.Namespace, Role: rec.Name, Incarnation: rec.Incarnation, Class: rec.Class, Rank: rank, World: rec.World,
		Gen: rec.Seats[rank].Gen, Mesh: rec.Mesh, Config: r.Config, Ordered: rec.Ordered, QueueLimit: r.QueueLimit,
		PanicFails: r.PanicFails, Devices: rec.Seats[rank].UUIDs,
	}
}

// awaitReady returns when the ranks have said that they are ready, or one is known not to become it. Its agent says when
// a process ends; that the agent itself is still there is looked at now and then.
func (c *Cluster) awaitReady(ctx context.Context, ranks []int) error {
	rec, begun := c.Record(), time.Now()
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for {
		states, changedCh := c.life.states()
		var missing []int
		for _, rank := range ranks {
			b := states[rank]
			switch {
			case b.Gen != rec.Seats[rank].Gen || b.State != actors.Ready && !b.State.Over():
				missing = append(missing, rank)
			case b.State.Over():
				return c.life.lossOf(rank)
			}
		}
		if len(missing) == 0 {
			return nil
		}
		select {
		case <-changedCh:
		case <-look.C:
			if err := c.agentsThere(ctx, missing, rec); err != nil {
				return err
			}
		case <-ctx.Done():
			return bus.Errorf(bus.CodeOf(ctx.Err()), "role %s had not started after %s: %d of %d workers were not ready, rank %d on node %s among them; see `troupe logs %s/%d`: %w",
				c.Name(), time.Since(begun).Round(time.Millisecond), len(missing), len(ranks), missing[0], rec.Seats[missing[0]].Node, c.Name(), missing[0], ctx.Err())
		}
	}
}

// agentsThere makes sure that the agents of some ranks live and know them.
func (c *Cluster) agentsThere(ctx context.Context, ranks []int, rec Record) error {
	order, groups := rec.berths(ranks)
	errs := make([]error, len(order))
	var group sync.WaitGroup
	for i, at := range order {
		group.Go(bus.Guard(func() { errs[i] = c.knownOn(ctx, at.node, groups[at], rec) }))
	}
	group.Wait()
	return errors.Join(errs...)
}

func (c *Cluster) knownOn(ctx context.Context, node string, ranks []int, rec Record) error {
	asking, cancel := context.WithTimeout(ctx, 2*lookEvery)
	defer cancel()
	there, err := c.rt.agents().WorkersOf(asking, node, rec.Address())
	if err != nil {
		if ctx.Err() != nil {
			return nil // the start is over, which its own error says
		}
		return bus.Errorf(bus.CodeWorkerLost, "role %s: rank %d cannot become ready: %w", c.Name(), ranks[0], err)
	}
	for _, rank := range ranks {
		id := rec.workerID(rank)
		if !slices.ContainsFunc(there, func(s nodes.Status) bool { return s.ID == id }) {
			return bus.Errorf(bus.CodeWorkerLost, "role %s: rank %d has ended with an earlier agent of node %s", c.Name(), rank, node)
		}
	}
	return nil
}

// learn asks rank 0 what its class can do: the driver need not know a class that it does not host.
func (c *Cluster) learn(ctx context.Context) error {
	f, err := c.send(ctx, dispatch.Call{Method: actors.VerbInfo, Ranks: []int{0}, Control: true})
	if err != nil {
		return err
	}
	infos, err := dispatch.AwaitEach[actors.Info](ctx, f)
	if err != nil {
		return bus.Errorf(bus.CodeOf(err), "role %s: what rank 0 can do: %w", c.Name(), err)
	}
	if err := checkMethods(infos[0].Class, infos[0].Methods); err != nil {
		return err
	}
	return c.edit(ctx, func(r *Record) { r.Methods, r.Open = infos[0].Methods, infos[0].Open })
}

// edit changes the role's record.
func (c *Cluster) edit(ctx context.Context, change func(*Record)) error {
	reg, err := c.rt.registry(ctx)
	if err != nil {
		return err
	}
	rec, err := reg.edit(ctx, c.Record(), change)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rec = rec
	return nil
}

// stopProcesses ends the processes of some ranks: the workers are asked to stop in order, and then their agents see to it
// that nothing is left, whether they could or not.
func (c *Cluster) stopProcesses(ctx context.Context, ranks []int, grace time.Duration) error {
	asking, cancel := context.WithTimeout(ctx, grace+time.Second)
	_ = c.stopRemote(asking, c.reachable(ranks), grace) // whoever does not stop is made to
	cancel()
	return c.endProcesses(ctx, ranks, c.Record())
}

// reachable leaves out the ranks that cannot hear: their driver knows that they have never been there.
func (c *Cluster) reachable(ranks []int) []int {
	if c.tie != created {
		return ranks
	}
	states, _ := c.life.states()
	return slices.DeleteFunc(slices.Clone(ranks), func(rank int) bool { return states[rank].State == "" })
}

// endProcesses returns when the agents have seen the processes end. The agent of a node that is lost cannot; its devices
// are not granted before it has shown that they are free.
func (c *Cluster) endProcesses(ctx context.Context, ranks []int, rec Record) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killGrace+agentAnswer)
	defer cancel()
	order, groups := rec.berths(ranks)
	errs := make([]error, len(order))
	var group sync.WaitGroup
	for i, at := range order {
		group.Go(bus.Guard(func() { errs[i] = c.endOn(ctx, at.node, groups[at], rec) }))
	}
	group.Wait()
	return errors.Join(errs...)
}

func (c *Cluster) endOn(ctx context.Context, node string, ranks []int, rec Record) error {
	ids := make([]nodes.WorkerID, len(ranks))
	for i, rank := range ranks {
		ids[i] = rec.workerID(rank)
	}
	asking, cancel := context.WithTimeout(ctx, agentThere)
	_, err := c.rt.agents().WorkersOf(asking, node, rec.Address()) // an agent that is not there is not waited for
	cancel()
	if err == nil {
		_, err = c.rt.agents().Stop(ctx, node, ids, killGrace)
	}
	if err == nil {
		return nil
	}
	if left, _ := c.life.notOver(ranks); len(left) == 0 { // they are known to be lost, and that has been told
		c.rt.log.Warn("roles: the agent of a node has not said that its workers ended", "role", c.Name(), "node", node, "error", err)
		return nil
	}
	return bus.Errorf(bus.CodeOf(err), "role %s: the agent of node %s has not said that its workers ended: %w", c.Name(), node, err)
}

// giveBack releases what the role holds, also what it holds without knowing: a driver may have died between the grant
// and its note in the registry.
func (c *Cluster) giveBack(ctx context.Context) error {
	rec := c.Record()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseActs)
	defer cancel()
	client, err := c.rt.placement()
	if err != nil {
		return err
	}
	held := rec.Held
	if c.tie != created || len(rec.Seats) == 0 || rec.Gens > 0 {
		if held, err = heldUnder(ctx, client, reservationID(rec), held); err != nil {
			return err
		}
	}
	return release(ctx, client, held)
}

// release gives reservations back. One whose token is stale is no longer ours.
func release(ctx context.Context, client *placement.Client, held []Held) error {
	var errs []error
	for _, h := range held {
		if err := client.Release(ctx, h.ID, h.Token); err != nil && !errors.As(err, new(*placement.StaleTokenError)) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// heldUnder adds the reservations to held whose id is a role's, or begins with it.
func heldUnder(ctx context.Context, client *placement.Client, id string, held []Held) ([]Held, error) {
	list, err := client.List(ctx)
	if err != nil {
		return nil, err
	}
	held = slices.Clone(held)
	for _, r := range list.Records {
		known := slices.ContainsFunc(held, func(h Held) bool { return h.ID == r.ID })
		if !known && (r.ID == id || strings.HasPrefix(r.ID, id+"-")) {
			held = append(held, Held{ID: r.ID, Token: r.Token})
		}
	}
	return held, nil
}
