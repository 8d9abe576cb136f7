package dashboard

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
)

const (
	// silentAfter is how long a rank may be silent before the page shows it as silent. Hosts send heartbeats every second
	// or two.
	silentAfter = 6 * time.Second
	// forgetAfter is how long a silent rank is remembered.
	forgetAfter = 10 * time.Minute
	// maxRoles and maxRanks bound the memory of the observer. Further roles and ranks are not shown.
	maxRoles = 1024
	maxRanks = 64 << 10
	// maxMethods bounds the methods of a rank. A worker itself reports no more (see actors.MethodStats), but any client of
	// the bus can publish a heartbeat.
	maxMethods = 128
)

// Workers follows the heartbeats of all workers of all namespaces. It costs the workers nothing: they send them anyway.
type Workers struct {
	sub *bus.Subscription

	mu    sync.Mutex // guards what follows
	roles map[bus.Address]*roleState
	ranks int
}

type roleState struct {
	ranks   map[int]*rankState
	retired map[string]actors.MethodStats // counters of ranks that were replaced, by method
	seen    time.Time
}

type rankState struct {
	beat  actors.Heartbeat
	stats map[string]actors.MethodStats
	seen  time.Time
}

// WatchWorkers follows the heartbeats until Close.
func WatchWorkers(b *bus.Bus) (*Workers, error) {
	w := &Workers{roles: map[bus.Address]*roleState{}}
	sub, err := b.Subscribe(bus.Lives(), func(m *bus.Msg) { w.receive(m, time.Now()) })
	if err != nil {
		return nil, err
	}
	w.sub = sub
	return w, nil
}

// Close ends it.
func (w *Workers) Close() { _ = w.sub.Unsubscribe() } // fails only if the connection is closed

func (w *Workers) receive(m *bus.Msg, now time.Time) {
	role, ok := bus.ParseLife(m.Subject)
	f, err := wire.ParseFrame(m.Data)
	if !ok || err != nil || f.Kind != wire.KindBeat {
		return
	}
	var beats []actors.Heartbeat
	if wire.Unmarshal(f.Body, &beats) != nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.roles[role]
	if r == nil {
		if len(w.roles) >= maxRoles {
			w.forgetLocked(now)
		}
		if len(w.roles) >= maxRoles {
			return
		}
		r = &roleState{ranks: map[int]*rankState{}, retired: map[string]actors.MethodStats{}}
		w.roles[role] = r
	}
	r.seen = now
	for _, beat := range beats {
		w.takeLocked(r, beat, now)
	}
}

func (w *Workers) takeLocked(r *roleState, beat actors.Heartbeat, now time.Time) {
	state := r.ranks[beat.Rank]
	switch {
	case state == nil && w.ranks >= maxRanks:
		return
	case state == nil:
		state = &rankState{stats: map[string]actors.MethodStats{}}
		r.ranks[beat.Rank] = state
		w.ranks++
	case beat.Gen < state.beat.Gen:
		return // the last words of a worker that has been replaced
	case beat.Gen > state.beat.Gen:
		for method, s := range state.stats {
			count(r.retired, plus(r.retired[method], s))
		}
		state.stats = map[string]actors.MethodStats{}
	}
	for _, s := range beat.Stats {
		count(state.stats, s)
	}
	beat.Stats = nil
	state.beat, state.seen = beat, now
}

// count stores the counters of a method, unless there are too many methods.
func count(in map[string]actors.MethodStats, s actors.MethodStats) {
	if _, known := in[s.Method]; known || len(in) < maxMethods {
		in[s.Method] = s
	}
}

// plus adds the counters of one method.
func plus(a, b actors.MethodStats) actors.MethodStats {
	a.Method, a.Calls, a.Errors, a.Seconds = b.Method, a.Calls+b.Calls, a.Errors+b.Errors, a.Seconds+b.Seconds
	for i := range a.Buckets {
		a.Buckets[i] += b.Buckets[i]
	}
	return a
}

// Rank is one worker as its last heartbeat described it.
type Rank struct {
	Rank    int     `json:"rank"`
	Gen     uint32  `json:"gen"`
	State   string  `json:"state"` // as the worker says, or "silent"
	Method  string  `json:"method,omitempty"`
	Busy    float64 `json:"busy_s"` // how long its oldest call has been running
	Running int     `json:"running"`
	Queued  int     `json:"queued"`
	Done    uint64  `json:"done"`
	Node    string  `json:"node"`
	Error   string  `json:"error,omitempty"`
	Silent  float64 `json:"silent_s"` // since the last heartbeat
}

// RoleWorkers are the workers of a role and the counters of its methods.
type RoleWorkers struct {
	bus.Address
	Ranks   []Rank               `json:"ranks"`
	Methods []actors.MethodStats `json:"methods"`
	Lagging []LaggingRank        `json:"lagging,omitempty"` // that the other ranks wait for
	Skews   []MethodSkew         `json:"skews,omitempty"`   // by method
}

// MethodSkew is how much slower a method is on its slowest rank than on the median rank, since the workers started.
type MethodSkew struct {
	Method string  `json:"method"`
	Rank   int     `json:"rank"`
	Ratio  float64 `json:"ratio"` // of the mean run times
}

// skewFrom is the mean run time from which the ranks of a method are compared: below it, chance decides.
const skewFrom = 10 * time.Millisecond

// Roles are all roles whose workers have been heard, by name.
func (w *Workers) Roles(now time.Time) []RoleWorkers {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.forgetLocked(now)
	out := make([]RoleWorkers, 0, len(w.roles))
	for address, r := range w.roles {
		out = append(out, r.view(address, now))
	}
	slices.SortFunc(out, func(a, b RoleWorkers) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Role, b.Role), cmp.Compare(a.Incarnation, b.Incarnation))
	})
	return out
}

func (r *roleState) view(address bus.Address, now time.Time) RoleWorkers {
	v := RoleWorkers{Address: address, Ranks: make([]Rank, 0, len(r.ranks)), Methods: []actors.MethodStats{}}
	methods := maps.Clone(r.retired)
	for _, n := range slices.Sorted(maps.Keys(r.ranks)) {
		s := r.ranks[n]
		v.Ranks = append(v.Ranks, s.view(now))
		for method, stats := range s.stats {
			methods[method] = plus(methods[method], stats)
		}
	}
	for _, method := range slices.Sorted(maps.Keys(methods)) {
		v.Methods = append(v.Methods, methods[method])
	}
	v.Lagging, v.Skews = Lagging(v.Ranks), r.skews()
	return v
}

// skews compares the ranks, for each method that three or more have run.
func (r *roleState) skews() (out []MethodSkew) {
	means, slowest := map[string][]float64{}, map[string]MethodSkew{}
	for rank, s := range r.ranks {
		for method, m := range s.stats {
			if m.Calls == 0 {
				continue
			}
			mean := m.Seconds / float64(m.Calls)
			means[method] = append(means[method], mean)
			if known := slowest[method]; mean > known.Ratio || mean == known.Ratio && rank < known.Rank {
				slowest[method] = MethodSkew{Method: method, Rank: rank, Ratio: mean}
			}
		}
	}
	for _, method := range slices.Sorted(maps.Keys(means)) {
		if usual := median(means[method]); len(means[method]) >= 3 && usual >= skewFrom.Seconds() {
			skew := slowest[method]
			skew.Ratio /= usual
			out = append(out, skew)
		}
	}
	return out
}

func (s *rankState) view(now time.Time) Rank {
	b := s.beat
	v := Rank{
		Rank: b.Rank, Gen: b.Gen, State: string(b.State), Method: b.Method, Running: b.Calls, Queued: b.Queued, Done: b.Done, Node: b.Node,
		Busy: b.Busy.Seconds(), Silent: now.Sub(s.seen).Seconds(),
	}
	if b.Busy > 0 {
		v.Busy += v.Silent // it has gone on since
	}
	if b.Err != nil {
		v.Error = b.Err.Message
	}
	if now.Sub(s.seen) > silentAfter && b.State != actors.Stopped && b.State != actors.Failed {
		v.State = "silent"
	}
	return v
}

// forgetLocked drops the roles that have been silent for long, and those whose workers have all stopped a while ago.
func (w *Workers) forgetLocked(now time.Time) {
	for address, r := range w.roles {
		limit := forgetAfter
		if r.stopped() {
			limit = time.Minute
		}
		if now.Sub(r.seen) > limit {
			w.ranks -= len(r.ranks)
			delete(w.roles, address)
		}
	}
}

func (r *roleState) stopped() bool {
	for _, s := range r.ranks {
		if s.beat.State != actors.Stopped {
			return false
		}
	}
	return true
}
