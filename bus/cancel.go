package bus

import (
	"slices"
	"time"

	"troupe/bus/wire"
)

// lastWord is a frame to the workers of a call that is over.
type lastWord struct {
	subject string
	frame   wire.Frame
}

// tellCancelled tells the workers that nobody waits for them. If the word is lost, in an outage for instance, it is said
// again after the reconnect; and the next call says as much.
func (g *Gather) tellCancelled(ranks wire.RankSet) {
	f := wire.Frame{Kind: wire.KindCancel, Header: wire.Header{Session: g.ep.session, Seq: g.seq}}
	subject, _ := g.control(ranks, &f)
	_ = g.ep.send(subject, &f)
	g.ep.mu.Lock()
	defer g.ep.mu.Unlock()
	if len(g.ep.cancels) == maxCancels {
		g.ep.cancels = slices.Delete(g.ep.cancels, 0, maxCancels/2)
	}
	g.ep.cancels = append(g.ep.cancels, lastWord{subject, f})
}

// cancelAgain is when the cancels are said again after a reconnect.
var cancelAgain = []time.Duration{0, 2 * time.Second, 10 * time.Second}

// repeatCancels is called by the sweep alone.
func (e *Endpoint) repeatCancels(now time.Time, connected, anew bool) {
	e.mu.Lock()
	if anew && len(e.cancels) > 0 {
		e.cancelsAt = e.cancelsAt[:0]
		for _, after := range cancelAgain {
			e.cancelsAt = append(e.cancelsAt, now.Add(after))
		}
	}
	if !connected || len(e.cancelsAt) == 0 || now.Before(e.cancelsAt[0]) {
		e.mu.Unlock()
		return
	}
	cancels := slices.Clone(e.cancels)
	if e.cancelsAt = e.cancelsAt[1:]; len(e.cancelsAt) == 0 {
		e.cancels = nil
	}
	e.mu.Unlock()
	for i := range cancels {
		_ = e.send(cancels[i].subject, &cancels[i].frame) // and again; and the next call says as much
	}
}
