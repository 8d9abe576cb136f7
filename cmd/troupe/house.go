package main

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"troupe/bus"
	"troupe/roles"
)

const (
	houseEvery = 5 * time.Second  // how often a head looks for roles that have lost their driver
	strayAfter = 15 * time.Second // how long a process runs that no role knows, before it is ended
)

// keepHouse ends the roles of drivers that have died, in every namespace, until it is stopped. Drivers do that for each
// other; the head does it for the last one. It holds a session only where there is something to end. Processes that no role
// knows are ended as well.
func keepHouse(ctx context.Context, b *bus.Bus, log *slog.Logger, every time.Duration) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var group sync.WaitGroup
	endedCh, stopWatch := roles.DriverWatch{Bus: b, Remote: true, Logger: log}.Start(ctx)
	group.Go(func() {
		sessions := map[string]*roles.Runtime{}
		for tick := time.NewTicker(every); ; {
			select {
			case <-ctx.Done():
				tick.Stop()
				_ = attend(ctx, b, log, sessions, nil) // closes them; with the head they would end anyway
				return
			case <-endedCh: // at once
			case <-tick.C:
			}
			orphans, err := roles.OrphanNamespaces(ctx, b)
			if err == nil {
				err = attend(ctx, b, log, sessions, orphans)
			}
			if confirmErr := roles.ConfirmReservations(ctx, b); confirmErr != nil && ctx.Err() == nil {
				log.Debug("troupe: reservations that are in doubt cannot be confirmed; trying again", "error", confirmErr)
			}
			if err != nil && ctx.Err() == nil {
				log.Warn("troupe: roles of lost drivers cannot be looked for; trying again", "error", err)
			}
		}
	})
	group.Go(func() { // apart: it waits for agents that do not answer
		for tick := time.NewTicker(every); ; {
			select {
			case <-ctx.Done():
				tick.Stop()
				return
			case <-tick.C:
				endStrays(ctx, b, log)
			}
		}
	})
	return func() {
		cancel()
		group.Wait()
		stopWatch()
	}
}

// endStrays ends the processes that no role knows.
func endStrays(ctx context.Context, b *bus.Bus, log *slog.Logger) {
	ctx, cancel := context.WithTimeout(ctx, strayAfter)
	defer cancel()
	ended, err := roles.KillOrphanProcesses(ctx, b, strayAfter)
	for _, w := range ended {
		log.Warn("troupe: a worker that no role knows has been ended", "worker", w.ID.String(), "node", w.Node)
	}
	if err != nil && ctx.Err() == nil {
		log.Warn("troupe: workers that no role knows cannot be looked for; trying again", "error", err)
	}
}

// attend opens a session in each of the namespaces, and closes those that are no longer needed.
func attend(ctx context.Context, b *bus.Bus, log *slog.Logger, sessions map[string]*roles.Runtime, namespaces []string) error {
	var errs []error
	for ns, rt := range sessions {
		if !slices.Contains(namespaces, ns) {
			delete(sessions, ns)
			errs = append(errs, rt.Close(ctx))
		}
	}
	for _, ns := range namespaces {
		if sessions[ns] != nil {
			continue
		}
		rt, err := roles.Open(ctx, roles.Config{Bus: b, Namespace: ns, Name: "troupe-head", Logger: log})
		if err != nil {
			return errors.Join(append(errs, err)...)
		}
		sessions[ns] = rt
	}
	for _, rt := range sessions {
		errs = append(errs, rt.MonitorRoles(ctx))
	}
	return errors.Join(errs...)
}

// maintainRegistry keeps the registry small until it is stopped.
func maintainRegistry(ctx context.Context, b *bus.Bus, log *slog.Logger) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var group sync.WaitGroup
	group.Go(func() {
		if err := roles.Maintain(ctx, b); err != nil && ctx.Err() == nil {
			log.Warn("troupe: the registry is not maintained, and grows with each role that ends", "error", err)
		}
	})
	return func() {
		cancel()
		group.Wait()
	}
}
