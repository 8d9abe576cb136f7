package roles

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"troupe/bus"
	"troupe/roles/registry"
)

const (
	gcInterval  = 5 * time.Second
	processPass = 15 * time.Second // timeout of one pass over the processes
)

// GC ends what dead drivers have left in any namespace: their roles, worker processes that belong to no role, and deleted
// keys of the registry. It also confirms reservations that the placement service doubts. Drivers do the same for each other;
// a head runs GC for namespaces without a driver. Two GCs on one bus do no harm.
type GC struct {
	Bus      *bus.Bus
	Logger   *slog.Logger  // zero: the bus's
	Interval time.Duration // between two passes; zero: 5 s. The end of a driver starts a pass at once
}

// Start runs until stop is called, which waits for its end, or ctx ends.
func (g GC) Start(ctx context.Context) (stop func()) {
	if g.Interval <= 0 {
		g.Interval = gcInterval
	}
	if g.Logger == nil {
		g.Logger = g.Bus.Logger()
	}
	ctx, cancel := context.WithCancel(ctx)
	endedCh, stopWatch := registry.DriverWatch{Bus: g.Bus, Logger: g.Logger}.Start(ctx)
	var group sync.WaitGroup
	group.Go(func() { defer bus.Recover(); g.collectRoles(ctx, endedCh) })
	group.Go(func() { defer bus.Recover(); g.collectProcesses(ctx) }) // apart: it waits for agents that do not answer
	group.Go(func() {
		defer bus.Recover()
		if err := registry.Maintain(ctx, g.Bus); err != nil && ctx.Err() == nil {
			g.Logger.Warn("roles: the registry is not compacted and grows with each role that ends", "error", err)
		}
	})
	return func() {
		cancel()
		group.Wait()
		stopWatch()
	}
}

// collectRoles ends the roles of dead drivers. It holds a session in a namespace only while there is a role to end.
func (g GC) collectRoles(ctx context.Context, endedCh <-chan struct{}) {
	sessions := map[string]*Runtime{}
	tick := time.NewTicker(g.Interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			_ = g.attend(ctx, sessions, nil) // the sessions end with the bus in any case
			return
		case <-endedCh:
		case <-tick.C:
		}
		orphans, err := registry.OrphanNamespaces(ctx, g.Bus)
		if err == nil {
			err = g.attend(ctx, sessions, orphans)
		}
		if err != nil && ctx.Err() == nil {
			g.Logger.Warn("roles: roles of dead drivers cannot be collected; trying again", "error", err)
		}
		if err := confirmReservations(ctx, g.Bus); err != nil && ctx.Err() == nil {
			g.Logger.Debug("roles: doubtful reservations cannot be confirmed; trying again", "error", err)
		}
	}
}

// attend keeps one session in each of the namespaces, and closes the others. A session ends the roles itself.
func (g GC) attend(ctx context.Context, sessions map[string]*Runtime, namespaces []string) error {
	var errs []error
	for ns, rt := range sessions {
		switch {
		case rt.ownsBus && !rt.bus.Connected(): // shut out with the team's credential, see open
			delete(sessions, ns)
			closing, cancel := context.WithTimeout(ctx, undoTimeout)
			_ = rt.Close(closing) // the next session does what this one could not
			cancel()
		case !slices.Contains(namespaces, ns):
			delete(sessions, ns)
			errs = append(errs, rt.Close(ctx))
		}
	}
	for _, ns := range namespaces {
		if sessions[ns] != nil {
			continue
		}
		rt, err := g.open(ctx, ns)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		sessions[ns] = rt
	}
	for _, rt := range sessions {
		errs = append(errs, rt.MonitorRoles(ctx))
	}
	return errors.Join(errs...)
}

// open opens a session in a namespace. Where a team has created roles it has the rights of the team alone, so that the records of roles, which the
// team writes, have the head do nothing that the team may not. Workers that it restarts connect only while the team's credential is valid.
func (g GC) open(ctx context.Context, namespace string) (*Runtime, error) {
	cfg := Config{Bus: g.Bus, Namespace: namespace, Name: "troupe-head", Logger: g.Logger}
	reg, err := registry.Open(ctx, g.Bus, namespace)
	if err != nil {
		return nil, err
	}
	team, err := reg.TeamOf(ctx)
	switch {
	case err != nil:
		return nil, err
	case team == "":
		return Open(ctx, cfg)
	}
	credential := bus.ForWorker(team, namespace)
	if !g.Bus.AcceptsCredential(credential.ID) { // the team's has ended: its roles are ended with another one
		credential = bus.Credential{Kind: bus.TeamCredential, Namespace: namespace}
	}
	b, err := g.Bus.DialAs(ctx, cfg.Name, credential)
	if err != nil {
		return nil, err
	}
	cfg.Bus = b
	rt, err := Open(ctx, cfg)
	if err != nil {
		return nil, errors.Join(err, b.Close())
	}
	rt.ownsBus = true
	return rt, nil
}

// collectProcesses ends the worker processes that belong to no role.
func (g GC) collectProcesses(ctx context.Context) {
	tick := time.NewTicker(g.Interval)
	defer tick.Stop()
	orphans := OrphanProcesses{Bus: g.Bus}
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		pass, cancel := context.WithTimeout(ctx, processPass)
		ended, err := orphans.Kill(pass)
		for _, w := range ended {
			g.Logger.Warn("roles: a worker process of no role was ended", "worker", w.ID.String(), "node", w.Node)
		}
		if err != nil && pass.Err() == nil {
			g.Logger.Warn("roles: worker processes of no role cannot be looked for; trying again", "error", err)
		}
		cancel()
	}
}
