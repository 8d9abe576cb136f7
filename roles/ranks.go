package roles

import (
	"context"
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
	if !c.rt.spawn(func() { c.sendRankChanges(ctx, ch) }) {
		close(ch)
	}
	return ch
}

func (c *Cluster) sendRankChanges(ctx context.Context, ch chan<- RankChange) {
	defer close(ch)
	sent := map[int]RankChange{}
	for {
		beats, livenessCh := c.liveness.states()
		away, gateCh := c.gate.Away()
		over, world := c.isOver(), c.WorldSize()
		now := map[int]RankChange{}
		for _, b := range beats {
			change := RankChange{Rank: b.Rank, Gen: b.Gen, State: RankReady}
			switch {
			case over || b.Rank >= world:
				change.State = RankRemoved
			case b.State.Over() && c.restartable():
				change.State = RankRestarting
			case b.State.Over():
				change.State = RankLost
			}
			now[b.Rank] = change
		}
		for _, rank := range away {
			if change, ok := now[rank]; ok && change.State == RankReady {
				change.State = RankRestarting
				now[rank] = change
			}
		}
		for rank := range len(beats) {
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
		if over {
			return
		}
		select {
		case <-livenessCh:
		case <-gateCh:
		case <-ctx.Done():
			return
		case <-c.rt.ctx.Done():
			return
		}
	}
}
