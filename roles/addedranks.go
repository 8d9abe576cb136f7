package roles

import (
	"context"
	"slices"
	"time"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/dispatch"
)

// Calls that are made while a role grows reach its new ranks afterwards: a driver that makes them without a pause would
// keep the role from growing.
const (
	replayPasses      = 3                // before new ranks take calls
	lateReplayPasses  = 1000             // afterwards: later calls go to all ranks
	lateReplayTimeout = 10 * time.Minute // bounds those
)

// forAdded is the arguments of a recorded call for ranks that are being added, from the first one on: what the ranks at
// the same place of the earlier replicas were given. Ranks that have arguments, or to which the method does not go, are
// left out. It fails if the earlier replicas were not given the same.
func (call replayedCall) forAdded(ranks []int, mode dispatch.Mode, replica int) ([]replayPart, error) {
	var out []replayPart
	for _, rank := range ranks {
		if call.partOf(rank) != nil || mode == dispatch.RankZero {
			continue
		}
		part, err := call.ofReplicas(rank%replica, ranks[0], replica)
		if err != nil {
			return nil, err
		}
		if part == nil {
			continue
		}
		one := *part
		one.Ranks = []int{rank}
		out = append(out, one)
	}
	return out, nil
}

// ofReplicas is what the ranks at one place of each replica were given, of those below a rank; nil: nothing.
func (call replayedCall) ofReplicas(place, below, replica int) (*replayPart, error) {
	var given *replayPart
	called := 0
	for rank := place; rank < below; rank += replica {
		part := call.partOf(rank)
		if part == nil {
			continue
		}
		if called++; given != nil && !given.sameArguments(*part) {
			return nil, bus.Errorf(bus.CodeRefused, "%s is replayed on new ranks, and its last call gave ranks different arguments, so that none are known for a new one: call %s with the same arguments for every rank first, or create the role with more workers",
				call.Method, call.Method)
		}
		given = part
	}
	if called > 0 && called*replica < below {
		return nil, bus.Errorf(bus.CodeRefused, "%s is replayed on new ranks, and its last calls did not reach every rank, so that no arguments are known for a new one: call %s on all ranks first", call.Method, call.Method)
	}
	return given, nil
}

// replayOnAdded makes the recorded calls on ranks that are being added, in order, and records that these ranks have
// their arguments. Calls that were recorded meanwhile are made too, in so many passes at most.
func (k *replayer) replayOnAdded(ctx context.Context, ranks []int, passes int) error {
	for range passes {
		missing, err := k.missingCalls(ctx, ranks)
		if err != nil || len(missing) == 0 {
			return err
		}
		for _, call := range missing {
			if err := k.replayOne(ctx, call, ranks); err != nil {
				return err
			}
		}
		if err := k.recordAdded(ctx, missing); err != nil {
			return err
		}
	}
	return nil
}

// missingCalls is the recorded calls that some of the ranks have no arguments of, with the arguments of those ranks alone.
func (k *replayer) missingCalls(ctx context.Context, ranks []int) ([]replayedCall, error) {
	calls, err := k.recordedCalls(ctx)
	if err != nil {
		return nil, err
	}
	rec := k.c.Record()
	var missing []replayedCall
	for _, call := range calls {
		info, err := rec.Method(call.Method)
		if err != nil {
			return nil, err
		}
		parts, err := call.forAdded(ranks, dispatch.Mode(info.Mode), rec.Mesh.TP*rec.Mesh.CP)
		if err != nil {
			return nil, err
		}
		if len(parts) > 0 {
			missing = append(missing, call.withParts(parts))
		}
	}
	return missing, nil
}

// recordAdded adds the arguments of new ranks to the recorded calls, unless another call has been recorded meanwhile.
func (k *replayer) recordAdded(ctx context.Context, added []replayedCall) error {
	for _, one := range added {
		k.extend(k.c.rt.ep.References(), one)
	}
	return k.editReplays(ctx, k.c.Record(), func(all *replays) error {
		for i, call := range all.Calls {
			at := slices.IndexFunc(added, func(one replayedCall) bool { return one.Method == call.Method })
			if at >= 0 && added[at].continues(call) {
				all.Calls[i] = call.withParts(append(slices.Clone(call.Parts), added[at].Parts...))
			}
		}
		return nil
	})
}

// continues reports whether the arguments for new ranks are those of a recorded call.
func (call replayedCall) continues(recorded replayedCall) bool {
	for _, p := range call.Parts {
		if recorded.Parts == nil || recorded.partOf(p.Ranks[0]) != nil || !slices.ContainsFunc(recorded.Parts, p.sameArguments) {
			return false
		}
	}
	return true
}

// extend adds the arguments of new ranks to a kept call.
func (k *replayer) extend(refs *values.References, added replayedCall) {
	k.mu.Lock()
	var unused []wire.Reference
	if kept := k.kept[added.Method]; kept != nil && added.continues(*kept) {
		unused = k.keepLocked(refs, kept.withParts(append(slices.Clone(kept.Parts), added.Parts...)))
	}
	k.mu.Unlock()
	refs.Release(unused...)
}

// forgetRanks removes the ranks from one on from the recorded calls, before new workers get them.
func (k *replayer) forgetRanks(ctx context.Context, first int) error {
	rec := k.c.Record()
	if !rec.ReplaysCalls() {
		return nil
	}
	if err := k.flush(ctx); err != nil {
		return err
	}
	refs := k.c.rt.ep.References()
	var unused []wire.Reference
	k.mu.Lock()
	for _, call := range k.kept {
		unused = append(unused, k.keepLocked(refs, call.below(first))...)
	}
	k.mu.Unlock()
	refs.Release(unused...)
	return k.editReplays(ctx, rec, func(all *replays) error {
		for i, call := range all.Calls {
			if call.Parts != nil {
				all.Calls[i] = call.below(first)
			}
		}
		return nil
	})
}

// below is the call for the ranks below one.
func (call replayedCall) below(first int) replayedCall {
	if call.Parts == nil {
		return call
	}
	parts := []replayPart{}
	for _, p := range call.Parts {
		p.Ranks = slices.DeleteFunc(slices.Clone(p.Ranks), func(rank int) bool { return rank >= first })
		if len(p.Ranks) > 0 {
			parts = append(parts, p)
		}
	}
	return call.withParts(parts)
}

// replayLate makes a call on ranks that have been added while it ran.
func (k *replayer) replayLate(ranks []int) {
	ctx, cancel := context.WithTimeout(k.c.rt.ctx, lateReplayTimeout)
	defer cancel()
	if err := k.replayOnAdded(ctx, ranks, lateReplayPasses); err != nil && !k.c.life.isOver() && k.c.rt.ctx.Err() == nil {
		k.c.rt.log.Error("roles: ranks that were added during a call lack what it gave the others; make the call again", "role", k.c.Name(), "ranks", ranks, "error", err)
	}
}
