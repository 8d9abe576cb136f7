package benchmarks

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"troupe/bus"
	"troupe/placement"
	"troupe/roles"
)

// HeadsConfig configures Heads.
type HeadsConfig struct {
	Program     string   // the troupe program, which is heads, agent and workers
	Repetitions int      // of each fault; zero: 10
	Faults      []string // zero: HeadFaults
	Log         func(string, ...any)
}

// HeadsResult is what one fault did to calls and grants that were made without a pause. Each time is that of the slowest call or grant of a
// repetition, of which there are a median and a worst one.
type HeadsResult struct {
	Fault        string  `json:"fault"`
	N            int     `json:"n"`
	CallsMedian  float64 `json:"calls_ms_median"`
	CallsWorst   float64 `json:"calls_ms_worst"`
	GrantsMedian float64 `json:"grants_ms_median"`
	GrantsWorst  float64 `json:"grants_ms_worst"`
	Calls        int     `json:"calls"`
	Grants       int     `json:"grants"`
	Lost         int     `json:"lost"`    // calls without an answer, or with an error
	Doubled      int     `json:"doubled"` // calls that ran more than once
	JobsEnded    int     `json:"jobs_ended"`
}

// headFault is done to the heads, and undone.
type headFault struct {
	name string
	do   func(r *headsRig, leader int) error
	undo func(ctx context.Context, r *headsRig, leader int) error
	// down: nothing goes on before it is undone.
	down bool
}

var headFaults = []headFault{
	{"leader_killed", kills(0), restarts(false, 0), false},
	{"other_killed", kills(1), restarts(false, 1), false},
	{"leader_stopped", stops(0), resumes(0), false},
	{"other_stopped", stops(1), resumes(1), false},
	{"leader_ended", ends(0), restarts(false, 0), false},
	{"upgrade", (*headsRig).upgrade, func(context.Context, *headsRig, int) error { return nil }, false},
	{"disk_wiped", kills(0), restarts(true, 0), false},
	{"all_killed", kills(0, 1, 2), restarts(false, 0, 1, 2), true},
}

// HeadFaults are the names of the faults.
func HeadFaults() (names []string) {
	for _, f := range headFaults {
		names = append(names, f.name)
	}
	return names
}

// members are those at a distance from the leader.
func (r *headsRig) from(leader int, distances []int) (which []int) {
	for _, d := range distances {
		which = append(which, (leader+d)%len(r.members))
	}
	return which
}

func each(distances []int, do func(r *headsRig, i int) error) func(*headsRig, int) error {
	return func(r *headsRig, leader int) (err error) {
		for _, i := range r.from(leader, distances) {
			err = errors.Join(err, do(r, i))
		}
		return err
	}
}

func kills(distances ...int) func(*headsRig, int) error {
	return each(distances, func(r *headsRig, i int) error { return r.members[i].Kill() })
}

func ends(distances ...int) func(*headsRig, int) error {
	return each(distances, func(r *headsRig, i int) error { return r.members[i].Stop() })
}

func stops(distances ...int) func(*headsRig, int) error {
	return each(distances, func(r *headsRig, i int) error { return r.signal(i, syscall.SIGSTOP) })
}

func resumes(distances ...int) func(context.Context, *headsRig, int) error {
	resume := each(distances, func(r *headsRig, i int) error { return r.signal(i, syscall.SIGCONT) })
	return func(_ context.Context, r *headsRig, leader int) error { return resume(r, leader) }
}

func restarts(wiped bool, distances ...int) func(context.Context, *headsRig, int) error {
	return func(ctx context.Context, r *headsRig, leader int) error {
		return r.restart(ctx, wiped, r.from(leader, distances)...)
	}
}

// Heads injects faults into the heads of a cluster of three while drivers call workers and reserve devices. One driver is connected to each
// head. The workers and their agent are on none of the hosts that fail.
func Heads(ctx context.Context, cfg HeadsConfig, each func(HeadsResult) error) (err error) {
	if cfg.Repetitions == 0 {
		cfg.Repetitions = 10
	}
	if cfg.Log == nil {
		cfg.Log = func(string, ...any) {}
	}
	dir, err := os.MkdirTemp("", "troupe-heads-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	r, err := startHeadsRig(ctx, cfg.Program, dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	for _, f := range headFaults {
		if len(cfg.Faults) > 0 && !slices.Contains(cfg.Faults, f.name) {
			continue
		}
		result := HeadsResult{Fault: f.name, N: cfg.Repetitions}
		var calls, grants []time.Duration
		for i := range cfg.Repetitions {
			load, err := r.underLoad(ctx, f)
			if err != nil {
				return fmt.Errorf("%s: %w", f.name, err)
			}
			for _, err := range load.errs {
				cfg.Log("%s: %v", f.name, err)
			}
			cfg.Log("%s %d: calls %v, grants %v", f.name, i+1, load.calls.worst(), load.grants.worst())
			calls, grants = append(calls, load.calls.worst()), append(grants, load.grants.worst())
			result.Calls, result.Grants = result.Calls+int(load.calls.n.Load()), result.Grants+int(load.grants.n.Load())
			result.Lost, result.Doubled, result.JobsEnded = result.Lost+load.lost, result.Doubled+load.doubled, result.JobsEnded+load.ended
		}
		slices.Sort(calls)
		slices.Sort(grants)
		result.CallsMedian, result.CallsWorst = *milliseconds(calls, 0.5), *milliseconds(calls, 1)
		result.GrantsMedian, result.GrantsWorst = *milliseconds(grants, 0.5), *milliseconds(grants, 1)
		if err := each(result); err != nil {
			return err
		}
	}
	return nil
}

// headsLoad is the load during one fault.
type headsLoad struct {
	rig    *headsRig
	roles  []*roles.Cluster
	calls  slowest
	grants slowest

	mu      sync.Mutex // guards what follows
	lost    int
	doubled int
	ended   int // jobs
	errs    []error
}

// slowest counts what has ended, and keeps the longest time.
type slowest struct {
	n    atomic.Int64
	most atomic.Int64
}

func (s *slowest) add(d time.Duration) {
	for most := s.most.Load(); int64(d) > most && !s.most.CompareAndSwap(most, int64(d)); most = s.most.Load() {
	}
	s.n.Add(1)
}

func (s *slowest) worst() time.Duration { return time.Duration(s.most.Load()) }

const (
	headsCallLimit = 2 * time.Minute        // a call without an answer is lost
	headsGrants    = 20 * time.Millisecond  // between two grants
	headsSteady    = 500 * time.Millisecond // of load before a fault, and after it
	headsGoOn      = 20                     // calls of each driver and grants after which they go on
)

// underLoad does a fault, undoes it, and returns when everything goes on and every replica is up to date.
func (r *headsRig) underLoad(ctx context.Context, f headFault) (l *headsLoad, err error) {
	l = &headsLoad{rig: r}
	run, cancel := context.WithCancel(ctx)
	var group sync.WaitGroup
	defer func() { cancel(); group.Wait() }()
	for i := range r.members {
		cfg, err := r.access(i)
		if err != nil {
			return l, err
		}
		rt, err := roles.Open(ctx, roles.Config{BusConfig: cfg, Name: "bench", Namespace: "bench-" + bus.NewID()})
		if err != nil {
			return l, err
		}
		defer func() { _ = rt.Close(context.WithoutCancel(ctx)) }() // ends the role
		c, err := rt.Create(ctx, roles.Spec{Name: "counted", Class: "text", World: 2, Process: &roles.Process{
			Command: []string{r.program}, Needs: placement.Request{Bundles: []placement.Bundle{{Node: headsNode, Devices: 1000}}},
		}})
		if err != nil {
			return l, err
		}
		l.roles = append(l.roles, c)
	}
	for _, c := range l.roles {
		group.Go(func() { l.call(run, c) })
	}
	group.Go(func() { l.grant(run) })
	leader, err := retry(ctx, func() (int, error) { return r.leader(ctx) })
	if err == nil {
		err = pause(ctx, headsSteady)
	}
	if err == nil {
		err = f.do(r, leader)
	}
	if err == nil && !f.down {
		err = l.goOn(ctx)
	}
	if err == nil {
		err = f.undo(ctx, r, leader)
	}
	if err == nil {
		err = l.goOn(ctx)
	}
	if err == nil {
		err = r.awaitWhole(ctx)
	}
	if err == nil {
		err = pause(ctx, headsSteady)
	}
	cancel()
	group.Wait()
	for _, c := range l.roles {
		if _, callErr := roles.CallEach[int](ctx, c, "pid"); callErr != nil {
			l.ended++
			l.errs = append(l.errs, callErr)
		}
	}
	return l, err
}

// goOn returns when calls and grants have succeeded again.
func (l *headsLoad) goOn(ctx context.Context) error {
	calls, grants := l.calls.n.Load(), l.grants.n.Load()
	wanted := int64(headsGoOn * len(l.roles))
	for begun := time.Now(); l.calls.n.Load()-calls < wanted || l.grants.n.Load()-grants < headsGoOn; {
		if time.Since(begun) > headsCallLimit {
			return fmt.Errorf("after two minutes there were %d calls and %d grants", l.calls.n.Load()-calls, l.grants.n.Load()-grants)
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// call calls all ranks of a role, one call after the other, each with a number of its own.
func (l *headsLoad) call(ctx context.Context, c *roles.Cluster) {
	for n := 0; ctx.Err() == nil; n++ {
		limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), headsCallLimit)
		begun := time.Now()
		counts, err := roles.CallEach[int](limit, c, "count", n)
		cancel()
		if err != nil {
			l.failed(fmt.Errorf("call %d: %w", n, err), &l.lost)
			return // the role may have ended
		}
		l.calls.add(time.Since(begun))
		for _, count := range counts {
			if count != 1 {
				l.failed(fmt.Errorf("call %d ran %d times", n, count), &l.doubled)
			}
		}
	}
}

// grant reserves a device and releases it, again and again. The time of a grant is that of both.
func (l *headsLoad) grant(ctx context.Context) {
	for ctx.Err() == nil {
		limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), headsCallLimit)
		begun := time.Now()
		record, err := l.rig.client.Reserve(limit, placement.Request{ID: bus.NewID(), Holder: "bench", Bundles: []placement.Bundle{{Node: headsNode, Devices: 1000}}})
		if err == nil {
			err = l.rig.client.Release(limit, record.ID, record.Token)
		}
		cancel()
		if err == nil {
			l.grants.add(time.Since(begun))
		}
		if err != nil {
			l.failed(fmt.Errorf("a grant: %w", err), new(int))
		}
		_ = pause(ctx, headsGrants) // the loop sees the end of ctx
	}
}

func (l *headsLoad) failed(err error, counter *int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	*counter++
	l.errs = append(l.errs, err)
}
