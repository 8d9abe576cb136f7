package values

import (
	"math/rand/v2"
	"sync/atomic"
	"time"

	"troupe/bus/wire"
)

// TrafficPath is a path of the bytes of values between processes.
type TrafficPath int

// The paths. A body that is published once for many ranks is counted once by its sender, and once by each process that receives it.
const (
	PathInline   TrafficPath = iota // in the frame of a call, an answer or a value
	PathChunks                      // in chunks over the bus
	PathShared                      // in place, in shared memory of the host
	PathDevice                      // tensors that stay on a device, copied there or by way of the host; sent counts what is lent
	PathDirect                      // over a connection between the two hosts
	TrafficPaths                    // the number of paths
)

func (p TrafficPath) String() string {
	return [...]string{"inline", "chunks", "shared", "device", "direct"}[p]
}

const (
	trafficEvery = 5 * time.Second // between two reports of a session with news
	trafficIdle  = 12              // a session without news reports every so many turns
	// MaxPendingRoles is the most roles in one report.
	MaxPendingRoles = 64
)

// TrafficReport is what a session has sent and received since it was opened, and the calls that it waits for.
type TrafficReport struct {
	Sent     [TrafficPaths]uint64 `msgpack:"sent"`
	Received [TrafficPaths]uint64 `msgpack:"received"`
	Pending  []PendingCalls       `msgpack:"pending,omitempty"`
	Last     bool                 `msgpack:"last,omitempty"` // the session is closed
}

// PendingCalls are the calls of one session on one role that are not over.
type PendingCalls struct {
	Role   string        `msgpack:"role"`
	Calls  int           `msgpack:"calls"`
	Oldest time.Duration `msgpack:"oldest"`
}

// traffic counts the bytes of a session.
type traffic struct {
	sent, received [TrafficPaths]atomic.Uint64
}

// CountSent and CountReceived count bytes that have left or reached this process outside of the store's own frames.
func (s *Store) CountSent(p TrafficPath, n int64)     { s.traffic.sent[p].Add(uint64(n)) }
func (s *Store) CountReceived(p TrafficPath, n int64) { s.traffic.received[p].Add(uint64(n)) }

// Traffic returns the counters.
func (s *Store) Traffic() TrafficReport {
	var r TrafficReport
	for p := range TrafficPaths {
		r.Sent[p], r.Received[p] = s.traffic.sent[p].Load(), s.traffic.received[p].Load()
	}
	return r
}

// ReportTraffic publishes the counters, and the pending calls of pendingFunc, until the session is closed, and the counters a last time then. It
// returns at once; pendingFunc may be nil.
func (s *Store) ReportTraffic(pendingFunc func() []PendingCalls) {
	s.session.Spawn(func() { s.reportLoop(pendingFunc) })
}

// reportLoop starts at a random offset.
func (s *Store) reportLoop(pendingFunc func() []PendingCalls) {
	t := time.NewTimer(rand.N(trafficEvery))
	defer t.Stop()
	var last TrafficReport
	for turn := 0; ; turn++ {
		select {
		case <-s.session.Done():
			if r := s.Traffic(); r.Sent != [TrafficPaths]uint64{} || r.Received != [TrafficPaths]uint64{} {
				r.Last = true
				s.publishTraffic(r)
			}
			return
		case <-t.C:
			t.Reset(trafficEvery)
		}
		r := s.Traffic()
		if pendingFunc != nil {
			r.Pending = pendingFunc()
		}
		if r.Sent != last.Sent || r.Received != last.Received || len(r.Pending)+len(last.Pending) > 0 || turn%trafficIdle == trafficIdle-1 {
			s.publishTraffic(r)
			last = r
		}
	}
}

func (s *Store) publishTraffic(r TrafficReport) {
	if data, err := wire.Marshal(r); err == nil { // it consists of numbers and names
		_ = s.session.Bus().Publish(trafficOf(s.namespace, s.name), data) // the next report has everything that this one has
	}
}
