package roles

import (
	"context"
	"fmt"
	"slices"
	"time"

	"troupe/bus"
	"troupe/placement"
)

// moveWait is how long a rank that is moved may wait in the queue for what it needs elsewhere.
const moveWait = 15 * time.Second

// move gives the ranks of a restart other seats whose nodes are to be avoided: those ranks alone, with a reservation of
// their own, or, if all of the role is restarted, the whole role with new ones.
func (c *Cluster) move(ctx context.Context, recipe *recipe) error {
	rec := c.Record()
	r := rec.Restart
	var ranks []int
	for _, rank := range r.Ranks {
		if slices.Contains(r.Avoid, rec.Seats[rank].Node) {
			ranks = append(ranks, rank)
		}
	}
	if len(ranks) == 0 && len(rec.Held) > 0 {
		return nil
	}
	if why := recipe.fixed(rec, ranks, r.Avoid); why != "" {
		return bus.Errorf(bus.CodeRefused, "it cannot be moved to another node: %s", why)
	}
	ctx, cancel := context.WithTimeout(ctx, min(moveWait, recipe.PlaceTimeout))
	defer cancel()
	at := rec.Seats[0].Node
	var err error
	if rec.Policy == RestartRole {
		err = c.moveAll(ctx, recipe)
	} else {
		err = c.moveSome(ctx, recipe, ranks)
	}
	if err != nil {
		return err
	}
	if c.Record().Seats[0].Node != at {
		return c.meetAt(ctx)
	}
	return nil
}

// fixed is why ranks cannot be moved; empty: they can.
func (r *recipe) fixed(rec Record, ranks []int, avoid []string) string {
	switch {
	case r.Needs.Mapping != nil && len(r.Needs.Mapping.Devices) > 0:
		return "its device mapping names exact devices; ask for bundles instead"
	case r.Over != "" || r.Needs.Colocate != "":
		return "it shares the devices of another reservation, which stays where it is"
	}
	for _, rank := range ranks {
		if node := r.bundle(rank).Node; node != "" && slices.Contains(avoid, node) {
			return fmt.Sprintf("rank %d is bound to node %s", rank, node)
		}
	}
	return ""
}

// bundle is what one rank takes.
func (r *recipe) bundle(rank int) placement.Bundle {
	switch all := r.Needs.Bundles; {
	case len(all) == 0:
		return placement.Bundle{}
	case rank < len(all):
		return all[rank]
	default:
		return all[len(all)-1]
	}
}

// moveSome reserves for some ranks elsewhere. What they leave is released with the others that are on it.
func (c *Cluster) moveSome(ctx context.Context, recipe *recipe, ranks []int) error {
	client, err := c.rt.placement()
	if err != nil {
		return err
	}
	rec := c.Record()
	request := recipe.process().request(rec)
	request.ID = fmt.Sprintf("%s-%d", reservationID(rec), rec.Gens)
	request.Mapping, request.PerInstance, request.FirstRank, request.Bundles = nil, 0, ranks[0], nil
	for _, rank := range ranks {
		request.Bundles = append(request.Bundles, recipe.bundle(rank))
	}
	got, err := client.Reserve(ctx, request)
	if err != nil {
		return bus.Errorf(bus.CodeOf(err), "there is no room for it on another node: %w", err)
	}
	for i := range got.Workers {
		got.Workers[i].Rank = ranks[i]
	}
	return c.alterRestart(ctx, func(r *Record) {
		for i, seat := range seatsOf(r.Name, got.Workers) {
			seat.Gen, seat.Held = r.Seats[ranks[i]].Gen, len(r.Held)
			r.Seats[ranks[i]] = seat
		}
		r.Held = append(r.Held, Held{ID: got.ID, Token: got.Token, Over: got.SharesWith})
	})
}

// moveAll gives back what the role holds, whose workers have all ended, and reserves for it anew.
func (c *Cluster) moveAll(ctx context.Context, recipe *recipe) error {
	client, err := c.rt.placement()
	if err != nil {
		return err
	}
	rec := c.Record()
	held, err := heldUnder(ctx, client, reservationID(rec), rec.Held)
	if err == nil {
		err = release(ctx, client, held)
	}
	if err == nil {
		err = c.alterRestart(ctx, func(r *Record) { r.Held = nil })
	}
	if err != nil {
		return err
	}
	request := recipe.process().request(rec)
	request.ID = fmt.Sprintf("%s-%d", reservationID(rec), rec.Gens)
	if n := len(request.Bundles); n > 1 && n != rec.World { // it has been resized
		request.Bundles = nil
		for rank := range rec.World {
			request.Bundles = append(request.Bundles, recipe.bundle(rank))
		}
	}
	instances, err := request.Instances()
	if err != nil {
		return err
	}
	var seats []Seat
	for i, one := range instances {
		got, err := client.Reserve(ctx, one)
		if err != nil {
			return bus.Errorf(bus.CodeOf(err), "there is no room for the role on other nodes: %w", err)
		}
		for _, seat := range seatsOf(c.Name(), got.Workers) {
			seat.Held = i
			seats = append(seats, seat)
		}
		if err := c.alterRestart(ctx, func(r *Record) { r.Held = append(r.Held, Held{ID: got.ID, Token: got.Token, Over: got.SharesWith}) }); err != nil {
			return err
		}
	}
	return c.alterRestart(ctx, func(r *Record) {
		for rank := range seats {
			seats[rank].Gen = r.Seats[rank].Gen
		}
		r.Seats = seats
	})
}

// alterRestart changes the record while this process restarts the role.
func (c *Cluster) alterRestart(ctx context.Context, change func(*Record)) error {
	gen := c.Record().Restart.Gen
	return c.alter(ctx, func(r *Record) error {
		if r.State != RoleRestarting || r.Restart == nil || r.Restart.Gen != gen {
			return errDeposed
		}
		change(r)
		return nil
	})
}
