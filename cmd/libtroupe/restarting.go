package main

import (
	"context"
	"errors"
	"slices"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/dispatch"
	"troupe/roles"
)

const (
	// stateRestarting is the state of a rank whose worker is being replaced: it has no worker that could tell its own.
	stateRestarting actors.State = "restarting"

	lossKnown = 2 * time.Second       // within it the record names the ranks whose workers were lost
	lossLook  = 20 * time.Millisecond // between two looks at the record
)

// restartingRanks are the ranks of a role whose workers are being replaced.
func restartingRanks(rec roles.Record) []int {
	if rec.State != roles.RoleRestarting || rec.Restart == nil {
		return nil
	}
	return rec.Restart.Ranks
}

// infos asks every worker about itself. A rank that is being restarted is not asked, and its state says so.
func (cl *cluster) infos(ctx context.Context) ([]actors.Info, error) {
	end := time.Now().Add(lossKnown)
	for {
		rec := cl.Record()
		all, err := cl.infosOf(ctx, rec)
		restarts := rec.Policy == roles.RestartRank || rec.Policy == roles.RestartRole
		if err == nil || !restarts || !errors.Is(err, bus.ErrWorkerLost) || cl.Record().State == roles.RoleFailed || time.Now().After(end) {
			return all, err
		}
		select { // a worker was lost, and the record does not say so yet
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(lossLook):
		}
	}
}

func (cl *cluster) infosOf(ctx context.Context, rec roles.Record) ([]actors.Info, error) {
	away := restartingRanks(rec)
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
		all[rank] = actors.Info{Role: rec.Name, Class: rec.Class, Rank: rank, World: rec.World, State: stateRestarting, Methods: rec.Methods, Open: rec.Open}
		if rank < len(rec.Seats) {
			all[rank].Gen, all[rank].Node = rec.Seats[rank].Gen, rec.Seats[rank].Node
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

// beats are what was last heard of each worker, with the ranks that are being restarted marked.
func (cl *cluster) beats() []actors.Beat {
	beats := slices.Clone(cl.Health())
	for _, rank := range restartingRanks(cl.Record()) {
		if rank < len(beats) {
			beats[rank].State, beats[rank].Calls, beats[rank].Queued, beats[rank].Busy = stateRestarting, 0, 0, 0
		}
	}
	return beats
}
