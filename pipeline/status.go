package pipeline

import (
	"context"
	"time"
)

// Status is how a pipeline is.
type Status struct {
	Name      string         `json:"name"`
	Namespace string         `json:"namespace"`
	By        string         `json:"by"`
	Since     time.Time      `json:"since"`
	Version   Version        `json:"version"`
	Commits   uint64         `json:"commits"`
	Draining  bool           `json:"draining,omitempty"`
	Dead      int            `json:"dead"`          // letters that lie in the log
	GivenUp   uint64         `json:"dead_lettered"` // items that became dead letters since it was opened
	Stages    []StageStatus  `json:"stages"`
	Streams   []StreamStatus `json:"streams"`
}

// StageStatus is how a stage is. Times are of the handler, from hand-out to answer.
type StageStatus struct {
	Name     string  `json:"name"`
	Role     string  `json:"role,omitempty"`
	Workers  int     `json:"workers"`
	Credits  int     `json:"credits"`
	InFlight int     `json:"in_flight"`
	Waiting  int     `json:"waiting"` // taken out of the streams and not handed out
	Paused   bool    `json:"paused,omitempty"`
	Handled  uint64  `json:"handled"`
	PerS     float64 `json:"per_s"`
	Retries  uint64  `json:"retries"`
	Lost     uint64  `json:"lost"`
	Aborted  uint64  `json:"aborted"`
	Dead     uint64  `json:"dead"`
	P50      float64 `json:"p50_us"`
	P99      float64 `json:"p99_us"`
}

// StreamStatus is how a stream is.
type StreamStatus struct {
	Name     string  `json:"name"`
	Items    int     `json:"items"` // not done, in hand or not
	MaxItems int     `json:"max_items"`
	Bytes    int64   `json:"bytes"`
	MaxBytes int64   `json:"max_bytes"`
	InMemory int     `json:"in_memory"`
	Blocked  int     `json:"blocked"` // puts that wait for room
	In       uint64  `json:"in"`
	Out      uint64  `json:"out"`
	InPerS   float64 `json:"in_per_s"`
	OutPerS  float64 `json:"out_per_s"`
	Oldest   float64 `json:"oldest_s"` // of what is in memory
	Dropped  uint64  `json:"dropped"`
	Expired  uint64  `json:"expired"`
	Late     uint64  `json:"late"`
	Stale    uint64  `json:"stale"`
}

// rate is how fast a counter grows, over about the last second or two.
type rate struct {
	last uint64
	at   time.Time
	perS float64
}

func (r *rate) see(n uint64, now time.Time) {
	if d := now.Sub(r.at); d >= time.Second {
		if !r.at.IsZero() {
			r.perS = float64(n-r.last) / d.Seconds()
		}
		r.last, r.at = n, now
	}
}

// sample takes the rates, at most once a second.
func (p *Pipeline) sample() {
	if p.flow.now.Sub(p.sampled) < time.Second {
		return
	}
	p.sampled = p.flow.now
	for _, s := range p.flow.stages {
		p.rate("stage", s.spec.Name).see(s.handled, p.flow.now)
	}
	for _, s := range p.flow.streams {
		p.rate("in", s.spec.Name).see(s.in, p.flow.now)
		p.rate("out", s.spec.Name).see(s.out, p.flow.now)
	}
}

func (p *Pipeline) rate(kind, name string) *rate {
	key := kind + "." + name
	if p.rates[key] == nil {
		p.rates[key] = &rate{}
	}
	return p.rates[key]
}

// Status is how the pipeline is now.
func (p *Pipeline) Status(ctx context.Context) (Status, error) {
	var st Status
	err := p.do(ctx, func(p *Pipeline) { st = p.status() })
	return st, err
}

func (p *Pipeline) status() Status {
	f := p.flow
	st := Status{
		Name: p.at.Name, Namespace: p.at.Namespace, By: p.cfg.By, Since: p.began, Version: f.version, Commits: f.number, Draining: f.closed, Dead: p.dead, GivenUp: p.report.total,
	}
	for _, s := range f.stages {
		st.Stages = append(st.Stages, p.stageStatus(s))
	}
	for _, s := range f.streams {
		st.Streams = append(st.Streams, p.streamStatus(s))
	}
	return st
}

func (p *Pipeline) stageStatus(s *stage) StageStatus {
	out := StageStatus{
		Name: s.spec.Name, Role: s.spec.Role, Workers: len(s.hands.all), InFlight: len(s.running), Waiting: s.waits(), Paused: s.paused,
		Handled: s.handled, Retries: s.failed, Lost: s.lost, Aborted: s.aborted, Dead: s.dead, PerS: p.rate("stage", s.spec.Name).perS,
		P50: float64(s.times.quantile(0.5).Microseconds()), P99: float64(s.times.quantile(0.99).Microseconds()),
	}
	if s.spec.Func != nil {
		out.Workers = s.spec.Workers
	}
	for _, h := range s.hands.all {
		out.Credits += h.credits
	}
	return out
}

func (p *Pipeline) streamStatus(s *stream) StreamStatus {
	out := StreamStatus{
		Name: s.spec.Name, Items: s.items, MaxItems: s.spec.Items, Bytes: s.bytes, MaxBytes: s.spec.Bytes, Blocked: s.waiting.len(),
		In: s.in, Out: s.out, InPerS: p.rate("in", s.spec.Name).perS, OutPerS: p.rate("out", s.spec.Name).perS,
		Dropped: s.dropped, Expired: s.expired, Late: s.late, Stale: s.stale,
	}
	oldest := time.Time{}
	see := func(e *entry) {
		if e.lane.stream == s && (oldest.IsZero() || e.Stored.Before(oldest)) {
			oldest = e.Stored
		}
	}
	for _, l := range s.lanes {
		out.InMemory += l.ready.len()
		if l.ready.len() > 0 {
			see(l.ready.front())
		}
	}
	for _, st := range p.flow.stages {
		for _, t := range st.running {
			for _, e := range t.entries {
				see(e)
			}
		}
		st.eachWaiting(func(w *work) {
			for _, e := range w.entries {
				see(e)
			}
		})
		if st.groups != nil && len(st.groups.order) > 0 {
			see(st.groups.order[0].entries[0])
		}
	}
	if !oldest.IsZero() {
		out.Oldest = p.flow.now.Sub(oldest).Seconds()
	}
	return out
}
