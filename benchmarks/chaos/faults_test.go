package chaos

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"
)

// quiet is the logger of the harness's own connections.
var quiet = slog.New(slog.DiscardHandler)

// Fault is something that happens to the cluster: it is injected, lasts, and is taken back. What it has killed is started
// again by Rig.Revive.
type Fault struct {
	Name   string        // for the table: "kill head"
	Target string        // no two faults at once have one target
	For    time.Duration // from inject to heal
	// Kills is the name of the process that has to be started again afterwards.
	Kills string
	// LosesNodes says that reservations may be ended by it, because their node counts as lost.
	LosesNodes bool

	inject func() error
	heal   func() error // nil: there is nothing to take back
}

func (f Fault) String() string {
	return fmt.Sprintf("%s (%s) for %v", f.Name, f.Target, f.For.Round(time.Millisecond))
}

// Pick chooses one or, every fourth time, two faults of different targets.
func (r *Rig) Pick(rng *rand.Rand) ([]Fault, error) {
	first, err := r.pickOne(rng)
	if err != nil || rng.IntN(4) > 0 {
		return []Fault{first}, err
	}
	for range 20 {
		if second, err := r.pickOne(rng); err == nil && second.Target != first.Target {
			return []Fault{first, second}, nil
		}
	}
	return []Fault{first}, nil
}

// pickOne chooses a kind first, so that kills do not crowd out the others.
func (r *Rig) pickOne(rng *rand.Rand) (Fault, error) {
	kinds := []func(*rand.Rand) (Fault, bool){r.killAny, r.killAny, r.freezeAny, r.partition, r.partitionMember, r.loss, r.fullDisk, r.wipe, r.rollingRestart}
	for range 1000 {
		if f, ok := kinds[rng.IntN(len(kinds))](rng); ok && (r.Only == nil || r.Only.MatchString(f.Name)) {
			return f, nil
		}
	}
	return Fault{}, fmt.Errorf("no fault matches %q here", r.Only)
}

// Inject makes the faults, lets them last and takes them back.
func (r *Rig) Inject(ctx context.Context, faults []Fault) error {
	var errs []error
	begun := time.Now()
	for _, f := range faults {
		errs = append(errs, f.inject())
	}
	slices.SortFunc(faults, func(a, b Fault) int { return int(a.For - b.For) })
	for _, f := range faults {
		sleep(ctx, time.Until(begun.Add(f.For)))
		if f.heal != nil {
			errs = append(errs, f.heal())
		}
	}
	return errors.Join(errs...)
}

const headTarget = "head"

// victim is a process that can be killed and frozen.
type victim struct {
	kind    string
	name    string
	process string // its name in the rig; empty: the rig does not start it
	pid     int
	node    bool // its node may count as lost
}

// victims are all processes, but of the NATS servers only one. All heads are one target: never two at once.
func (r *Rig) victims(rng *rand.Rand) []victim {
	var all []victim
	leader := r.Leader()
	for i, p := range r.heads() {
		kind := "head"
		switch {
		case len(r.Members) == 0:
		case r.Members[i].At == leader:
			kind = "leading head"
		default:
			kind = "other head"
		}
		all = append(all, victim{kind, headTarget, p.Name, p.PID(), false})
	}
	if own := r.ownAgent(); own != 0 {
		all = append(all, victim{"agent", headNode, "", own, true})
	}
	for name, a := range r.agents {
		all = append(all, victim{"agent", name, a.Name, a.PID(), true})
	}
	for name, p := range r.parts {
		kind := "driver"
		if p.Engine {
			kind = "engine"
		}
		all = append(all, victim{kind, name, name, p.process.PID(), false})
	}
	if workers := workerProcesses(markersOf(r.agentDirs())); len(workers) > 0 {
		w := workers[rng.IntN(len(workers))]
		all = append(all, victim{"worker", w.Role + "'s worker", "", w.PID, false})
	}
	if n := len(r.servers); n > 0 {
		s := r.servers[rng.IntN(n)]
		all = append(all, victim{"server", "server", s.Name, s.PID(), false}) // one target: never two servers at once
	}
	return all
}

// oneOf chooses a kind of process first, and then one of that kind.
func oneOf(rng *rand.Rand, all []victim) victim {
	slices.SortFunc(all, func(a, b victim) int { return a.pid - b.pid }) // of a map: the seed decides, not its order
	var kinds []string
	for _, v := range all {
		if !slices.Contains(kinds, v.kind) {
			kinds = append(kinds, v.kind)
		}
	}
	slices.Sort(kinds)
	kind := kinds[rng.IntN(len(kinds))]
	all = slices.DeleteFunc(all, func(v victim) bool { return v.kind != kind })
	return all[rng.IntN(len(all))]
}

func (r *Rig) killAny(rng *rand.Rand) (Fault, bool) {
	v := oneOf(rng, r.victims(rng))
	return Fault{
		Name: "kill " + v.kind, Target: v.name, For: time.Duration(rng.IntN(3000)) * time.Millisecond, LosesNodes: v.node, Kills: v.process,
		inject: func() error { return syscall.Kill(v.pid, syscall.SIGKILL) },
	}, true
}

func (r *Rig) freezeAny(rng *rand.Rand) (Fault, bool) {
	v := oneOf(rng, r.victims(rng))
	return Fault{
		Name: "freeze " + v.kind, Target: v.name, For: upTo(rng, 12*time.Second), LosesNodes: true, // whoever is frozen, others may judge
		inject: func() error { return syscall.Kill(v.pid, syscall.SIGSTOP) },
		heal: func() error {
			if err := syscall.Kill(v.pid, syscall.SIGCONT); !errors.Is(err, syscall.ESRCH) {
				return err
			}
			return nil // it was killed meanwhile, by its agent or by another fault
		},
	}, true
}

func upTo(rng *rand.Rand, most time.Duration) time.Duration {
	return time.Second + time.Duration(rng.Int64N(int64(most)))
}

func (r *Rig) partition(rng *rand.Rand) (Fault, bool) {
	i, d := rng.IntN(farAgents), upTo(rng, 8*time.Second)
	if rng.IntN(2) == 0 {
		d = 18*time.Second + upTo(rng, 8*time.Second) // longer than a node's lease
	}
	return Fault{
		Name: "partition", Target: farName(i), For: d, LosesNodes: true,
		inject: func() error { r.wire.SetLoss(i, 1); return nil }, heal: func() error { r.wire.SetLoss(i, 0); return nil },
	}, true
}

// partitionMember cuts off one of three heads, which is in a namespace of its own.
func (r *Rig) partitionMember(rng *rand.Rand) (Fault, bool) {
	if len(r.Members) == 0 {
		return Fault{}, false
	}
	i := 1 + rng.IntN(len(r.Members)-1)
	kind, at := "other head", farAgents+i-1
	if r.Members[i].At == r.Leader() {
		kind = "leading head"
	}
	return Fault{
		Name: "partition " + kind, Target: headTarget, For: upTo(rng, 20*time.Second), LosesNodes: true,
		inject: func() error { r.wire.SetLoss(at, 1); return nil }, heal: func() error { r.wire.SetLoss(at, 0); return nil },
	}, true
}

// wipe kills one of three heads and removes its store. The one beside the agent keeps its store, which has the agent's folder.
func (r *Rig) wipe(rng *rand.Rand) (Fault, bool) {
	if len(r.Members) == 0 {
		return Fault{}, false
	}
	i := 1 + rng.IntN(len(r.Members)-1)
	p := r.others[i-1]
	return Fault{
		Name: "wipe disk", Target: headTarget, For: upTo(rng, 5*time.Second), Kills: p.Name,
		inject: func() error { return errors.Join(p.Kill(), os.RemoveAll(r.memberStore(i))) },
	}, true
}

// rollingRestart restarts the heads one after the other.
func (r *Rig) rollingRestart(*rand.Rand) (Fault, bool) {
	return Fault{
		Name: "rolling restart", Target: headTarget, LosesNodes: true,
		inject: func() error {
			cmd := exec.Command(r.Program, "cluster", "upgrade", "--all", "--timeout", convergeLimit.String())
			cmd.Env = r.env()
			out, err := cmd.CombinedOutput()
			if err != nil {
				return fmt.Errorf("troupe cluster upgrade: %w: %s", err, out)
			}
			return nil
		},
	}, len(r.Members) > 0
}

func (r *Rig) loss(rng *rand.Rand) (Fault, bool) {
	i, part := rng.IntN(farAgents), 0.05+0.25*rng.Float64()
	return Fault{
		Name: "packet loss", Target: farName(i), For: upTo(rng, 12*time.Second), LosesNodes: true,
		inject: func() error { r.wire.SetLoss(i, part); return nil }, heal: func() error { r.wire.SetLoss(i, 0); return nil },
	}, true
}

// fullDisk fills the disk of the head's store. Without one of its own there is none that may be filled.
func (r *Rig) fullDisk(rng *rand.Rand) (Fault, bool) {
	if r.disk == "" {
		return Fault{}, false
	}
	path := filepath.Join(r.disk, "ballast")
	return Fault{
		Name: "full disk", Target: "disk", For: upTo(rng, 6*time.Second),
		inject: func() error { return fill(path) }, heal: func() error { return os.Remove(path) },
	}, true
}

// fill writes a file until there is no room.
func fill(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	block := make([]byte, 1<<20)
	for size := len(block); size > 0; {
		if _, err = f.Write(block[:size]); err != nil {
			size /= 4 // and the rest in smaller pieces
		}
	}
	if !errors.Is(err, syscall.ENOSPC) {
		return errors.Join(err, f.Close())
	}
	return f.Close()
}
