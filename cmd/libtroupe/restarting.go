package main

import (
	"context"
	"errors"
	"slices"

	"troupe/actors"
	"troupe/bus"
	"troupe/dispatch"
	"troupe/roles/registry"
)

// stateRestarting is the state of a rank whose worker is being replaced.
const stateRestarting actors.State = "restarting"

// lossTries bounds the attempts of infos while workers are lost; a lost worker is not asked again.
const lossTries = 10

// infos asks every worker for its Info. A restarting rank is not asked, and its state says so.
func (cl *cluster) infos(ctx context.Context) (all []actors.Info, err error) {
	for range lossTries {
		all, err = cl.infosOf(ctx, cl.Record(), cl.Restarting())
		if !errors.Is(err, bus.ErrWorkerLost) || len(cl.Restarting()) == 0 {
			break
		}
	}
	return all, err
}

func (cl *cluster) infosOf(ctx context.Context, rec registry.RoleRecord, away []int) ([]actors.Info, error) {
	if len(away) == 0 {
		return cl.Info(ctx)
	}
	all := make([]actors.Info, rec.World)
	var there []int
	for rank := range all {
		if !slices.Contains(away, rank) {
			there = append(there, rank)
			continue
		}
		all[rank] = actors.Info{
			Role: rec.Name, Class: rec.Class, Rank: rank, World: rec.World, State: stateRestarting,
			Methods: rec.Methods, Open: rec.Open, DeviceTensors: rec.DeviceTensors,
		}
		if rank < len(rec.Placements) {
			all[rank].Gen, all[rank].Node = rec.Placements[rank].Gen, rec.Placements[rank].Node
		}
	}
	if len(there) == 0 {
		return all, nil
	}
	f, err := cl.Go(ctx, dispatch.Call{Method: actors.VerbInfo, Ranks: there, Control: true})
	if err != nil {
		return nil, err
	}
	told, err := dispatch.AwaitEach[actors.Info](ctx, f)
	if err != nil {
		return nil, err
	}
	for _, info := range told {
		all[info.Rank] = info
	}
	return all, nil
}

// beats returns the last heartbeat of each worker, with restarting ranks marked.
func (cl *cluster) beats() []actors.Heartbeat {
	beats := slices.Clone(cl.Health())
	for _, rank := range cl.Restarting() {
		if rank < len(beats) {
			beats[rank].State, beats[rank].Calls, beats[rank].Queued, beats[rank].Busy = stateRestarting, 0, 0, 0
		}
	}
	return beats
}
