package roles

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"troupe/bus"
	"troupe/gpu"
	"troupe/nodes"
	"troupe/placement"
	"troupe/roles/registry"
)

const (
	defaultRestarts   = 5
	restartWindow     = 10 * time.Minute
	defaultBackoff    = time.Second
	defaultMaxBackoff = time.Minute
	maxSpares         = 64
)

// Process runs the workers of a role as processes on the nodes, with reserved resources.
type Process struct {
	// Command is the program of every worker: a path on its node, or a name that is looked up in PATH. It calls Main,
	// or implements the wire protocol. Zero: the agent's own program, with the classes it knows.
	Command []string
	// Dir is the working folder, which must exist on every node. Zero: one of the worker's own, removed at the end.
	Dir string
	// Ship is a folder of the driver's machine that is copied to each node once, and becomes Dir; names or paths that
	// match a pattern of Exclude (path.Match) are left out.
	Ship    string
	Exclude []string
	// Env is the environment. Variables that Troupe sets are refused: see Protected.
	Env map[string]string
	// RankEnv is the part of the environment that ranks do not share: none, or one for each rank. It wins over Env.
	RankEnv []map[string]string
	// LateRendezvous leaves RANK, WORLD_SIZE, MASTER_ADDR and the other rendezvous variables to the workers.
	LateRendezvous bool
	// OwnVariables leaves the rendezvous variables, those of visible devices, CLUSTER_NAME and WORKER_NAME to Env: values there are set as
	// they are, and no others are added. The devices of the role are reserved all the same, but nothing hides other devices from its workers.
	OwnVariables bool
	// Visible is how the device variables name devices. Zero: by local index.
	Visible gpu.Form
	// Fork, Warm and WarmPath start workers from a process that has done their imports: see nodes.Program. Zero: each worker runs
	// Command itself.
	Fork           bool
	Warm, WarmPath []string

	// Output receives the output of the workers, by lines with role and rank (display.Display). One goroutine at a time
	// writes to it. Zero: Config.OutputFunc receives it. The output is stored in any case (`troupe logs`).
	Output io.Writer
	// OutputMode is the part of it that the driver receives. Zero: that of Config.
	OutputMode nodes.OutputMode
	// OutputTo is another driver that receives it instead of this one: see Runtime.ReceiveOutput. Zero: this one.
	OutputTo bus.Address

	// Needs is what to reserve: one bundle for every worker, or one for each; none is workers without devices, spread
	// over the nodes. A mapping may replace the bundles. With PerInstance every so many workers have a reservation of
	// their own. The role sets id, namespace and holder.
	Needs placement.Request
	// Reserved are reservations that the role takes over instead of Needs, with one worker each, in the order of the ranks: it releases
	// them at its end, also if it does not start.
	Reserved []placement.Record
	// Over names a role of this namespace whose devices the workers share.
	Over string
	// PlaceTimeout bounds the queue time of the reservation. Zero: StartTimeout.
	PlaceTimeout time.Duration

	// Policy is what happens when a worker fails. Restarts limits the restarts of the role within ten minutes; zero: five. One more
	// loss fails the role, with the causes of all of them. Backoff is the pause before the first, which doubles with each up to
	// MaxBackoff; zero: a second and a minute, or none with Spares.
	Policy     Policy
	Restarts   int
	Backoff    time.Duration
	MaxBackoff time.Duration
	// Spares is how many processes each agent that runs workers of the role keeps in advance for the next ones, which have done their
	// imports: a lost worker then has a new process at once. They hold no devices. Command must understand nodes.SpareEnv, as Main and
	// Python's workers do; with RankEnv there are none.
	Spares int
	// MinReplicas lets a role of RestartRank or RestartRole go on with fewer replicas, though at least so many, when no node has room for a
	// lost one. With fewer it waits for PlaceTimeout, and fails. MaxReplicas has the driver that created the role add replicas up to so many,
	// or to what Resize was called with last, whenever devices are free, and remove them when their devices are preempted: the last ones have
	// the lowest priority, below the role's own. Zero: none.
	MinReplicas, MaxReplicas int
	// StallAfter replaces a worker that runs one call for longer than that while the others wait, or whose process is stopped, if the
	// policy replaces workers; its stacks are stored with the event worker_stalled. Zero: none; the minimum is two seconds.
	StallAfter time.Duration
}

// Policy is the reaction to the failure of a worker; the role's record has it too.
type Policy = registry.Policy

const (
	FailRole    = registry.FailRole    // the role fails, and its workers are stopped
	RestartRank = registry.RestartRank // a new process gets its rank, devices and port; its calls fail
	RestartRole = registry.RestartRole // all workers are stopped and started again; all calls fail
	Ignore      = registry.Ignore      // the other workers continue; calls to the failed one fail
)

// Self is the Command of a driver whose own program runs the workers: see Main.
func Self() []string {
	exe, err := os.Executable()
	if err != nil {
		exe = os.Args[0]
	}
	return []string{exe}
}

// rendezvousNames are the variables of distributed jobs, deviceNames those of visible devices, ownNames the others that
// only Troupe sets.
var (
	rendezvousNames = []string{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
	deviceNames     = []string{"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"}
	ownNames        = []string{"CLUSTER_NAME", "WORKER_NAME"}
)

// inheritedSettings begin the names of settings that a worker has from its driver: of shared memory, for which both must use one
// directory, of the bound of values, of device tensors, and of the flight recorder.
var inheritedSettings = []string{"TROUPE_SHM", "TROUPE_VALUES", "TROUPE_DEVICE", "TROUPE_RECORDER"}

func isInheritedSetting(name string) bool {
	return slices.ContainsFunc(inheritedSettings, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

// Protected reports whether only Troupe may set a variable.
func Protected(name string, lateRendezvous bool) bool {
	return strings.HasPrefix(name, "TROUPE_") && !isInheritedSetting(name) || slices.Contains(deviceNames, name) || slices.Contains(ownNames, name) ||
		!lateRendezvous && slices.Contains(rendezvousNames, name)
}

// protects reports whether Env may not have a variable.
func (p *Process) protects(name string) bool {
	return Protected(name, p.LateRendezvous) && !(p.OwnVariables && !strings.HasPrefix(name, "TROUPE_"))
}

func (p *Process) withDefaults(startTimeout time.Duration) *Process {
	out := *p
	if out.PlaceTimeout == 0 {
		out.PlaceTimeout = startTimeout
	}
	if out.Restarts == 0 {
		out.Restarts = defaultRestarts
	}
	if out.Backoff == 0 && out.Spares == 0 {
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

// checkEnvironment calls bad for each variable that field may not have.
func (p *Process) checkEnvironment(field string, env map[string]string, bad func(format string, args ...any)) {
	for _, name := range slices.Sorted(maps.Keys(env)) {
		switch {
		case p.protects(name):
			bad("%s: %s is set by Troupe%s", field, name, p.remedy(name))
		case name == "" || strings.ContainsAny(name, "=\x00"):
			bad("%s: %q is not a valid name of a variable", field, name)
		case strings.Contains(env[name], "\x00"):
			bad("%s: the value of %s contains a zero byte", field, name)
		}
	}
}

// check returns all errors at once.
func (p *Process) check(role string, world int) error {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, bus.Errorf(bus.CodeInvalid, "role %q: "+format, append([]any{role}, args...)...))
	}
	if n := len(p.RankEnv); n > 0 && n != world {
		bad("RankEnv: %d environments for %d workers; set none, or one for each", n, world)
	}
	p.checkEnvironment("Env", p.Env, bad)
	for rank, env := range p.RankEnv {
		p.checkEnvironment(fmt.Sprintf("RankEnv[%d]", rank), env, bad)
	}
	if len(p.Command) > 0 && p.Command[0] == "" {
		bad("Command: the name of the program is empty")
	}
	if err := p.OutputMode.Check(); err != nil {
		bad("OutputMode: %w", err)
	}
	if p.Dir != "" && p.Ship != "" {
		bad("Dir %s and Ship %s are both set: a shipped folder becomes the working folder; set one", p.Dir, p.Ship)
	}
	if p.Spares < 0 || p.Spares > maxSpares {
		bad("Spares %d must be from 0 to %d", p.Spares, maxSpares)
	}
	if p.StallAfter != 0 && p.StallAfter < minLostAfter {
		bad("StallAfter %v must be 0, or at least %v, because workers beat once a second", p.StallAfter, minLostAfter)
	}
	if p.PlaceTimeout < 0 || p.Backoff < 0 || p.MaxBackoff < 0 || p.Restarts < 0 {
		bad("PlaceTimeout %v, Backoff %v, MaxBackoff %v and Restarts %d must not be negative", p.PlaceTimeout, p.Backoff, p.MaxBackoff, p.Restarts)
	}
	if n := len(p.Needs.Bundles); n > 1 && n != world {
		bad("Needs: %d bundles for %d workers; set one for all, or one for each", n, world)
	}
	if m := p.Needs.Mapping; m != nil && m.World != 0 && m.World != world {
		bad("Needs: the mapping is for %d workers, and the role has %d", m.World, world)
	}
	if p.Over != "" && p.Needs.Colocate != "" {
		bad("Over and Needs.Colocate both name devices to share; set one")
	}
	switch p.Policy {
	case FailRole, RestartRank, RestartRole, Ignore:
	default:
		bad("Policy %q is unknown; use restart_rank, restart_role, ignore, or empty: the role fails", p.Policy)
	}
	return errors.Join(errs...)
}

func (p *Process) remedy(name string) string {
	if slices.Contains(rendezvousNames, name) {
		return "; remove it, set LateRendezvous and set it in the workers, or set OwnVariables and set all of them"
	}
	if !strings.HasPrefix(name, "TROUPE_") {
		return "; remove it, or set OwnVariables and set all of them"
	}
	return "; remove it"
}

// request is the request to the placement service.
func (p *Process) request(rec registry.RoleRecord) placement.Request {
	r := p.Needs
	r.ID, r.Namespace, r.Holder = rec.ReservationID(), rec.Namespace, rec.Name
	switch {
	case r.Mapping != nil:
		m := *r.Mapping
		m.World = rec.World
		r.Mapping = &m
	case len(r.Bundles) == 0:
		r.Mapping = &placement.Mapping{World: rec.World} // workers without devices are spread over the nodes
	case len(r.Bundles) == 1:
		r.Bundles = placement.Repeat(rec.World, r.Bundles[0])
	}
	return r
}
