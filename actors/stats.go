package actors

import (
	"time"

	"troupe/bus/recorder"
)

// LatencyBounds are the upper bounds of the buckets of a MethodStats, in seconds: five in each decade, so that an estimate
// within a bucket is wrong by a factor of 1.6 at most. Longer calls are in the last bucket.
var LatencyBounds = [...]float64{
	0.0001, 0.00016, 0.00025, 0.0004, 0.00063,
	0.001, 0.0016, 0.0025, 0.004, 0.0063,
	0.01, 0.016, 0.025, 0.04, 0.063,
	0.1, 0.16, 0.25, 0.4, 0.63,
	1, 1.6, 2.5, 4, 6.3,
	10, 16, 25, 40, 63,
	100, 160, 250, 400, 630,
	1000,
}

// MethodStats counts the calls of one method that a worker has finished since it started.
type MethodStats struct {
	Method  string                         `msgpack:"m" json:"method"`
	Calls   uint64                         `msgpack:"n" json:"calls"`
	Errors  uint64                         `msgpack:"e,omitempty" json:"errors"` // of the calls
	Seconds float64                        `msgpack:"s" json:"seconds"`          // the sum of their run times
	Buckets [len(LatencyBounds) + 1]uint64 `msgpack:"h" json:"buckets"`          // calls by run time
}

// maxMethods bounds the methods that a worker counts one by one. Further ones are counted together under otherMethods.
const (
	maxMethods   = 64
	otherMethods = "(other)"
)

// callStats counts a worker's calls. The worker's lock guards it.
type callStats struct {
	methods []MethodStats
	changed []bool          // since the last heartbeat, by method
	names   []recorder.Text // by method
	done    uint64          // calls in all
}

// add counts a call that has ended. It returns the name of the method for the flight recorder.
func (s *callStats) add(method string, ran time.Duration, failed bool) (name recorder.Text) {
	i := s.index(method)
	m := &s.methods[i]
	s.changed[i] = true
	s.done++
	m.Calls++
	if failed {
		m.Errors++
	}
	seconds := ran.Seconds()
	m.Seconds += seconds
	bucket := 0
	for bucket < len(LatencyBounds) && seconds > LatencyBounds[bucket] {
		bucket++
	}
	m.Buckets[bucket]++
	if m.Method != method { // counted with others
		return recorder.TextOf(method)
	}
	return s.names[i]
}

// index finds the counters of a method, and makes them.
func (s *callStats) index(method string) int {
	for i := range s.methods {
		if s.methods[i].Method == method {
			return i
		}
	}
	if len(s.methods) >= maxMethods && method != otherMethods {
		return s.index(otherMethods)
	}
	s.methods, s.changed = append(s.methods, MethodStats{Method: method}), append(s.changed, false)
	s.names = append(s.names, recorder.TextOf(method))
	return len(s.methods) - 1
}

// reportStats returns the counters for a heartbeat.
func (w *Worker) reportStats(all bool) []MethodStats {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.stats.report(all)
}

// report returns the counters that have changed since the last report, or all of them.
func (s *callStats) report(all bool) []MethodStats {
	var out []MethodStats
	for i, m := range s.methods {
		if all || s.changed[i] {
			out = append(out, m)
		}
		s.changed[i] = false
	}
	return out
}
