package roles

import (
	"context"
	"errors"
	"slices"
	"time"

	"troupe/bus"
)

// RankState is whether a rank takes calls.
type RankState string

const (
	RankReady      RankState = "ready"      // it takes calls
	RankRestarting RankState = "restarting" // its worker is being replaced; calls wait
	RankLost       RankState = "lost"       // its worker has ended and is not replaced; calls fail
	RankRemoved    RankState = "removed"    // the role has become smaller, or has ended
)

// RankChange is a new state of a rank, or a new worker of it.
type RankChange struct {
	Rank  int
	Gen   uint32 // generation of the worker
	State RankState
}

// RankChanges sends the state of every rank, then each change, until ctx ends or the role has; then it closes the channel.
// A slow reader misses intermediate states of a rank, and never the last one.
func (c *Cluster) RankChanges(ctx context.Context) <-chan RankChange {
	ch := make(chan RankChange)
	if !c.rt.spawn(func() { sendRankChanges(ctx, c, ch) }) {
		close(ch)
	}
	return ch
}

// rankStates is the state of every rank, and channels that are closed at the next change.
func rankStates(c *Cluster) (now []RankChange, changedCh, gateCh <-chan struct{}) {
	ranks, changedCh := c.life.ranks()
	away, gateCh := c.gate.Away()
	over, world := c.life.isOver(), c.WorldSize()
	for rank, b := range ranks {
		change := RankChange{Rank: rank, Gen: b.Gen, State: RankReady}
		switch {
		case over || rank >= world:
			change.State = RankRemoved
		case b.State.Over() && c.life.replaces():
			change.State = RankRestarting
		case b.State.Over():
			change.State = RankLost
		case slices.Contains(away, rank):
			change.State = RankRestarting
		}
		now = append(now, change)
	}
	return now, changedCh, gateCh
}

func sendRankChanges(ctx context.Context, c *Cluster, ch chan<- RankChange) {
	defer close(ch)
	sent := map[int]RankChange{}
	for {
		now, changedCh, gateCh := rankStates(c)
		for rank := range now {
			last, known := sent[rank]
			if last == now[rank] || !known && now[rank].State == RankRemoved {
				continue
			}
			select {
			case ch <- now[rank]:
				sent[rank] = now[rank]
			case <-ctx.Done():
				return
			case <-c.rt.ctx.Done():
				return
			}
		}
		if c.life.isOver() && !slices.ContainsFunc(now, func(r RankChange) bool { return r.State != RankRemoved }) {
			return
		}
		select {
		case <-changedCh:
		case <-gateCh:
		case <-ctx.Done():
			return
		case <-c.rt.ctx.Done():
			return
		}
	}
}

// trustReadyAfter is after how long a worker whose call failed as lost, and that reports itself as ready, is trusted: its
// death would be known by then.
const trustReadyAfter = 3 * time.Second

// AwaitRestart returns nil when the rank takes calls again after its worker of that generation was lost: its role has
// replaced the worker, or the worker lives after all. Otherwise the error says why it will not: the role does not restart
// ranks, has ended, or has become smaller.
func (w Worker) AwaitRestart(ctx context.Context, generation uint32) error {
	if policy := w.cluster.Record().Policy; policy != RestartRank && policy != RestartRole {
		return bus.Errorf(bus.CodeWorkerLost, "role %s does not restart ranks", w.cluster.Name())
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	trusted := time.NewTimer(trustReadyAfter)
	defer trusted.Stop()
	ch, ready, trust := w.cluster.RankChanges(ctx), false, false
	for {
		select {
		case change, open := <-ch:
			switch {
			case !open && ctx.Err() != nil:
				return ctx.Err()
			case !open:
				return bus.Errorf(bus.CodeClosed, "role %s has ended", w.cluster.Name())
			case change.Rank != w.rank:
				continue
			case change.State == RankRemoved:
				return bus.Errorf(bus.CodeNotFound, "%s[%d] was removed", w.cluster.Name(), w.rank)
			case change.State == RankReady && change.Gen > generation:
				return nil
			}
			ready = change.State == RankReady
		case <-trusted.C:
			trust = true
		}
		if ready && trust {
			return nil
		}
	}
}

// Generation is the generation of the rank's worker; a replacement has a higher one.
func (w Worker) Generation() uint32 {
	if beats := w.cluster.Health(); w.rank < len(beats) {
		return beats[w.rank].Gen
	}
	return 0
}

// IsWorkerLost reports whether the error of a call means the end of its worker or role, rather than of the call.
func IsWorkerLost(err error) bool {
	var e *bus.Error
	switch bus.CodeOf(err) {
	case bus.CodeWorkerLost, bus.CodeClosed:
		return true
	case bus.CodeNotFound: // of the role; a missing method has a rank
		return errors.Is(err, bus.ErrNotFound) && !(errors.As(err, &e) && e.Rank >= 0)
	}
	return false
}
