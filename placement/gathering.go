package placement

import (
	"context"
	"time"
)

// gatherMost bounds how long a round is held up for those who are about to ask, however slow the disk is.
const gatherMost = 2 * time.Millisecond

// gathering lets those who ask again and again be written together. Whoever has just been answered is likely to ask next;
// without it the others, who came while the round was written, would be written by themselves, and everybody would wait
// for two writes instead of one. So the next round waits for as many as it knows of, for no longer than the last took
// to be written. The loop owns it.
type gathering struct {
	in     *inbox
	timer  *time.Timer
	expect int // requests that are there, or answered just now
	most   time.Duration
}

func newGathering(in *inbox) *gathering {
	g := &gathering{in: in, timer: time.NewTimer(time.Hour)}
	g.timer.Stop()
	return g
}

// after is the end of a round: so many requests were in it, and writing it, if anything was written, took so long.
func (g *gathering) after(calls int, written bool, took time.Duration) {
	g.expect, g.most = 0, 0
	if written {
		g.expect, g.most = calls+g.in.waiting(), min(took, gatherMost)
	}
}

// wait returns when all that are expected are there, or it is time. It reports whether anybody is.
func (g *gathering) wait(ctx context.Context) bool {
	if g.expect < 2 { // it comes when it comes
		return g.in.waiting() > 0
	}
	g.timer.Reset(g.most)
	defer g.timer.Stop()
	for !g.in.gather(g.expect) {
		select {
		case <-g.in.wakeCh:
		case <-g.timer.C:
			g.in.gather(0)
			return g.in.waiting() > 0
		case <-ctx.Done():
			return false
		}
	}
	return true
}
