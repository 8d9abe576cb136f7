package roles

import (
	"context"
	"fmt"
	"sync"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/roles/life"
	"troupe/roles/registry"
)

// starter starts the workers of a role that is created here.
type starter struct {
	c         *Cluster
	startedCh chan struct{} // closed when a start in the background is complete; nil: the role was not created with Begin

	mu       sync.Mutex       // guards what follows
	workers  []*actors.Worker // goroutines of this process
	startErr *bus.Error       // of a start in the background
}

// start starts the workers and waits until each receives on every subject.
func (s *starter) start(ctx context.Context, config wire.Raw) error {
	var err error
	if s.c.spec.Process != nil {
		err = s.startProcesses(ctx, config)
	} else {
		err = s.startLocal(ctx, config)
	}
	if err == nil {
		err = s.barrier(ctx, s.c.Record().AllRanks())
	}
	if err == nil && s.c.spec.Process != nil {
		err = s.readMethods(ctx)
	}
	if err == nil {
		s.c.liveness.expectAll()
		err = s.c.record.step(ctx, registry.RoleReady, "")
	}
	if err == nil && s.c.spec.Detached && s.c.spec.Process == nil {
		err = s.c.rt.local.follow(s.c.Record())
	}
	if err = s.startResult(err); err == nil {
		rec := s.c.Record()
		s.c.output.emit(eventRole, nil, "", fmt.Sprintf("%d workers of class %s, for %s", s.c.WorldSize(), rec.Class, s.c.rt.cfg.Name))
		s.c.scaler.start()
		s.c.rt.audit(actionCreated, rec, nil, fmt.Sprintf("%d workers of class %s", rec.World, rec.Class), rec.By)
	}
	return err
}

// startResult is the result of a start. The failure of a worker is the cause.
func (s *starter) startResult(err error) error {
	if err == nil {
		s.c.life.feed(life.Event{Kind: life.Started})
	}
	failed := s.c.life.failure()
	switch ended := s.c.life.err(); {
	case failed != nil && s.startedCh != nil:
		return failed
	case failed != nil:
		return failed.Unwrap()
	case err == nil && ended != nil:
		return ended
	}
	return err
}

// startLocal starts workers as goroutines of this process.
func (s *starter) startLocal(ctx context.Context, config wire.Raw) error {
	specs := make([]actors.WorkerSpec, s.c.WorldSize())
	for rank := range specs {
		specs[rank] = actors.WorkerSpec{
			Address: s.c.to, Class: s.c.spec.Class, Rank: rank, World: len(specs), Config: config, Ordered: s.c.spec.Ordered,
			QueueLimit: s.c.spec.QueueLimit, PanicFails: s.c.spec.PanicFails,
			Slices: []actors.Slice{{Mesh: defaultMesh, N: s.c.Mesh().Coord(rank).DP}},
		}
	}
	workers, err := s.c.rt.local.start(ctx, s.c.spec, specs)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.workers = workers
	return err
}

// barrier proves that the workers receive on every subject of the role. A flush or a key would not: interest propagates
// more slowly than either.
func (s *starter) barrier(ctx context.Context, among []int) error {
	return s.probe(ctx, among, s.c.Mesh())
}

func (s *starter) probe(ctx context.Context, among []int, mesh dispatch.Mesh) error {
	world := mesh.World()
	some := len(among) < world
	ranks := make([]calls.Part, 0, len(among))
	byDP := map[int][]int{}
	for _, rank := range among {
		ranks = append(ranks, calls.Part{Scope: calls.OneRank(rank), Ranks: []int{rank}})
		dp := mesh.Coord(rank).DP
		byDP[dp] = append(byDP[dp], rank)
	}
	slices := make([]calls.Part, 0, len(byDP))
	for dp, members := range byDP {
		slices = append(slices, calls.Part{Scope: calls.DPSlice(defaultMesh, dp), Ranks: members, Some: some})
	}
	role := []calls.Part{{Scope: calls.Everyone(), Ranks: among, Some: some}}
	probes := []calls.Call{{Parts: role}, {Parts: ranks}, {Parts: slices}, {Parts: role, Control: true}, {Parts: ranks, Control: true}}
	for _, p := range probes {
		p.To, p.Method, p.World, p.FailFast = s.c.to, actors.VerbProbe, world, true
		p.Ordered, p.AskAfter, p.Gens = s.c.shape.Load().Ordered && !p.Control, 100*time.Millisecond, s.c.life.generations()
		g, err := s.c.rt.ep.Scatter(ctx, p)
		if err != nil {
			return err
		}
		<-g.Done()
		for _, a := range g.Arrived() {
			if a.Err != nil {
				return bus.Errorf(bus.CodeOf(a.Err), "role %s: the start barrier: %w", s.c.Name(), a.Err)
			}
		}
	}
	return nil
}

// startProcesses starts a role's worker processes: reservation, placements, a port for rank 0, launch. Each step is in
// the registry before the next, so that any process can destroy all of it.
func (s *starter) startProcesses(ctx context.Context, config wire.Raw) error {
	if err := s.c.workforce.reserve(ctx); err != nil {
		return err
	}
	if err := s.c.workforce.leaseMasterPort(ctx); err != nil {
		return err
	}
	if err := s.c.workforce.makeProgram(ctx); err != nil {
		return err
	}
	if err := s.c.workforce.storeStartParams(ctx, config); err != nil {
		return err
	}
	if err := s.c.output.showOutput(ctx); err != nil {
		return err
	}
	rec := s.c.Record()
	all := rec.AllRanks()
	if err := s.c.workforce.launch(ctx, all, rec); err != nil {
		return err
	}
	return s.c.workforce.awaitReady(ctx, all)
}

// readMethods asks rank 0 for the methods of its class: the driver need not know a class that it does not host.
func (s *starter) readMethods(ctx context.Context) error {
	f, err := s.c.send(ctx, dispatch.Call{Method: actors.VerbInfo, Ranks: []int{0}, Control: true})
	if err != nil {
		return err
	}
	infos, err := dispatch.AwaitEach[actors.Info](ctx, f)
	if err != nil {
		return bus.Errorf(bus.CodeOf(err), "role %s: read the methods of rank 0: %w", s.c.Name(), err)
	}
	if err := checkMethods(infos[0].Class, infos[0].Methods); err != nil {
		return err
	}
	return s.c.record.edit(ctx, func(r *registry.RoleRecord) {
		r.Methods, r.Open, r.DeviceTensors = infos[0].Methods, infos[0].Open, infos[0].DeviceTensors
	})
}

// undoStart destroys a role that did not start. If the time for the start is over, or its caller has given up, the
// workers are killed and the caller does not wait long for that: the destruction goes on in the background.
func (s *starter) undoStart(ctx context.Context) error {
	manner := stopInOrder
	if ctx.Err() != nil {
		manner = stopNow
	}
	doneCh := make(chan error, 1)
	destroy := func() {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		doneCh <- s.c.ender.destroy(last, 0, manner)
	}
	if manner != stopNow || !s.c.rt.spawn(destroy) {
		destroy()
	}
	select {
	case err := <-doneCh:
		return err
	case <-time.After(undoTimeout):
		return nil
	}
}
