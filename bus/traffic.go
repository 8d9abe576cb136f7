package bus

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"troupe/bus/wire"
	"troupe/internal/ab"
)

// TrafficPath is a path of the bytes of values between processes.
type TrafficPath int

// The paths. A body that is published once for many ranks is counted once by its sender, and once by each process that receives it.
const (
	PathInline   TrafficPath = iota // in the frame of a call, an answer or a value
	PathChunks                      // in chunks over the bus
	PathShared                      // in place, in shared memory of the host
	PathDevice                      // tensors that stay on a device, copied there or by way of the host; sent counts what is lent
	TrafficPaths                    // the number of paths
)

func (p TrafficPath) String() string {
	return [...]string{"inline", "chunks", "shared", "device"}[p]
}

const (
	trafficEvery = 5 * time.Second // between two reports of an endpoint with news
	trafficIdle  = 12              // an endpoint without news reports every so many turns
	trafficRoles = 64              // roles in one report
)

// TrafficReport is what an endpoint has sent and received since it was opened, and the calls that it waits for.
type TrafficReport struct {
	Sent     [TrafficPaths]uint64 `msgpack:"sent"`
	Received [TrafficPaths]uint64 `msgpack:"received"`
	Pending  []PendingCalls       `msgpack:"pending,omitempty"`
	Last     bool                 `msgpack:"last,omitempty"` // the endpoint is closed
}

// PendingCalls are the calls of one endpoint on one role that are not over.
type PendingCalls struct {
	Role   string        `msgpack:"role"`
	Calls  int           `msgpack:"calls"`
	Oldest time.Duration `msgpack:"oldest"`
}

// traffic counts the bytes of an endpoint.
type traffic struct {
	sent, received [TrafficPaths]atomic.Uint64
}

// pathOf is the path of a frame's body. Other frames than those of calls and values are not counted.
func pathOf(k wire.Kind) (TrafficPath, bool) {
	switch k {
	case wire.KindCall, wire.KindSequence, wire.KindAnswer, wire.KindResolved:
		return PathInline, true
	case wire.KindChunk:
		return PathChunks, true
	}
	return 0, false
}

// countSent and CountReceived count bytes that have left or reached this process outside of the endpoint's own frames.
func (e *Endpoint) countSent(p TrafficPath, n int64)     { count(&e.traffic.sent[p], n) }
func (e *Endpoint) CountReceived(p TrafficPath, n int64) { count(&e.traffic.received[p], n) }

var countTraffic = ab.On(ab.Traffic)

func count(c *atomic.Uint64, n int64) {
	if countTraffic {
		c.Add(uint64(n))
	}
}

// Traffic returns the counters and the pending calls.
func (e *Endpoint) Traffic() TrafficReport {
	var r TrafficReport
	for p := range TrafficPaths {
		r.Sent[p], r.Received[p] = e.traffic.sent[p].Load(), e.traffic.received[p].Load()
	}
	r.Pending = e.pendingCalls(time.Now())
	return r
}

// pendingCalls counts the pending calls by role. Control verbs and probes are left out: they are no work.
func (e *Endpoint) pendingCalls(now time.Time) []PendingCalls {
	e.mu.Lock()
	all := e.pendingLocked()
	e.mu.Unlock()
	byRole := map[string]*PendingCalls{}
	for _, g := range all {
		if g.call.Control {
			continue
		}
		p := byRole[g.call.To.Role]
		if p == nil {
			p = &PendingCalls{Role: g.call.To.Role}
			byRole[p.Role] = p
		}
		g.mu.Lock()
		p.Calls, p.Oldest = p.Calls+1, max(p.Oldest, now.Sub(g.sentAt))
		g.mu.Unlock()
	}
	out := make([]PendingCalls, 0, len(byRole))
	for _, p := range byRole {
		out = append(out, *p)
	}
	slices.SortFunc(out, func(a, b PendingCalls) int { // the oldest first: they are kept where there are too many
		return cmp.Or(cmp.Compare(b.Oldest, a.Oldest), cmp.Compare(a.Role, b.Role))
	})
	return out[:min(len(out), trafficRoles)]
}

// reportLoop publishes the counters until the endpoint is closed, and a last time then. It starts at a random offset.
func (e *Endpoint) reportLoop() {
	t := time.NewTimer(rand.N(trafficEvery))
	defer t.Stop()
	var last TrafficReport
	for turn := 0; ; turn++ {
		select {
		case <-e.closedCh:
			if r := e.Traffic(); r.Sent != [TrafficPaths]uint64{} || r.Received != [TrafficPaths]uint64{} {
				r.Pending, r.Last = nil, true
				e.publishTraffic(r)
			}
			return
		case <-t.C:
			t.Reset(trafficEvery)
		}
		r := e.Traffic()
		if r.Sent != last.Sent || r.Received != last.Received || len(r.Pending)+len(last.Pending) > 0 || turn%trafficIdle == trafficIdle-1 {
			e.publishTraffic(r)
			last = r
		}
	}
}

func (e *Endpoint) publishTraffic(r TrafficReport) {
	if data, err := wire.Marshal(r); err == nil { // it consists of numbers and names
		_ = e.bus.publish(trafficOf(e.namespace, e.session), "", data) // the next report has everything that this one has
	}
}
