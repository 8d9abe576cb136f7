package roles

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"troupe/bus"
	"troupe/placement"
	"troupe/roles/registry"
)

// scaler adds replicas to a role with MaxReplicas while devices are free, and removes them when their reservations are preempted. The driver
// that created the role runs it.
type scaler struct {
	c      *Cluster
	wanted atomic.Int32  // replicas: the most, or what a caller of Resize has asked for last
	wakeCh chan struct{} // holds one

	mu      sync.Mutex         // guards what follows
	cancel  context.CancelFunc // of what it does; nil: it has not begun
	stopped bool
}

const (
	scalePause     = 2 * time.Second // between attempts to grow
	scalePauseMost = time.Minute     // after attempts that have failed for another reason than a lack of devices
	leaveTime      = 10 * time.Second
)

// start begins to scale a role that has just become ready.
func (s *scaler) start() {
	p := s.c.spec.Process
	if p == nil || p.MaxReplicas == 0 {
		return
	}
	s.wanted.Store(int32(p.MaxReplicas))
	s.wakeCh = make(chan struct{}, 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return
	}
	ctx, cancel := context.WithCancel(s.c.rt.ctx)
	s.cancel = cancel
	if !s.c.rt.spawn(func() { defer cancel(); s.run(ctx) }) {
		cancel()
	}
}

// stop ends what the scaler does: the role is being destroyed, which does not wait until workers have started.
func (s *scaler) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = true
	if s.cancel != nil {
		s.cancel()
	}
}

func (s *scaler) run(ctx context.Context) {
	log := s.c.rt.log.With("role", s.c.Name())
	client, err := s.c.rt.placement()
	if err == nil {
		err = client.Events(ctx, func(e placement.Event) {
			if e.Kind == placement.EventLeave {
				s.wake()
			}
		})
	}
	if err != nil { // the runtime is closed, or the server away
		log.Debug("roles: preempted reservations are looked for, not told", "error", err)
	}
	s.wake()
	for pause := scalePause; ; {
		_, changedCh := s.c.life.ranks() // a rank may have left, and the role may have ended
		select {
		case <-s.wakeCh:
		case <-time.After(pause):
		case <-changedCh:
		case <-ctx.Done():
			return
		}
		if s.c.callable("") != nil {
			return
		}
		if err := s.step(ctx); err != nil && ctx.Err() == nil && s.c.callable("") == nil {
			log.Warn("roles: the role cannot be scaled; trying again", "error", err)
			pause = min(2*pause, scalePauseMost)
		} else {
			pause = scalePause
		}
	}
}

func (s *scaler) wake() {
	select {
	case s.wakeCh <- struct{}{}:
	default:
	}
}

// step removes replicas whose devices are to be given up, or else adds some if devices are free.
func (s *scaler) step(ctx context.Context) error {
	rec := s.c.Record()
	if rec.State != registry.RoleReady {
		return nil // the next step
	}
	client, err := s.c.rt.placement()
	if err != nil {
		return err
	}
	keep, why, err := s.leaving(ctx, client, rec)
	switch {
	case err != nil:
		return err
	case keep < rec.Mesh.DP:
		ctx, cancel := context.WithTimeout(ctx, leaveTime)
		defer cancel()
		err = s.c.sizer.changeSize(ctx, why, func(rec registry.RoleRecord) int { return min(keep*replicaSize(rec), rec.World) })
	case rec.Mesh.DP < int(s.wanted.Load()):
		err = s.c.sizer.growFree(ctx)
	}
	if errors.Is(err, errRestarting) {
		return nil
	}
	return err
}

// leaving is how many replicas the role keeps without those whose reservations are preempted, and what for. The first ones, which the role
// cannot go on without, stay until they are ended.
func (s *scaler) leaving(ctx context.Context, client *placement.Client, rec registry.RoleRecord) (keep int, why string, err error) {
	keep = rec.Mesh.DP
	if keep <= s.c.spec.Process.leastReplicas() {
		return keep, "", nil
	}
	list, err := client.List(ctx)
	if err != nil {
		return keep, "", err
	}
	for _, held := range list.Records {
		at := slices.IndexFunc(rec.Reservations, func(r registry.ReservationRef) bool { return r.ID == held.ID && r.Token == held.Token })
		if at < 0 || held.State != placement.StateLeaving {
			continue
		}
		rank := slices.IndexFunc(rec.Placements, func(p registry.RankPlacement) bool { return p.Reservation == at })
		if replica := rank / replicaSize(rec); rank >= 0 && replica >= s.c.spec.Process.leastReplicas() && replica < keep {
			keep, why = replica, held.Why
		}
	}
	return keep, why, nil
}

// replicaSize is the ranks of one data-parallel index.
func replicaSize(rec registry.RoleRecord) int { return rec.Mesh.TP * rec.Mesh.CP * rec.Mesh.PP }

// leastReplicas is the least number of replicas that the role may have.
func (p *Process) leastReplicas() int { return max(p.MinReplicas, 1) }

// growFree adds as many of the wanted replicas as there are devices for now.
func (z *sizer) growFree(ctx context.Context) error {
	if err := z.c.ender.lockDestroy(ctx); err != nil {
		return err
	}
	defer func() { <-z.c.ender.destroyCh }()
	rec := z.c.Record()
	n := int(z.c.scaler.wanted.Load())*replicaSize(rec) - rec.World // somebody else may have changed both until now
	if n <= 0 {
		return nil
	}
	if _, err := z.resized(n); err != nil {
		return err
	}
	got, err := z.reserveFree(ctx, n)
	if err != nil || got == 0 {
		return err
	}
	err = z.grow(ctx, got, "devices are free", func(context.Context, int) (int, error) { return got, nil })
	if err != nil {
		z.removeFrom(context.WithoutCancel(ctx), rec.World) // it may have failed before it looked at what is reserved
	}
	return err
}

// reserveFree reserves replicas one by one while they are granted at once, and returns the number of their workers. The last ones have the
// lowest priority, so that they are preempted first, and before other reservations of the role's own priority.
func (z *sizer) reserveFree(ctx context.Context, n int) (got int, err error) {
	size := replicaSize(z.c.Record())
	for got < n {
		rec := z.c.Record()
		lower := (rec.World+got)/size - z.c.spec.Process.leastReplicas() + 1
		err := z.reserveMore(ctx, rec.World+got, size, lower, (*placement.Client).TryReserve)
		if noRoom(err) || err != nil && got > 0 {
			return got, nil // the next step tells of an error, if it lasts
		}
		if err != nil {
			return 0, err
		}
		got += size
	}
	return got, nil
}

// noRoom reports whether an error says that no node has room.
func noRoom(err error) bool {
	_, full := errors.AsType[*placement.NoCapacityError](err)
	return full
}

// dropReplica removes the last replica during a restart that finds no room for some ranks, which take its devices. It returns false if the role
// may not have fewer.
func (m *recovery) dropReplica(ctx context.Context, params *startParams, homeless []int) (bool, error) {
	rec := m.c.Record()
	if !params.hasSurplus(rec) {
		return false, nil
	}
	mesh := rec.Mesh
	mesh.DP = 0
	mesh, err := mesh.Resolve(rec.World - replicaSize(rec))
	if err != nil {
		return false, err
	}
	var live []int // of those that leave
	for rank := mesh.World(); rank < rec.World; rank++ {
		if !slices.Contains(rec.Restart.Ranks, rank) {
			live = append(live, rank)
		}
	}
	const why = "no node has room for a lost rank"
	if err := m.c.record.alterRestart(ctx, func(r *registry.RoleRecord) {
		r.World, r.Mesh = mesh.World(), mesh
		r.Restart.Ranks = slices.DeleteFunc(slices.Clone(r.Restart.Ranks), func(rank int) bool { return rank >= r.World })
		for i, rank := range homeless {
			if i < len(live) && rank < r.World && r.Policy == RestartRank {
				there := r.Placements[live[i]]
				there.Gen, there.Name = r.Placements[rank].Gen, placement.Worker{Rank: rank, Devices: there.Devices}.Name(r.Name)
				r.Placements[rank] = there
			}
		}
		for _, rank := range live { // whoever takes the restart over kills them before others start on their devices
			placed := r.Placements[rank]
			r.Replaced = append(r.Replaced, registry.ReplacedWorker{Node: placed.Node, Rank: rank, Gen: placed.Gen})
		}
		r.NextEpoch(sized(mesh, why))
	}); err != nil {
		return false, err
	}
	draining, cancel := context.WithTimeout(ctx, leaveTime)
	defer cancel()
	return true, m.c.sizer.leave(draining, m.c.Record(), live, why)
}

// hasSurplus reports whether the role may have a replica less than it has.
func (r *startParams) hasSurplus(rec registry.RoleRecord) bool {
	return r.MinReplicas > 0 && rec.Mesh.PP == 1 && !rec.Ordered && rec.Mesh.DP > r.MinReplicas
}

// checkReplicas returns the errors of MinReplicas and MaxReplicas.
func (s Spec) checkReplicas(replicas int) error {
	p := s.Process
	if p == nil || p.MinReplicas == 0 && p.MaxReplicas == 0 {
		return nil
	}
	bad := func(format string, args ...any) error {
		return bus.Errorf(bus.CodeInvalid, "role %q: "+format, append([]any{s.Name}, args...)...)
	}
	switch {
	case p.MinReplicas < 0 || p.MaxReplicas < 0:
		return bad("MinReplicas %d and MaxReplicas %d must not be negative", p.MinReplicas, p.MaxReplicas)
	case p.MaxReplicas > 0 && p.MaxReplicas < p.leastReplicas():
		return bad("MaxReplicas %d is less than MinReplicas %d", p.MaxReplicas, p.leastReplicas())
	case replicas < p.leastReplicas() || p.MaxReplicas > 0 && replicas > p.MaxReplicas:
		return bad("it begins with %d replicas, which is not from MinReplicas %d to MaxReplicas %d", replicas, p.leastReplicas(), p.MaxReplicas)
	case s.Mesh.PP > 1 || s.Ordered:
		return bad("MinReplicas and MaxReplicas are for roles that can be resized: not ordered, and without pipeline stages")
	case p.MinReplicas > 0 && p.Policy != RestartRank && p.Policy != RestartRole:
		return bad("MinReplicas needs the policy restart_rank or restart_role: with %q no lost worker is replaced", p.Policy)
	case p.MaxReplicas > 0 && (p.Needs.Mapping != nil && len(p.Needs.Mapping.Devices) > 0 || len(p.Reserved) > 0 || p.Over != "" || p.Needs.Colocate != ""):
		return bad("MaxReplicas: replicas are added where devices are free, and the role names its devices; request bundles instead")
	}
	return nil
}

// checkRange refuses a size that the role may not be given.
func (z *sizer) checkRange(replicas int) error {
	p := z.c.spec.Process
	if p == nil || replicas >= p.leastReplicas() && (p.MaxReplicas == 0 || replicas <= p.MaxReplicas) {
		return nil
	}
	most := ""
	if p.MaxReplicas > 0 {
		most = fmt.Sprintf(" to %d", p.MaxReplicas)
	}
	return bus.Errorf(bus.CodeInvalid, "role %s cannot be resized: it may have from %d%s replicas, and %d are asked for", z.c.Name(), p.leastReplicas(), most, replicas)
}
