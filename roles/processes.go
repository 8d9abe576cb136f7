package roles

import (
	"cmp"
	"context"
	"errors"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/nodes"
	"troupe/nodes/folders"
	"troupe/placement"
	"troupe/roles/life"
	"troupe/roles/registry"
)

const (
	killGrace       = 2 * time.Second         // between SIGINT and SIGTERM
	agentProbe      = 1500 * time.Millisecond // timeout of probing an agent
	agentTimeout    = 5 * time.Second         // how long an agent may take to see its processes exit, beyond the grace
	agentProbeEvery = 3 * time.Second         // interval of probing the agents of workers that are not ready
	releaseTimeout  = 5 * time.Second         // timeout of releasing a reservation
)

// services are the clients of agents and placement, made on first use.
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

// used reports whether reservations may exist.
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

// workforce is the processes of a role's workers: their reservations, starting and killing them.
type workforce struct {
	c *Cluster

	mu          sync.Mutex    // guards what follows
	program     nodes.Program // of worker processes
	startParams *startParams  // start parameters of worker processes; nil: created elsewhere and not needed yet
}

// reserve reserves what the workers need, unless it is reserved.
func (w *workforce) reserve(ctx context.Context) error {
	if given := w.c.spec.Process.Reserved; len(given) > 0 {
		return w.takeOver(ctx, given)
	}
	client, err := w.c.rt.placement()
	if err != nil {
		return err
	}
	request := w.c.spec.Process.request(w.c.Record())
	if over := w.c.spec.Process.Over; over != "" {
		if request.Colocate, err = w.reservationOf(ctx, over); err != nil {
			return err
		}
	}
	instances, err := request.Instances()
	if err != nil {
		return bus.Errorf(bus.CodeOf(err), "role %s: %w", w.c.Name(), err)
	}
	var placements []registry.RankPlacement
	for i, one := range instances {
		got, err := w.reserveOne(ctx, client, one)
		if err != nil {
			return err
		}
		for _, placed := range placementsOf(w.c.Name(), got.Workers) {
			placed.Reservation = i
			placements = append(placements, placed)
		}
		if err := w.c.record.edit(ctx, func(r *registry.RoleRecord) {
			r.Reservations = append(r.Reservations, registry.ReservationRef{ID: got.ID, Token: got.Token, Over: got.SharesWith})
		}); err != nil {
			return err
		}
	}
	return w.c.record.edit(ctx, func(r *registry.RoleRecord) { r.Placements = placements })
}

// takeOver makes given reservations those of the role.
func (w *workforce) takeOver(ctx context.Context, given []placement.Record) error {
	return w.c.record.edit(ctx, func(r *registry.RoleRecord) {
		r.Reservations, r.Placements = nil, nil
		for i, rec := range given {
			r.Reservations = append(r.Reservations, registry.ReservationRef{ID: rec.ID, Token: rec.Token, Over: rec.SharesWith})
			workers := slices.Clone(rec.Workers)
			for j := range workers {
				workers[j].Rank = len(r.Placements) + j
			}
			for _, placed := range placementsOf(w.c.Name(), workers) {
				placed.Reservation = i
				r.Placements = append(r.Placements, placed)
			}
		}
	})
}

func (w *workforce) reserveOne(ctx context.Context, client *placement.Client, request placement.Request) (placement.Record, error) {
	ctx, cancel := context.WithTimeout(ctx, w.c.spec.Process.PlaceTimeout)
	defer cancel()
	got, err := client.Reserve(ctx, request)
	if err != nil {
		return got, bus.Errorf(bus.CodeOf(err), "role %s: %w", w.c.Name(), err)
	}
	return got, nil
}

// reservationOf is the reservation of another role, whose devices are shared.
func (w *workforce) reservationOf(ctx context.Context, role string) (string, error) {
	reg, err := w.c.rt.registry(ctx)
	if err != nil {
		return "", err
	}
	rec, err := reg.Get(ctx, role)
	if err == nil && len(rec.Reservations) == 0 {
		err = bus.Errorf(bus.CodeInvalid, "role %s runs in its driver's process and has no devices", role)
	}
	if err != nil {
		return "", bus.Errorf(bus.CodeOf(err), "role %s, which shares the devices of %s: %w", w.c.Name(), role, err)
	}
	return rec.Reservations[0].ID, nil
}

// leaseMasterPort leases a port for rank 0 that the other ranks can reach.
func (w *workforce) leaseMasterPort(ctx context.Context) error {
	rec := w.c.Record()
	host, ports, err := w.c.rt.agents().Ports(ctx, rec.Placements[0].Node, rec.WorkerID(0), 1)
	if err != nil {
		return bus.Errorf(bus.CodeOf(err), "role %s: lease a port for rank 0: %w", w.c.Name(), err)
	}
	return w.c.record.edit(ctx, func(r *registry.RoleRecord) { r.Master = net.JoinHostPort(host, strconv.Itoa(ports[0])) })
}

// makeProgram sets the program of the worker processes. Shipped folders are stored for a day; so a folder is shipped
// again before a restart, which is cheap while it is stored.
func (w *workforce) makeProgram(ctx context.Context) error {
	p := w.c.spec.Process
	if p == nil { // created elsewhere
		return nil
	}
	program := nodes.Program{Command: p.Command, Dir: p.Dir, Env: p.Env, Visible: p.Visible, OwnVariables: p.OwnVariables, Fork: p.Fork, Warm: p.Warm, WarmPath: p.WarmPath}
	if p.Ship != "" {
		hash, err := folders.Ship(ctx, w.c.rt.Bus(), p.Ship, p.Exclude...)
		if err != nil {
			return bus.Errorf(bus.CodeOf(err), "role %s: %w", w.c.Name(), err)
		}
		program.Folder = hash
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.program = program
	return nil
}

// launch starts the processes of some ranks, on all nodes concurrently. It returns the first error.
func (w *workforce) launch(ctx context.Context, ranks []int, rec registry.RoleRecord) error {
	around := newRankEnvironments(rec)
	order, groups := launchTargets(rec, ranks)
	errs := make([]error, len(order))
	var group sync.WaitGroup
	for i, at := range order {
		group.Go(bus.Guard(func() { errs[i] = w.launchOn(ctx, at, groups[at], rec, around) }))
	}
	group.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func (w *workforce) launchOn(ctx context.Context, at launchTarget, ranks []int, rec registry.RoleRecord, around rankEnvironments) error {
	node, held := at.node, rec.Reservations[at.reservation]
	params, err := w.loadStartParams(ctx, rec)
	if err != nil {
		return err
	}
	w.mu.Lock()
	program := w.program
	w.mu.Unlock()
	order := nodes.Launch{Node: node, Reservation: held.ID, Token: held.Token, Over: held.Over, Program: program}
	if rec.ReplacesWorkers() {
		order.Spares = params.Spares
	}
	order.Output, order.OutputTo = w.c.output.outputMode()
	for _, rank := range ranks {
		assigned := params.assignment(rec, rank)
		assigned.Output = order.Output
		assignment, err := wire.Marshal(assigned)
		if err != nil {
			return bus.Errorf(bus.CodeInternal, "role %s: encode the assignment of rank %d: %w", w.c.Name(), rank, err)
		}
		order.Workers = append(order.Workers, nodes.Start{
			ID: rec.WorkerID(rank), Name: rec.Placements[rank].Name, Env: around.environment(rank, params),
			Devices: rec.Placements[rank].UUIDs, Share: rec.Placements[rank].Share, Assignment: assignment,
		})
	}
	started, err := w.c.rt.agents().Launch(ctx, order)
	if err != nil {
		return bus.Errorf(bus.CodeOf(err), "role %s: start rank %d on node %s: %w", w.c.Name(), ranks[0], node, err)
	}
	for _, s := range started {
		if s.Err != nil {
			e := *s.Err
			e.Role, e.Rank, e.Node = w.c.Name(), s.ID.Rank, node
			return &e
		}
	}
	return nil
}

func (r *startParams) assignment(rec registry.RoleRecord, rank int) Assignment {
	return Assignment{
		Namespace: rec.Namespace, Role: rec.Name, Incarnation: rec.Incarnation, Class: rec.Class, Rank: rank, World: rec.World,
		Gen: rec.Placements[rank].Gen, Mesh: rec.Mesh, Config: r.Config, Ordered: rec.Ordered, QueueLimit: r.QueueLimit,
		PanicFails: r.PanicFails, Devices: rec.Placements[rank].UUIDs, Driver: cmp.Or(rec.Run, rec.Owner), Private: r.Private,
	}
}

// awaitReady returns when the ranks are ready, or one is known to have failed. Exits come from the agents; the agents
// themselves are probed periodically.
func (w *workforce) awaitReady(ctx context.Context, ranks []int) error {
	rec, begun := w.c.Record(), time.Now()
	look := time.NewTicker(agentProbeEvery)
	defer look.Stop()
	for {
		states, changedCh := w.c.life.ranks()
		var missing []int
		for _, rank := range ranks {
			b := states[rank]
			switch {
			case b.Gen != rec.Placements[rank].Gen || b.State != life.Ready && !b.State.Over():
				missing = append(missing, rank)
			case b.State.Over():
				return w.c.life.lossOf(rank)
			}
		}
		if len(missing) == 0 {
			return nil
		}
		select {
		case <-changedCh:
		case <-look.C:
			if err := w.checkAgents(ctx, missing, rec); err != nil {
				return err
			}
		case <-ctx.Done():
			return bus.Errorf(bus.CodeOf(ctx.Err()), "role %s had not started after %s: %d of %d workers were not ready, rank %d on node %s among them; see `troupe logs %s/%d`: %w",
				w.c.Name(), time.Since(begun).Round(time.Millisecond), len(missing), len(ranks), missing[0], rec.Placements[missing[0]].Node, w.c.Name(), missing[0], ctx.Err())
		}
	}
}

// checkAgents checks that the agents of some ranks live and know their workers.
func (w *workforce) checkAgents(ctx context.Context, ranks []int, rec registry.RoleRecord) error {
	order, groups := launchTargets(rec, ranks)
	errs := make([]error, len(order))
	var group sync.WaitGroup
	for i, at := range order {
		group.Go(bus.Guard(func() { errs[i] = w.checkAgent(ctx, at.node, groups[at], rec) }))
	}
	group.Wait()
	return errors.Join(errs...)
}

func (w *workforce) checkAgent(ctx context.Context, node string, ranks []int, rec registry.RoleRecord) error {
	asking, cancel := context.WithTimeout(ctx, 2*agentProbeEvery)
	defer cancel()
	there, err := w.c.rt.agents().WorkersOf(asking, node, rec.Address())
	if err != nil {
		if ctx.Err() != nil {
			return nil // the start has its own error
		}
		return bus.Errorf(bus.CodeWorkerLost, "role %s: rank %d will not become ready: %w", w.c.Name(), ranks[0], err)
	}
	for _, rank := range ranks {
		id := rec.WorkerID(rank)
		if !slices.ContainsFunc(there, func(s nodes.Status) bool { return s.ID == id }) {
			return bus.Errorf(bus.CodeWorkerLost, "role %s: rank %d exited with an earlier agent of node %s", w.c.Name(), rank, node)
		}
	}
	return nil
}

// stopManner is how worker processes are stopped.
type stopManner uint8

const (
	stopInOrder stopManner = iota // on request; then SIGINT, SIGTERM and SIGKILL
	stopSoon                      // on request; what does not stop within the grace of running calls gets SIGKILL
	stopNow                       // SIGKILL
)

// stopProcesses stops the processes of some ranks: the workers are asked to stop in order, and then their agents kill
// what remains.
func (w *workforce) stopProcesses(ctx context.Context, ranks []int, grace time.Duration, manner stopManner) error {
	asking, cancel := context.WithTimeout(ctx, grace+time.Second)
	err := w.c.ender.stopRemote(asking, w.reachable(ranks), grace) // agents kill the others
	cancel()
	kill := killGrace
	switch {
	case manner == stopSoon && err != nil:
		kill = 0
	case manner == stopSoon:
		kill = orphanGrace // the worker ends the roles that it has created
	}
	return w.killProcesses(ctx, ranks, w.c.Record(), kill)
}

// reachable drops the ranks that are known never to have started.
func (w *workforce) reachable(ranks []int) []int {
	if w.c.origin != created {
		return ranks
	}
	states, _ := w.c.life.ranks()
	return slices.DeleteFunc(slices.Clone(ranks), func(rank int) bool { return rank < len(states) && states[rank].State == life.Expected })
}

// killProcesses sends SIGINT, SIGTERM after the grace, and SIGKILL; without a grace only SIGKILL. It returns when the agents
// have seen the processes exit. The agent of a lost node cannot; its devices are not granted before it has shown that they
// are free.
func (w *workforce) killProcesses(ctx context.Context, ranks []int, rec registry.RoleRecord, grace time.Duration) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killGrace+agentTimeout)
	defer cancel()
	order, groups := launchTargets(rec, ranks)
	errs := make([]error, len(order))
	var group sync.WaitGroup
	for i, at := range order {
		group.Go(bus.Guard(func() { errs[i] = w.killOn(ctx, at.node, groups[at], rec, grace) }))
	}
	group.Wait()
	return errors.Join(errs...)
}

func (w *workforce) killOn(ctx context.Context, node string, ranks []int, rec registry.RoleRecord, grace time.Duration) error {
	ids := make([]nodes.WorkerID, len(ranks))
	for i, rank := range ranks {
		ids[i] = rec.WorkerID(rank)
	}
	asking, cancel := context.WithTimeout(ctx, agentProbe)
	_, err := w.c.rt.agents().WorkersOf(asking, node, rec.Address()) // an absent agent is not waited for
	cancel()
	if err == nil {
		_, err = w.c.rt.agents().Stop(ctx, node, ids, grace)
	}
	if err == nil {
		return nil
	}
	if left, _ := w.c.life.notOver(ranks); len(left) == 0 { // all of them are known to be lost
		w.c.rt.log.Warn("roles: an agent has not confirmed the exit of its workers", "role", w.c.Name(), "node", node, "error", err)
		return nil
	}
	return bus.Errorf(bus.CodeOf(err), "role %s: the agent of node %s has not confirmed the exit of its workers: %w", w.c.Name(), node, err)
}

// releaseReservations releases the role's reservations, including one that was granted and not recorded because the driver died in
// between.
func (w *workforce) releaseReservations(ctx context.Context) error {
	rec := w.c.Record()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	client, err := w.c.rt.placement()
	if err != nil {
		return err
	}
	held := rec.Reservations
	if w.c.origin != created || len(rec.Placements) == 0 || rec.Generations > 0 {
		if held, err = withUnrecorded(ctx, client, rec.ReservationID(), held); err != nil {
			return err
		}
	}
	return release(ctx, client, held)
}

// release releases reservations. A stale token is no error.
func release(ctx context.Context, client *placement.Client, held []registry.ReservationRef) error {
	var errs []error
	for _, h := range held {
		if err := client.Release(ctx, h.ID, h.Token); err != nil && !errors.As(err, new(*placement.StaleTokenError)) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// withUnrecorded adds the reservations whose id belongs to the role.
func withUnrecorded(ctx context.Context, client *placement.Client, id string, held []registry.ReservationRef) ([]registry.ReservationRef, error) {
	list, err := client.List(ctx)
	if err != nil {
		return nil, err
	}
	held = slices.Clone(held)
	for _, r := range list.Records {
		known := slices.ContainsFunc(held, func(h registry.ReservationRef) bool { return h.ID == r.ID })
		if !known && (r.ID == id || strings.HasPrefix(r.ID, id+"-")) {
			held = append(held, registry.ReservationRef{ID: r.ID, Token: r.Token})
		}
	}
	return held, nil
}
