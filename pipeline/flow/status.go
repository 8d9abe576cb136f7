package flow

import "time"

// StageStatus is the state of a stage. Times are of the handler, from start to result.
type StageStatus struct {
	Name     string  `json:"name"`
	Role     string  `json:"role,omitempty"`
	Workers  int     `json:"workers"`
	Credits  int     `json:"credits"`
	InFlight int     `json:"in_flight"`
	Waiting  int     `json:"waiting"` // taken from the streams and not started
	Paused   bool    `json:"paused,omitempty"`
	Handled  uint64  `json:"handled"`
	PerS     float64 `json:"per_s"`
	Retries  uint64  `json:"retries"`
	Lost     uint64  `json:"lost"`
	Aborted  uint64  `json:"aborted"`
	Dead     uint64  `json:"dead"`
	P50      float64 `json:"p50_us"`
	P99      float64 `json:"p99_us"`
	// Restarting is the number of ranks whose restart by their role is awaited.
	Restarting int `json:"restarting,omitempty"`
	// Death is set while the stage has no workers because its role has died.
	Death *RoleDeath `json:"death,omitempty"`
}

// RoleDeath is the end of the role whose ranks were the workers of a stage.
type RoleDeath struct {
	Role  string    `json:"role"`
	At    time.Time `json:"at"`
	Cause string    `json:"cause"`
}

// StreamStatus is the state of a stream.
type StreamStatus struct {
	Name     string  `json:"name"`
	Items    int     `json:"items"` // not completed
	MaxItems int     `json:"max_items"`
	Bytes    int64   `json:"bytes"`
	MaxBytes int64   `json:"max_bytes"`
	InMemory int     `json:"in_memory"`
	Blocked  int     `json:"blocked"` // puts that wait for room
	In       uint64  `json:"in"`
	Out      uint64  `json:"out"`
	InPerS   float64 `json:"in_per_s"`
	OutPerS  float64 `json:"out_per_s"`
	Oldest   float64 `json:"oldest_s"` // age of the oldest item in memory
	Dropped  uint64  `json:"dropped"`
	Expired  uint64  `json:"expired"`
	Late     uint64  `json:"late"`
	Stale    uint64  `json:"stale"`
}

// rate is the growth of a counter per second, over the last second or two.
type rate struct {
	last uint64
	at   time.Time
	perS float64
}

func (r *rate) observe(n uint64, now time.Time) {
	if d := now.Sub(r.at); d >= time.Second {
		if !r.at.IsZero() {
			r.perS = float64(n-r.last) / d.Seconds()
		}
		r.last, r.at = n, now
	}
}

// Sample updates the rates, at most once a second.
func (f *Flow) Sample() {
	if f.Now.Sub(f.sampled) < time.Second {
		return
	}
	f.sampled = f.Now
	for _, s := range f.Stages {
		s.rate.observe(s.handled, f.Now)
	}
	for _, s := range f.streams {
		s.inRate.observe(s.in, f.Now)
		s.outRate.observe(s.out, f.Now)
	}
}

func (f *Flow) Status() (stages []StageStatus, streams []StreamStatus) {
	for _, s := range f.Stages {
		stages = append(stages, s.status())
	}
	for _, s := range f.streams {
		streams = append(streams, f.streamStatus(s))
	}
	return stages, streams
}

func (s *StageState) status() StageStatus {
	out := StageStatus{
		Name: s.Spec.Name, Role: s.Spec.Role, Workers: len(s.Workers.All), InFlight: len(s.running), Waiting: s.waiting(), Paused: s.paused,
		Handled: s.handled, Retries: s.failed, Lost: s.lost, Aborted: s.aborted, Dead: s.dead, PerS: s.rate.perS,
		P50: float64(s.times.quantile(0.5).Microseconds()), P99: float64(s.times.quantile(0.99).Microseconds()),
		Restarting: s.Restarting, Death: s.Death,
	}
	if s.Spec.Func != nil {
		out.Workers = s.Spec.Workers
	}
	for _, slots := range s.Workers.All {
		out.Credits += slots.Credits
	}
	return out
}

func (f *Flow) streamStatus(s *StreamState) StreamStatus {
	out := StreamStatus{
		Name: s.spec.Name, Items: s.items, MaxItems: s.spec.Items, Bytes: s.bytes, MaxBytes: s.spec.Bytes, Blocked: s.waiting.len(),
		In: s.in, Out: s.out, InPerS: s.inRate.perS, OutPerS: s.outRate.perS,
		Dropped: s.dropped, Expired: s.expired, Late: s.late, Stale: s.stale,
	}
	oldest := time.Time{}
	see := func(e *Entry) {
		if e.Lane.stream == s && (oldest.IsZero() || e.Stored.Before(oldest)) {
			oldest = e.Stored
		}
	}
	for _, l := range s.lanes {
		out.InMemory += l.ready.len()
		if l.ready.len() > 0 {
			see(l.ready.front())
		}
	}
	for _, st := range f.Stages {
		for _, t := range st.running {
			for _, e := range t.Entries {
				see(e)
			}
		}
		st.eachWaiting(func(w *Work) {
			for _, e := range w.Entries {
				see(e)
			}
		})
		if st.groups != nil && len(st.groups.order) > 0 {
			see(st.groups.order[0].entries[0])
		}
	}
	if !oldest.IsZero() {
		out.Oldest = f.Now.Sub(oldest).Seconds()
	}
	return out
}
