package roles

import (
	"errors"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"troupe/bus"
	"troupe/gpu"
	"troupe/placement"
)

const (
	defaultRestarts   = 3
	defaultBackoff    = time.Second
	defaultMaxBackoff = time.Minute
)

// Process makes the workers of a role processes of their own on the nodes, with what they need reserved for them.
type Process struct {
	// Command is the program that every worker runs: a path on its node, or a name that is looked for in the PATH. It
	// calls Main, or speaks the wire in another way. Zero: the agent's own program, with the classes it knows.
	Command []string
	// Dir is the folder it runs in, which must be there on every node. Zero: one of its own, removed at the end.
	Dir string
	// Ship is a folder of the driver's machine that is sent to the nodes, once to each, and becomes Dir; what matches a
	// pattern of Exclude (path.Match, of a name or a path in the folder) stays behind.
	Ship    string
	Exclude []string
	// Env is the environment, as it is. What Troupe sets itself is refused: see Protected.
	Env map[string]string
	// LateRendezvous leaves RANK, WORLD_SIZE, MASTER_ADDR and their like to the workers, who set them by themselves.
	LateRendezvous bool
	// Visible is how the devices' variables name them. Zero: by local index.
	Visible gpu.Form

	// Output is where the driver sees what its workers print, line by line with role and rank, repeated lines folded. It
	// is written to from one goroutine at a time. Zero: nowhere; it is stored all the same (`troupe logs`).
	Output io.Writer

	// Needs is what is reserved. One bundle is what every worker takes; as many as the world are one for each, and none
	// is workers without devices, spread over the nodes. Instead of bundles there may be a mapping. With PerInstance every so
	// many workers have a reservation of their own. Its id, namespace and holder are the role's own.
	Needs placement.Request
	// Over names a role of this namespace on whose devices the workers are laid, shared on purpose.
	Over string
	// PlaceTimeout bounds the wait in the queue for them. Zero: StartTimeout.
	PlaceTimeout time.Duration

	// Policy is what happens when a worker fails. Restarts is how often, in all, that may be a restart; zero is three.
	// Backoff is the pause before the first, which doubles with each up to MaxBackoff; zero are a second and a minute.
	Policy     Policy
	Restarts   int
	Backoff    time.Duration
	MaxBackoff time.Duration
}

// Policy is what happens when a worker of a role fails.
type Policy string

const (
	FailRole    Policy = ""             // the role fails because of it, and its workers are stopped
	RestartRank Policy = "restart_rank" // another process takes its rank, devices and port; its calls fail
	RestartRole Policy = "restart_role" // all workers are ended and started again; all calls fail
	Ignore      Policy = "ignore"       // the others go on; calls that need it fail
)

// Self is the Command of a driver whose own program hosts the workers: see Main.
func Self() []string {
	exe, err := os.Executable()
	if err != nil {
		exe = os.Args[0]
	}
	return []string{exe}
}

// rendezvousNames are what a distributed job finds itself by; deviceNames what a process may see; ownNames the rest of
// what only Troupe sets.
var (
	rendezvousNames = []string{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
	deviceNames     = []string{"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"}
	ownNames        = []string{"CLUSTER_NAME", "WORKER_NAME"}
)

// Protected reports whether a variable is set by Troupe alone.
func Protected(name string, lateRendezvous bool) bool {
	return strings.HasPrefix(name, "TROUPE_") || slices.Contains(deviceNames, name) || slices.Contains(ownNames, name) ||
		!lateRendezvous && slices.Contains(rendezvousNames, name)
}

func (p *Process) withDefaults(startTimeout time.Duration) *Process {
	out := *p
	if out.PlaceTimeout == 0 {
		out.PlaceTimeout = startTimeout
	}
	if out.Restarts == 0 {
		out.Restarts = defaultRestarts
	}
	if out.Backoff == 0 {
		out.Backoff = defaultBackoff
	}
	if out.MaxBackoff == 0 {
		out.MaxBackoff = defaultMaxBackoff
	}
	return &out
}

// pause is the wait before the n-th restart, from 1.
func (p *Process) pause(n int) time.Duration {
	pause := p.Backoff
	for ; n > 1 && pause < p.MaxBackoff; n-- {
		pause *= 2
	}
	return min(pause, p.MaxBackoff)
}

// check reports everything that is wrong at once.
func (p *Process) check(role string, world int) error {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, bus.Errorf(bus.CodeInvalid, "role %q: "+format, append([]any{role}, args...)...))
	}
	for _, name := range slices.Sorted(maps.Keys(p.Env)) {
		switch {
		case Protected(name, p.LateRendezvous):
			bad("Env: %s is set by Troupe%s", name, p.remedy(name))
		case name == "" || strings.ContainsAny(name, "=\x00"):
			bad("Env: %q cannot be the name of a variable", name)
		case strings.Contains(p.Env[name], "\x00"):
			bad("Env: the value of %s has a zero byte", name)
		}
	}
	if len(p.Command) > 0 && p.Command[0] == "" {
		bad("Command: the program has no name")
	}
	if p.Dir != "" && p.Ship != "" {
		bad("Dir %s and Ship %s are both set: a folder that is shipped becomes the one that the workers run in", p.Dir, p.Ship)
	}
	if p.PlaceTimeout < 0 || p.Backoff < 0 || p.MaxBackoff < 0 || p.Restarts < 0 {
		bad("PlaceTimeout %v, Backoff %v, MaxBackoff %v and Restarts %d must not be negative", p.PlaceTimeout, p.Backoff, p.MaxBackoff, p.Restarts)
	}
	if n := len(p.Needs.Bundles); n > 1 && n != world {
		bad("Needs: %d bundles for %d workers; give one for all, or one for each", n, world)
	}
	if m := p.Needs.Mapping; m != nil && m.World != 0 && m.World != world {
		bad("Needs: the mapping is for %d workers, and the role has %d", m.World, world)
	}
	if p.Over != "" && p.Needs.Colocate != "" {
		bad("Over and Needs.Colocate are two ways to say whose devices to share; give one")
	}
	switch p.Policy {
	case FailRole, RestartRank, RestartRole, Ignore:
	default:
		bad("Policy %q is unknown; there are restart_rank, restart_role, ignore and, empty, that the role fails", p.Policy)
	}
	return errors.Join(errs...)
}

func (p *Process) remedy(name string) string {
	if slices.Contains(rendezvousNames, name) {
		return "; leave it out, or set LateRendezvous and set it in the workers"
	}
	return "; leave it out"
}

// request is what to ask the placement service for.
func (p *Process) request(rec Record) placement.Request {
	r := p.Needs
	r.ID, r.Namespace, r.Holder = reservationID(rec), rec.Namespace, rec.Name
	switch {
	case r.Mapping != nil:
		m := *r.Mapping
		m.World = rec.World
		r.Mapping = &m
	case len(r.Bundles) == 0:
		r.Mapping = &placement.Mapping{World: rec.World} // workers without devices go round the nodes
	case len(r.Bundles) == 1:
		r.Bundles = placement.Repeat(rec.World, r.Bundles[0])
	}
	return r
}

// reservationID is known before there is a reservation, so that whoever finds the role's record finds that too.
func reservationID(rec Record) string { return rec.Name + "-" + rec.Incarnation }
