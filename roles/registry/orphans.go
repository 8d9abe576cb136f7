package registry

import (
	"context"
	"errors"
	"slices"
	"strings"

	"troupe/bus"
)

// OrphanNamespaces lists the namespaces in which a role or a reservation has lost its driver. A runtime opened there destroys
// them after the grace period: a head does so, because no other process of the run may be left.
func OrphanNamespaces(ctx context.Context, b *bus.Bus) ([]string, error) {
	reg, err := Open(ctx, b, "")
	if err != nil {
		return nil, err
	}
	all, err := reg.namespaces(ctx)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, ns := range all {
		has, err := reg.Of(ns).hasOrphans(ctx)
		if err != nil {
			return nil, err
		}
		if has {
			out = append(out, ns)
		}
	}
	return out, nil
}

// hasOrphans reports whether a role should have ended with its driver, or has processes that no process monitors.
func (g Registry) hasOrphans(ctx context.Context) (bool, error) {
	all, err := g.List(ctx)
	for _, r := range all {
		if alive := g.DriverAlive(ctx, r.Owner); !r.Detached && !alive || r.NeedsMonitor(alive) {
			return true, nil
		}
	}
	holds, holdErr := g.DriverReservations(ctx)
	for _, h := range holds {
		if !g.DriverAlive(ctx, h.Owner) {
			return true, nil
		}
	}
	if errors.Is(err, bus.ErrMalformed) {
		err = nil // a record that one namespace has spoilt must not keep what is left in the others
	}
	return false, errors.Join(err, holdErr)
}

// ReservationInUse reports whether a role or a driver of the namespace uses a reservation.
func (g Registry) ReservationInUse(ctx context.Context, id string) (bool, error) {
	all, err := g.List(ctx)
	for _, rec := range all {
		own := rec.ReservationID()
		named := id == own || strings.HasPrefix(id, own+"-") || slices.ContainsFunc(rec.Reservations, func(h ReservationRef) bool { return h.ID == id })
		if named && (rec.Detached || g.DriverAlive(ctx, rec.Owner)) {
			return true, nil
		}
	}
	if err != nil {
		return false, err
	}
	holds, err := g.DriverReservations(ctx)
	for _, h := range holds {
		if h.ID == id && g.DriverAlive(ctx, h.Owner) {
			return true, nil
		}
	}
	return false, err
}
