package timeline

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/recorder"
	"troupe/bus/wire"
)

// Role is a role whose workers are asked.
type Role struct {
	Address bus.Address
	World   int
	Ranks   []int          // that are asked; nil: all
	Gens    map[int]uint32 // generations of replaced ranks
}

// Config is what Collect asks for.
type Config struct {
	Endpoint *calls.Endpoint
	Roles    []Role
	Last     time.Duration // zero: a minute
	// Wait bounds each request. Zero: two seconds.
	Wait time.Duration
	// RoundTrips is how often each clock is asked for before the records are. Zero: 5.
	RoundTrips int
	// MaxBytes bounds the answers of all workers of a role together. Zero: 64 MiB.
	MaxBytes int
	// NoCallers leaves out the processes that called the workers.
	NoCallers bool
}

const (
	minRankBytes = 4 << 10
	maxRankBytes = 512 << 10
	maxCallers   = 16 // calling processes that are asked
)

// Collect asks every worker for its flight recorder, and then the processes that called them. Workers that do not answer are in
// Silent; the error is that of a request which could not be sent.
func Collect(ctx context.Context, cfg Config) (*Timeline, error) {
	cfg.Last, cfg.Wait = cmp.Or(cfg.Last, time.Minute), cmp.Or(cfg.Wait, 2*time.Second)
	cfg.RoundTrips, cfg.MaxBytes = cmp.Or(cfg.RoundTrips, 5), cmp.Or(cfg.MaxBytes, 64<<20)
	c := &collector{cfg: cfg, clocks: map[string]clock{}, processes: map[string]map[recorder.Record]bool{}, lanes: map[laneID]*Lane{}}
	for _, r := range cfg.Roles {
		if err := c.askRole(ctx, r); err != nil {
			return nil, err
		}
	}
	if !cfg.NoCallers {
		c.askCallers(ctx)
	}
	return c.merge(), nil
}

// laneID names a lane: a rank of a role, or a process.
type laneID struct {
	role    string
	rank    int
	process string
}

// answer is a snapshot of one worker, or of a calling process.
type answer struct {
	role    string // empty: a calling process
	rank    int
	snap    recorder.Snapshot
	records []recorder.Record
}

type collector struct {
	cfg     Config
	answers []answer
	silent  []Silent

	mu        sync.Mutex // guards what follows
	clocks    map[string]clock
	processes map[string]map[recorder.Record]bool // records that are merged, by process
	lanes     map[laneID]*Lane
}

// clock is what is known of a process's clock: at the local time mid ± half it showed now.
type clock struct {
	now   int64
	wall  int64
	mid   int64
	half  int64
	trips int
}

// heard uses one answer, which was asked for at the local time sent and has arrived at arrived, to narrow the clock of its process.
func (c *collector) heard(s recorder.Snapshot, sent, arrived time.Time) {
	half := int64(arrived.Sub(sent)+1) / 2
	one := clock{now: s.Now, wall: s.Wall, mid: sent.UnixNano() + half, half: half, trips: 1}
	c.mu.Lock()
	defer c.mu.Unlock()
	if old, known := c.clocks[s.Process]; known {
		trips := old.trips + 1
		if old.half <= one.half {
			one = old
		}
		one.trips = trips
	}
	c.clocks[s.Process] = one
}

// askRole asks the workers of a role, first for their clocks alone, so that the length of the records does not count as uncertainty.
func (c *collector) askRole(ctx context.Context, r Role) error {
	ranks := r.Ranks
	if ranks == nil {
		ranks = make([]int, r.World)
		for i := range ranks {
			ranks[i] = i
		}
	}
	if len(ranks) == 0 {
		return nil
	}
	perRank := min(max(c.cfg.MaxBytes/max(r.World, 1), minRankBytes), maxRankBytes)
	for trip := range c.cfg.RoundTrips + 1 {
		request := calls.TimelineRequest{}
		last := trip == c.cfg.RoundTrips
		if last {
			request = calls.TimelineRequest{Last: c.cfg.Last, MaxBytes: perRank}
		}
		heard := ranks[:0:0]
		err := c.ask(ctx, r, ranks, request, func(a calls.Answer, s recorder.Snapshot, err error, sent, arrived time.Time) {
			switch {
			case err != nil && (last || trip == 0):
				c.silent = append(c.silent, Silent{Role: r.Address.Role, Rank: a.Rank, Error: err.Error()})
			case err == nil:
				heard = append(heard, a.Rank)
				c.heard(s, sent, arrived)
				if last {
					c.add(answer{role: r.Address.Role, rank: a.Rank, snap: s})
				}
			}
		})
		if err != nil {
			return err
		}
		slices.Sort(heard)
		if ranks = heard; len(ranks) == 0 {
			return nil
		}
	}
	return nil
}

// ask sends one request to ranks of a role and reports each answer.
func (c *collector) ask(ctx context.Context, r Role, ranks []int, q calls.TimelineRequest, each func(calls.Answer, recorder.Snapshot, error, time.Time, time.Time)) error {
	body, err := wire.Marshal([]any{[]any{q}, nil})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Wait)
	defer cancel()
	sent := time.Now()
	g, err := c.cfg.Endpoint.Scatter(ctx, calls.Call{
		To: r.Address, Method: actors.VerbTimeline, Control: true, World: r.World, Gens: r.Gens, AskAfter: c.cfg.Wait / 4,
		Parts: []calls.Part{{Scope: calls.Everyone(), Ranks: ranks, Some: len(ranks) < r.World, Body: body}},
	})
	if err != nil {
		return err
	}
	for {
		a, ok, err := g.Next(context.WithoutCancel(ctx)) // the call ends with ctx
		if err != nil || !ok {
			return err
		}
		arrived := time.Now()
		var s recorder.Snapshot
		if err = a.Err; err == nil {
			err = wire.Unmarshal(a.Body, &s)
		}
		each(a, s, err, sent, arrived)
	}
}

// add keeps an answer. Malformed records count as no answer.
func (c *collector) add(a answer) {
	records, err := a.snap.Records()
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.silent = append(c.silent, Silent{Role: a.role, Rank: a.rank, Error: err.Error()})
		return
	}
	a.records = records
	c.answers = append(c.answers, a)
}

// askCallers asks the processes that called the workers and are not among them.
func (c *collector) askCallers(ctx context.Context) {
	known, callers := map[string]bool{c.cfg.Endpoint.Session(): true}, map[string]int64{}
	for _, a := range c.answers {
		for _, r := range a.records {
			switch r.Kind {
			case recorder.Run:
				callers[r.Call.Session] = max(callers[r.Call.Session], r.End)
			case recorder.Call:
				known[r.Call.Session] = true
			}
		}
	}
	maps.DeleteFunc(callers, func(session string, _ int64) bool { return known[session] })
	sessions := slices.SortedFunc(maps.Keys(callers), func(a, b string) int { return cmp.Compare(callers[b], callers[a]) })
	var group sync.WaitGroup
	for _, session := range sessions[:min(len(sessions), maxCallers)] {
		group.Go(bus.Guard(func() { c.askCaller(ctx, session) }))
	}
	group.Wait()
	now := time.Now() // calls of this process itself
	s := recorder.Take(recorder.Query{Namespace: c.cfg.Endpoint.Namespace(), Last: c.cfg.Last})
	c.heard(s, now, time.Now())
	c.add(answer{rank: -1, snap: s})
}

// askCaller asks one calling process. One that is gone is left out: its lane would be empty.
func (c *collector) askCaller(ctx context.Context, session string) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Wait)
	defer cancel()
	for trip := range c.cfg.RoundTrips + 1 {
		request := calls.TimelineRequest{}
		last := trip == c.cfg.RoundTrips
		if last {
			request.Last = c.cfg.Last
		}
		sent := time.Now()
		s, err := c.cfg.Endpoint.AskTimeline(ctx, session, request)
		if err != nil {
			return
		}
		c.heard(s, sent, time.Now())
		if last {
			c.add(answer{rank: -1, snap: s})
		}
	}
}

// merge places all records on the local clock.
func (c *collector) merge() *Timeline {
	t := &Timeline{Namespace: c.cfg.Endpoint.Namespace(), Taken: time.Now().UTC(), LastS: c.cfg.Last.Seconds(), Lanes: []Lane{}, Silent: c.silent}
	if t.Silent == nil {
		t.Silent = []Silent{}
	}
	wanted := map[string]bool{}
	for _, r := range c.cfg.Roles {
		wanted[r.Address.Role] = true
	}
	for _, a := range c.answers {
		if a.role != "" {
			c.lane(laneID{role: a.role, rank: a.rank}, a.snap)
		}
		seen := c.processes[a.snap.Process]
		again := seen != nil
		if !again {
			seen = map[recorder.Record]bool{}
			c.processes[a.snap.Process] = seen
		}
		for _, r := range a.records {
			key := r
			if r.Open {
				key.End = 0
			}
			if seen[key] || a.role == "" && wanted[r.Role] && r.Role != "" { // workers answer for themselves
				continue
			}
			seen[key] = true
			id := laneID{role: r.Role, rank: int(r.Rank)}
			if r.Role == "" {
				id = laneID{rank: -1, process: a.snap.Process}
				if a.role != "" && a.snap.OwnProcess {
					id = laneID{role: a.role, rank: a.rank}
				}
			}
			lane := c.lane(id, a.snap)
			lane.Events = append(lane.Events, c.event(r, c.clocks[a.snap.Process]))
		}
	}
	for _, l := range c.lanes {
		if l.Role != "" || len(l.Events) > 0 {
			t.Lanes = append(t.Lanes, *l)
		}
	}
	t.sort()
	return t
}

func (c *collector) lane(id laneID, s recorder.Snapshot) *Lane {
	l := c.lanes[id]
	if l == nil {
		k := c.clocks[s.Process]
		l = &Lane{Role: id.role, Rank: id.rank, Events: []Event{}, Process: Process{
			ID: s.Process, PID: s.PID, Host: s.Host, Program: s.Program, Off: s.Off, Dropped: s.Dropped, Omitted: s.Omitted, RoundTrips: k.trips,
			OffsetS: time.Duration(k.wall - k.mid).Seconds(), UncertaintyS: time.Duration(k.half).Seconds(),
		}}
		if s.From > 0 {
			l.Process.From = k.local(s.From)
		}
		c.lanes[id] = l
	}
	return l
}

// local converts a time of the process to the local clock.
func (k clock) local(at int64) int64 { return k.mid + (at - k.now) }

func (c *collector) event(r recorder.Record, k clock) Event {
	return Event{
		Kind: r.Kind.String(), Name: r.Name, Begin: k.local(r.Begin), End: k.local(r.End), Queued: r.Queued, Bytes: r.Bytes,
		Open: r.Open, Failed: r.Failed, To: r.To, ToRank: int(r.ToRank), Call: idText(r.Call), Parent: idText(r.Parent),
	}
}

func itoa(n int) string    { return strconv.Itoa(n) }
func utoa(n uint64) string { return strconv.FormatUint(n, 10) }
