package roles

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"troupe/bus"
	"troupe/placement"
	"troupe/roles/registry"
)

// moveWait bounds the queue time of a reservation for moved ranks.
const moveWait = 15 * time.Second

// reserver is one of the two ways to reserve: Reserve and TryReserve of a client.
type reserver = func(*placement.Client, context.Context, placement.Request) (placement.Record, error)

// move places ranks of a restart on other nodes if theirs must be avoided: only those ranks, with a reservation of
// their own, or with RestartRole the whole role with new reservations.
func (m *recovery) move(ctx context.Context, params *startParams) error {
	for {
		rec := m.c.Record()
		r := rec.Restart
		var ranks []int
		for _, rank := range r.Ranks {
			if slices.Contains(r.Avoid, rec.Placements[rank].Node) {
				ranks = append(ranks, rank)
			}
		}
		if len(ranks) == 0 && len(rec.Reservations) > 0 {
			return nil
		}
		if why := params.fixed(rec, ranks, r.Avoid); why != "" {
			return bus.Errorf(bus.CodeRefused, "moving to another node is impossible: %s", why)
		}
		err := m.moveTo(ctx, params, rec, ranks)
		if err == nil || !noRoom(err) {
			return err
		}
		if dropped, failed := m.dropReplica(ctx, params, ranks); failed != nil || !dropped {
			return errors.Join(err, failed)
		}
	}
}

// moveTo places the ranks on other nodes. While the role may have fewer replicas, it does not wait for devices.
func (m *recovery) moveTo(ctx context.Context, params *startParams, rec registry.RoleRecord, ranks []int) error {
	reserve, wait := (*placement.Client).Reserve, moveWait
	switch {
	case params.hasSurplus(rec):
		reserve = (*placement.Client).TryReserve
	case params.MinReplicas > 0:
		wait = params.PlaceTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, min(wait, params.PlaceTimeout))
	defer cancel()
	at := rec.Placements[0].Node
	var err error
	if rec.Policy == RestartRole {
		err = m.moveAll(ctx, params, reserve)
	} else {
		err = m.moveSome(ctx, params, ranks, reserve)
	}
	if err != nil {
		return err
	}
	if m.c.Record().Placements[0].Node != at {
		return m.c.workforce.leaseMasterPort(ctx)
	}
	return nil
}

// fixed is why ranks cannot be moved; empty: they can.
func (r *startParams) fixed(rec registry.RoleRecord, ranks []int, avoid []string) string {
	switch {
	case r.Needs.Mapping != nil && len(r.Needs.Mapping.Devices) > 0:
		return "its device mapping names exact devices; request bundles instead"
	case r.Over != "" || r.Needs.Colocate != "":
		return "it shares the devices of another reservation, which does not move"
	}
	for _, rank := range ranks {
		if node := r.bundle(rank).Node; node != "" && slices.Contains(avoid, node) {
			return fmt.Sprintf("rank %d is bound to node %s", rank, node)
		}
	}
	return ""
}

// bundle is the bundle of one rank.
func (r *startParams) bundle(rank int) placement.Bundle {
	switch all := r.Needs.Bundles; {
	case len(all) == 0:
		return placement.Bundle{}
	case rank < len(all):
		return all[rank]
	default:
		return all[len(all)-1]
	}
}

// moveSome reserves for some ranks elsewhere. Their old reservations are released when no rank uses them.
func (m *recovery) moveSome(ctx context.Context, params *startParams, ranks []int, reserve reserver) error {
	client, err := m.c.rt.placement()
	if err != nil {
		return err
	}
	rec := m.c.Record()
	request := params.restartProcess().request(rec)
	request.ID = fmt.Sprintf("%s-%d", rec.ReservationID(), rec.Generations)
	request.Mapping, request.PerInstance, request.FirstRank, request.Bundles = nil, 0, ranks[0], nil
	for _, rank := range ranks {
		request.Bundles = append(request.Bundles, params.bundle(rank))
	}
	got, err := reserve(client, ctx, request)
	if err != nil {
		return bus.Errorf(bus.CodeOf(err), "no other node has room for it: %w", err)
	}
	for i := range got.Workers {
		got.Workers[i].Rank = ranks[i]
	}
	return m.c.record.alterRestart(ctx, func(r *registry.RoleRecord) {
		for i, placed := range placementsOf(r.Name, got.Workers) {
			placed.Gen, placed.Reservation = r.Placements[ranks[i]].Gen, len(r.Reservations)
			r.Placements[ranks[i]] = placed
		}
		r.Reservations = append(r.Reservations, registry.ReservationRef{ID: got.ID, Token: got.Token, Over: got.SharesWith})
	})
}

// moveAll releases the reservations of the role, whose workers have all exited, and reserves again.
func (m *recovery) moveAll(ctx context.Context, params *startParams, reserve reserver) error {
	client, err := m.c.rt.placement()
	if err != nil {
		return err
	}
	rec := m.c.Record()
	held, err := withUnrecorded(ctx, client, rec.ReservationID(), rec.Reservations)
	if err == nil {
		err = release(ctx, client, held)
	}
	if err == nil {
		err = m.c.record.alterRestart(ctx, func(r *registry.RoleRecord) { r.Reservations = nil })
	}
	if err != nil {
		return err
	}
	request := params.restartProcess().request(rec)
	request.ID = fmt.Sprintf("%s-%d", rec.ReservationID(), rec.Generations)
	if n := len(request.Bundles); n > 1 && n != rec.World { // resized
		request.Bundles = nil
		for rank := range rec.World {
			request.Bundles = append(request.Bundles, params.bundle(rank))
		}
	}
	instances, err := request.Instances()
	if err != nil {
		return err
	}
	var placements []registry.RankPlacement
	for i, one := range instances {
		got, err := reserve(client, ctx, one)
		if err != nil {
			return bus.Errorf(bus.CodeOf(err), "the other nodes have no room for the role: %w", err)
		}
		for _, placed := range placementsOf(m.c.Name(), got.Workers) {
			placed.Reservation = i
			placements = append(placements, placed)
		}
		if err := m.c.record.alterRestart(ctx, func(r *registry.RoleRecord) {
			r.Reservations = append(r.Reservations, registry.ReservationRef{ID: got.ID, Token: got.Token, Over: got.SharesWith})
		}); err != nil {
			return err
		}
	}
	return m.c.record.alterRestart(ctx, func(r *registry.RoleRecord) {
		for rank := range placements {
			placements[rank].Gen = r.Placements[rank].Gen
		}
		r.Placements = placements
	})
}
