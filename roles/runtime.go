package roles

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/kv"
	"troupe/bus/recorder/otlp"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/nodes"
	"troupe/nodes/evidence"
	"troupe/roles/display"
	"troupe/roles/registry"
)

const (
	defaultNamespace = "default"
	minLostAfter     = 2 * evidence.WorkerBeat
	closeTimeout     = 10 * time.Second // timeout of closing
	undoTimeout      = time.Second      // how long the caller of a start that took too long waits for the end of its workers
	registryTimeout  = 3 * time.Second  // timeout of one registry operation
)

// Config configures a driver's runtime. The zero Config is a private bus and the namespace "default".
type Config struct {
	// Bus is the connection to use; the caller closes it. Zero: one is opened from BusConfig and closed at the end.
	Bus       *bus.Bus
	BusConfig bus.Config
	// Namespace separates the names of this run. Zero: that of the credential of Bus, or "default".
	Namespace string
	// Name describes the driver, for display. Zero: user, program and process.
	Name string
	// Classes are the classes of this driver's roles.
	Classes []*actors.Class
	// ClassFunc finds other classes by name, known at run time only. Zero: none.
	ClassFunc func(name string) (*actors.Class, error)
	// Local runs the workers. Zero: goroutines of this process, which end with the runtime.
	Local *Local
	// Lease is how long the driver's roles outlive it when it dies. Zero: 15 s, the minimum on a busy server.
	Lease time.Duration
	// LostAfter is how long a worker may be silent before it counts as lost. Zero: 6 s. The minimum is 2 s.
	LostAfter time.Duration
	// CLI is how the troupe command reaches the head of this driver, for the remedies that errors name. Zero: by itself.
	CLI CommandLine
	// Private says that the server, or its head, ends with this driver: detached roles are refused. A server embedded
	// in this process is always private.
	Private bool
	// OutputFunc receives the output of worker processes, from one goroutine at a time; it may block. Zero: only roles with
	// Process.Output are shown. OutputMode is the part of it that is received; zero: all. OutputTerminal says that it is
	// shown on a terminal, and control characters are escaped; OutputColor colours the prefixes.
	OutputFunc     func(display.Text)
	OutputMode     nodes.OutputMode
	OutputTerminal bool
	OutputColor    bool
	// Logger receives errors without a caller. Zero: the logger of the bus.
	Logger *slog.Logger
}

// CommandLine is what a shell needs to run the troupe command for a head: variables before it and flags after it.
type CommandLine struct{ Env, Flags string }

// command is a troupe command for the head.
func (l CommandLine) command(words ...string) string {
	return strings.TrimSpace(l.Env + " troupe " + strings.Join(words, " ") + " " + l.Flags)
}

func (c Config) withDefaults() Config {
	if c.Name == "" {
		c.Name = bus.ProcessName()
	}
	if c.Lease == 0 {
		c.Lease = evidence.DriverLease
	}
	if c.LostAfter == 0 {
		c.LostAfter = evidence.WorkerSilence
	}
	return c
}

// validate returns all errors at once.
func (c Config) validate() error {
	var errs []error
	if c.Namespace != "" {
		errs = append(errs, bus.CheckName("namespace", c.Namespace))
	}
	if c.Lease < time.Second {
		errs = append(errs, bus.Errorf(bus.CodeInvalid, "roles.Config: Lease %v: the minimum is 1s", c.Lease))
	}
	if c.LostAfter < minLostAfter {
		errs = append(errs, bus.Errorf(bus.CodeInvalid, "roles.Config: LostAfter %v: the minimum is %v, because workers beat once a second", c.LostAfter, minLostAfter))
	}
	if err := c.OutputMode.Check(); err != nil {
		errs = append(errs, err)
	}
	if c.Local != nil && (len(c.Classes) > 0 || c.ClassFunc != nil) {
		errs = append(errs, bus.Errorf(bus.CodeInvalid, "roles.Config: Classes or ClassFunc and Local are both set; pass the classes to NewLocal"))
	}
	return errors.Join(errs...)
}

// Runtime is a driver's session in a namespace: it creates roles, attaches to them, and destroys what it owns. The
// workers of a process have one too, for their calls and for the roles that they create. It is safe for concurrent use.
type Runtime struct {
	cfg     Config
	bus     *bus.Bus
	ownsBus bool
	ep      *calls.Endpoint
	log     *slog.Logger
	worker  *nodes.WorkerID // the worker of this process; nil: a driver, or goroutines that are workers
	driver  string          // in workers, the session of the run's driver; empty: this is the driver, or unknown

	localMu sync.Mutex // held while a worker becomes able to create roles
	local   *Local     // nil in workers that have created nothing
	leaseMu sync.Mutex // held while the lease is acquired
	uptime  registry.Uptime

	services     services // for worker processes
	createdRoles roleLog

	ctx    context.Context // of background goroutines; ends after the last role
	cancel context.CancelFunc
	group  sync.WaitGroup // of background goroutines; see spawn

	createCtx    context.Context // ends when Close begins: roles that are being created are given up
	cancelCreate context.CancelFunc
	creating     sync.WaitGroup // of calls of Create
	closedCh     chan struct{}  // closed when Close has returned

	regMu sync.Mutex // held while the registry is opened
	reg   *registry.Registry

	claimCh   chan struct{} // holds one: something may have to be claimed again
	unclaimed atomic.Bool   // what this process holds has not been claimed since the connection or the lease was lost

	monitorMu sync.Mutex // held while a monitor of a role is made: each role has one

	killing atomic.Bool // Kill has been called: roles are killed instead of stopped

	mu       sync.Mutex // guards what follows
	lease    *kv.Lease  // nil in workers
	holds    map[string]registry.DriverReservation
	clusters map[*Cluster]struct{}
	opened   map[bus.Address]*Cluster // clusters that were opened from handles
	sink     *outputSink              // nil: nothing was shown so far
	closing  bool                     // no cluster is added any more
	ended    bool                     // and no goroutine
}

// Open starts a driver's session.
func Open(ctx context.Context, cfg Config) (*Runtime, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	otlp.Begin()
	rt := newRuntime(cfg, cfg.Bus)
	if err := rt.open(ctx); err != nil {
		_ = rt.Close(ctx) // closes what was opened so far
		return nil, err
	}
	return rt, nil
}

func newRuntime(cfg Config, b *bus.Bus) *Runtime {
	rt := &Runtime{
		cfg: cfg, bus: b, claimCh: make(chan struct{}, 1), holds: map[string]registry.DriverReservation{}, clusters: map[*Cluster]struct{}{}, opened: map[bus.Address]*Cluster{}, closedCh: make(chan struct{}),
	}
	rt.ctx, rt.cancel = context.WithCancel(context.Background())
	rt.createCtx, rt.cancelCreate = context.WithCancel(rt.ctx)
	return rt
}

func (rt *Runtime) open(ctx context.Context) (err error) {
	if rt.bus == nil {
		if rt.bus, err = bus.Open(ctx, rt.cfg.BusConfig); err != nil {
			return err
		}
		rt.ownsBus = true
	}
	if rt.log = rt.cfg.Logger; rt.log == nil {
		rt.log = rt.bus.Logger()
	}
	team, _ := rt.bus.Team()
	rt.cfg.Namespace = cmp.Or(rt.cfg.Namespace, team.Namespace, defaultNamespace)
	if team.Namespace != "" && rt.cfg.Namespace != team.Namespace {
		return bus.Errorf(bus.CodeRefused, "roles.Config: Namespace %q: the credential of this process is for namespace %s; name that one, or use a credential of this one (troupe auth new team)", rt.cfg.Namespace, team.Namespace)
	}
	if rt.ep, err = calls.Open(rt.bus, rt.cfg.Namespace); err != nil {
		return err
	}
	if err := rt.acquireLease(ctx); err != nil {
		return err
	}
	rt.local = rt.cfg.Local
	if rt.local == nil {
		rt.local = newLocal(rt.bus, rt.cfg.Classes)
		rt.local.classFunc = rt.cfg.ClassFunc
	}
	rt.spawn(rt.maintainLease)
	rt.spawn(rt.runClaims)
	rt.startOrphanReaper()
	if rt.ownsBus && rt.bus.Embedded() { // otherwise a head does it
		rt.spawn(func() { _ = registry.Maintain(rt.ctx, rt.bus) }) // the registry is open; later errors are logged
	}
	return nil
}

// spawn runs do in a goroutine that Close waits for; false: Close has waited already.
func (rt *Runtime) spawn(do func()) bool {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	if rt.ended {
		return false
	}
	rt.group.Go(bus.Guard(do))
	return true
}

// registry opens the registry on first use.
func (rt *Runtime) registry(ctx context.Context) (registry.Registry, error) {
	rt.regMu.Lock()
	defer rt.regMu.Unlock()
	if rt.reg == nil {
		reg, err := registry.Open(ctx, rt.bus, rt.cfg.Namespace)
		if err != nil {
			return registry.Registry{}, err
		}
		rt.reg = &reg
	}
	return *rt.reg, nil
}

// Namespace is the namespace of this driver.
func (rt *Runtime) Namespace() string { return rt.cfg.Namespace }

// URL is the address of the server for other programs; empty for a private one without a listener.
func (rt *Runtime) URL() string { return rt.bus.URL() }

// Bus is the connection of this driver. The runtime closes it unless Config.Bus was set.
func (rt *Runtime) Bus() *bus.Bus { return rt.bus }

// Session identifies this driver.
func (rt *Runtime) Session() string { return rt.ep.Session() }

// References are the values of this process to which others may refer, and its references to theirs.
func (rt *Runtime) References() *values.References { return rt.ep.References() }

// Roles lists the roles of the namespace.
func (rt *Runtime) Roles(ctx context.Context) ([]registry.RoleRecord, error) {
	reg, err := rt.registry(ctx)
	if err != nil {
		return nil, err
	}
	return reg.List(ctx)
}

// Create starts a role: it claims the name, starts the workers, and returns when every worker has answered a probe on
// every subject. If one worker fails to start, all are stopped, and the error is that worker's.
func (rt *Runtime) Create(ctx context.Context, spec Spec) (*Cluster, error) {
	ctx, cancel := context.WithTimeout(ctx, spec.withDefaults().StartTimeout)
	defer cancel()
	p, err := rt.prepare(ctx, spec)
	if err != nil {
		return nil, err
	}
	ctx, done, err := rt.beginCreate(ctx, p.spec)
	if err != nil {
		return nil, err
	}
	defer done()
	if err := rt.claimNew(ctx, p); err != nil {
		return nil, err
	}
	return rt.start(ctx, p.rec, p.spec, p.config)
}

// Begin is Create that returns when the name is claimed; the workers are started in the background. Calls wait until the start is
// complete, and fail with its error. WaitStarted returns that error. ctx only bounds the claim.
func (rt *Runtime) Begin(ctx context.Context, spec Spec) (*Cluster, error) {
	p, err := rt.prepare(ctx, spec)
	if err != nil {
		return nil, err
	}
	ctx, done, err := rt.beginCreate(context.WithoutCancel(ctx), p.spec)
	if err != nil {
		return nil, err
	}
	var c *Cluster
	if err = rt.claimNew(ctx, p); err == nil {
		c, err = rt.newCluster(p.rec, created, p.spec)
	}
	if err == nil {
		c.starter.holdStart()
		if !rt.spawn(func() { defer done(); c.starter.startInBackground(ctx, p.config) }) {
			err = bus.Errorf(bus.CodeClosed, "the runtime is closed")
		}
	}
	if err != nil {
		done()
		return nil, err
	}
	return c, nil
}

// preparedRole is a role whose spec has been checked.
type preparedRole struct {
	spec   Spec
	rec    registry.RoleRecord
	config wire.Raw
}

func (rt *Runtime) prepare(ctx context.Context, spec Spec) (p preparedRole, err error) {
	mesh, err := spec.resolve()
	if err != nil {
		return p, err
	}
	p.spec = spec.withDefaults()
	if err := rt.becomeCreator(ctx); err != nil {
		return p, err
	}
	if err := rt.checkDetached(spec); err != nil {
		return p, err
	}
	if err := rt.awaitLease(ctx, p.spec.StartTimeout); err != nil {
		return p, bus.Errorf(bus.CodeOf(err), "role %s cannot be created now: %w", spec.Name, err)
	}
	class, err := rt.classOf(p.spec)
	if err != nil {
		return p, err
	}
	if p.config, err = encodeConfig(p.spec); err != nil {
		return p, err
	}
	p.rec = registry.RoleRecord{
		Namespace: rt.cfg.Namespace, Name: spec.Name, Incarnation: bus.NewID(), Class: spec.Class, World: mesh.World(), Mesh: mesh, Epoch: 1, Change: "created",
		Ordered: spec.Ordered, Detached: spec.Detached, Open: class.Open, Methods: class.Methods, DeviceTensors: class.DeviceTensors,
		State: registry.RoleStarting, Since: time.Now().UTC(), Owner: rt.ep.Session(), By: rt.cfg.Name, Lease: rt.cfg.Lease, Run: rt.driver,
	}
	if team, ok := rt.bus.Team(); ok {
		p.rec.Credential = bus.Caller{ID: team.ID}.Team()
	}
	if spec.EndsWithRun && rt.driver != "" {
		p.rec.Owner = rt.driver
	}
	if p.spec.Process != nil {
		p.rec.Process, p.rec.Policy = true, p.spec.Process.Policy
		p.rec.MinReplicas, p.rec.MaxReplicas = p.spec.Process.MinReplicas, p.spec.Process.MaxReplicas
	}
	return p, nil
}

// claimNew claims the name of a new role.
func (rt *Runtime) claimNew(ctx context.Context, p preparedRole) error {
	if err := rt.claim(ctx, p.rec, p.spec.Replace); err != nil {
		rt.unclaim(ctx, p.rec, err)
		return err
	}
	rt.createdRoles.add(p.rec)
	return nil
}

// checkDetached refuses a detached role that would end with this driver.
func (rt *Runtime) checkDetached(spec Spec) error {
	switch {
	case !spec.Detached:
		return nil
	case rt.cfg.Private || rt.bus.Embedded():
		return bus.Errorf(bus.CodeRefused, "role %s cannot be detached: this driver's head is private and ends with it; start a head with `troupe up` and connect the driver to it", spec.Name)
	case spec.Process == nil && rt.cfg.Local == nil:
		return bus.Errorf(bus.CodeRefused, "role %s cannot be detached: its workers are goroutines of this driver and end with it; set Process, so that the agents of a head (`troupe up`) run them, or Config.Local", spec.Name)
	}
	return nil
}

// beginCreate bounds the creation of a role by its StartTimeout and by Close, which waits until done is called.
func (rt *Runtime) beginCreate(ctx context.Context, spec Spec) (_ context.Context, done func(), err error) {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	if rt.closing {
		return nil, nil, bus.Errorf(bus.CodeClosed, "the runtime is closed")
	}
	rt.creating.Add(1)
	ctx, cancel := context.WithTimeout(ctx, spec.StartTimeout)
	unhook := context.AfterFunc(rt.createCtx, bus.Guard(cancel))
	return ctx, func() { unhook(); cancel(); rt.creating.Done() }, nil
}

// claim writes the record of a new role. A taken name is a TakenError; with replace, or if the driver of the role that
// has the name is dead, that role is destroyed and its name taken over.
func (rt *Runtime) claim(ctx context.Context, rec registry.RoleRecord, replace bool) error {
	reg, err := rt.registry(ctx)
	if err != nil {
		return err
	}
	for {
		if err := reg.Create(ctx, rec); !errors.Is(err, bus.ErrExists) {
			return err
		}
		held, err := reg.Read(ctx, rec.Name)
		if errors.Is(err, bus.ErrNotFound) {
			continue // it ended in between
		}
		if err != nil {
			return err
		}
		if replace {
			rt.log.Info("roles: replacing a role", "role", rec.Name, "driver", held.By, "since", held.Since)
			if err := rt.endRole(ctx, held); err != nil {
				return bus.Errorf(bus.CodeOf(err), "replace role %s of %s: %w", rec.Name, held.By, err)
			}
			continue
		}
		remove := rt.cfg.CLI.command("destroy", held.Name, "--namespace", held.Namespace)
		taken := &registry.TakenError{Record: held, Remove: remove}
		if held.Detached || !rt.awaitDeath(ctx, reg, held) {
			return taken
		}
		if err := rt.endRole(ctx, held); err != nil {
			return err
		}
	}
}

// awaitDeath returns when the driver of a role is known to be dead; false: it lives, or that is unknown when ctx ends.
func (rt *Runtime) awaitDeath(ctx context.Context, reg registry.Registry, held registry.RoleRecord) bool {
	for {
		v := rt.judgeDriver(ctx, reg, held.Owned())
		if v.Wait == 0 {
			return v.Dead
		}
		rt.log.Warn("roles: the driver that owns the name seems to be dead; checking", "role", held.Name, "driver", held.By)
		if bus.Sleep(ctx, min(v.Wait, reapAgain)) != nil {
			return false
		}
	}
}

// unclaim removes a claim whose outcome is unknown.
func (rt *Runtime) unclaim(ctx context.Context, rec registry.RoleRecord, why error) {
	if errors.As(why, new(*registry.TakenError)) {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), registryTimeout)
	defer cancel()
	reg, err := rt.registry(ctx)
	if err == nil {
		err = reg.Remove(ctx, rec)
	}
	if err != nil {
		rt.log.Warn("roles: removing a claim failed; the name may be taken until this driver ends", "role", rec.Name, "error", err)
	}
}

// start starts the workers of a claimed role. On an error it destroys the role.
func (rt *Runtime) start(ctx context.Context, rec registry.RoleRecord, spec Spec, config wire.Raw) (*Cluster, error) {
	c, err := rt.newCluster(rec, created, spec)
	if err != nil {
		return nil, err
	}
	err = c.starter.start(ctx, config)
	if err == nil {
		return c, nil
	}
	return nil, errors.Join(err, c.starter.undoStart(ctx))
}

// classOf is the role's class; of worker processes only its name is known before rank 0 has answered.
func (rt *Runtime) classOf(spec Spec) (*actors.Class, error) {
	if spec.Process != nil {
		return &actors.Class{Name: spec.Class}, nil
	}
	class, err := rt.local.class(spec.Class)
	if err != nil {
		return nil, err
	}
	return class, checkMethods(class.Name, class.Methods)
}

// checkMethods checks the modes of the methods before the first call.
func checkMethods(class string, methods []actors.MethodInfo) error {
	for _, m := range methods {
		if m.Mode == "" {
			continue
		}
		if _, err := dispatch.ParseMode(m.Mode); err != nil {
			return bus.Errorf(bus.CodeInvalid, "class %s, method %s: %w", class, m.Name, err)
		}
	}
	return nil
}

func encodeConfig(spec Spec) (wire.Raw, error) {
	if spec.Config == nil {
		return nil, nil
	}
	raw, err := wire.Marshal(spec.Config)
	if err != nil {
		return nil, bus.Errorf(bus.CodeInvalid, "role %q: Config: %w", spec.Name, err)
	}
	return raw, nil
}

// Attach returns a role that another driver created. A failed role can be inspected and destroyed.
func (rt *Runtime) Attach(ctx context.Context, name string) (*Cluster, error) {
	if err := bus.CheckRoleName(name); err != nil {
		return nil, err
	}
	reg, err := rt.registry(ctx)
	if err != nil {
		return nil, err
	}
	rec, err := reg.Get(ctx, name)
	if err != nil {
		return nil, err
	}
	since := rec.Since.Format(time.RFC3339)
	if rec.State == registry.RoleStarting {
		return nil, bus.Errorf(bus.CodeRefused, "role %s has been starting since %s; retry when it is ready", name, since)
	}
	c, err := rt.newCluster(rec, attached, Spec{}.withDefaults())
	if err != nil {
		return nil, err
	}
	if err := flushSubscriptions(ctx, rt.bus); err != nil { // from here on no message of a worker is missed
		c.ender.release()
		return nil, err
	}
	switch rec.State {
	case registry.RoleRestarting:
		c.performer.applyRecord(rec)
	case registry.RoleFailed:
		c.end(rec.Failure())
	case registry.RoleStopping:
		c.end(bus.Errorf(bus.CodeNotFound, "role %s has been stopping since %s", name, since))
	}
	return c, nil
}

// newCluster makes a cluster and starts to monitor its role.
func (rt *Runtime) newCluster(rec registry.RoleRecord, tie origin, spec Spec) (*Cluster, error) {
	c := &Cluster{rt: rt, origin: tie, spec: spec, to: rec.Address()}
	c.performer, c.starter.c, c.workforce.c, c.sizer.c, c.scaler.c, c.replayer.c, c.output.c, c.members.c = performer{c}, c, c, c, c, c, c, c
	c.record.rt, c.record.to, c.record.rec, c.record.claims = rt, c.to, rec, c.claims
	c.recovery.c, c.recovery.wakeCh = c, make(chan struct{}, 1)
	c.ender = ender{c: c, destroyCh: make(chan struct{}, 1)}
	cfg := lifeRecord(rec).Config
	cfg.Part = tie
	c.life = newLifecycle(cfg, &c.performer)
	c.liveness = newLiveness(c)
	c.gate.SentFunc = c.life.repeat
	c.members.begin(rec.Epoch)
	c.sizer.applyMesh(rec)
	if err := c.liveness.subscribe(); err != nil {
		return nil, err
	}
	rt.mu.Lock()
	open := !rt.closing || tie == created || tie == ending // Close waits for roles that are being created
	if open {
		rt.clusters[c] = struct{}{}
		rt.group.Go(bus.Guard(c.liveness.run))
	}
	rt.mu.Unlock()
	if !open {
		c.liveness.stop()
		return nil, bus.Errorf(bus.CodeClosed, "the runtime is closed")
	}
	return c, nil
}

// Close destroys the roles this driver owns, releases those it is attached to, and ends the session. Running calls may
// continue for their role's StopGrace, at most ten seconds; ctx may have ended. It may be called more than once.
func (rt *Runtime) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	rt.mu.Lock()
	first := !rt.closing
	rt.closing = true
	rt.mu.Unlock()
	if !first {
		select {
		case <-rt.closedCh:
		case <-ctx.Done():
		}
		return nil
	}
	defer close(rt.closedCh)
	rt.cancelCreate()
	rt.creating.Wait()
	if rt.ep != nil {
		rt.ep.References().Close() // workers that stop need not hand over results that are not used any more
	}
	var err error
	if rt.killing.Load() { // together: the workers of the run die at the same time
		var group sync.WaitGroup
		var ownedErr error
		group.Go(bus.Guard(func() { ownedErr = rt.destroyOwned(ctx) }))
		err = rt.closeClusters(ctx)
		group.Wait()
		err = errors.Join(err, ownedErr)
	} else if err = rt.closeClusters(ctx); rt.services.used() {
		err = errors.Join(err, rt.destroyOwned(ctx))
	}
	rt.endOutput()
	if rt.services.used() {
		err = errors.Join(err, rt.releaseOwn(ctx))
	}
	rt.endBackground()
	return errors.Join(err, rt.closeBelow(ctx))
}

// Kill is Close, and every worker process of the run gets SIGKILL instead of a request to stop: those of this driver's roles
// that are not detached, and of the roles that its workers created.
func (rt *Runtime) Kill(ctx context.Context) error {
	rt.killing.Store(true)
	return rt.Close(ctx)
}

// DestroyCreated destroys the roles that this runtime created, unless they are detached or end with the run, and releases its
// reservations; with now their workers are killed. The runtime can create others afterwards.
func (rt *Runtime) DestroyCreated(ctx context.Context, now bool) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	rt.mu.Lock()
	all := make([]*Cluster, 0, len(rt.clusters))
	for c := range rt.clusters {
		all = append(all, c)
	}
	rt.mu.Unlock()
	all = slices.DeleteFunc(all, func(c *Cluster) bool {
		rec := c.Record()
		return c.origin != created || rec.Detached || rec.Owner != rt.ep.Session()
	})
	errs := make([]error, len(all), len(all)+1)
	var group sync.WaitGroup
	for i, c := range all {
		group.Go(bus.Guard(func() {
			if now {
				errs[i] = c.Kill(ctx)
			} else {
				errs[i] = c.Destroy(ctx)
			}
		}))
	}
	group.Wait()
	if rt.services.used() {
		errs = append(errs, rt.releaseOwn(ctx))
	}
	return errors.Join(errs...)
}

func (rt *Runtime) closeClusters(ctx context.Context) error {
	all := rt.refuseClusters()
	errs := make([]error, len(all))
	var group sync.WaitGroup
	for i, c := range all {
		group.Go(bus.Guard(func() { errs[i] = c.ender.closeWithRuntime(ctx) }))
	}
	group.Wait()
	return errors.Join(errs...)
}

// destroyOwned destroys the roles that workers of this run created to end with the run, or with Kill all that they created.
func (rt *Runtime) destroyOwned(ctx context.Context) error {
	asking, cancel := context.WithTimeout(ctx, registryTimeout)
	all, err := rt.Roles(asking)
	cancel()
	var errs []error
	var mu sync.Mutex
	var group sync.WaitGroup
	for _, rec := range all {
		own := rec.Owner == rt.ep.Session() && rec.Run != "" || rec.Run == rt.ep.Session() && rt.killing.Load()
		if !own || rec.Detached {
			continue
		}
		group.Go(bus.Guard(func() {
			err := rt.endRole(ctx, rec)
			mu.Lock()
			defer mu.Unlock()
			errs = append(errs, err)
		}))
	}
	group.Wait()
	return errors.Join(append(errs, err)...)
}

// refuseClusters refuses new clusters and returns the existing ones.
func (rt *Runtime) refuseClusters() []*Cluster {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	rt.closing = true
	all := make([]*Cluster, 0, len(rt.clusters))
	for c := range rt.clusters {
		all = append(all, c)
	}
	return all
}

// endBackground ends the background goroutines.
func (rt *Runtime) endBackground() {
	rt.mu.Lock()
	rt.ended = true
	rt.mu.Unlock()
	rt.cancel()
	rt.group.Wait()
}

// closeBelow closes what the runtime uses, from the top.
func (rt *Runtime) closeBelow(ctx context.Context) error {
	var errs []error
	if rt.local != nil && rt.cfg.Local == nil {
		errs = append(errs, rt.local.Close(ctx))
	}
	rt.services.close()
	if lease := rt.currentLease(); lease != nil {
		errs = append(errs, lease.Release(ctx))
	}
	if rt.ep != nil {
		rt.ep.Close()
		otlp.FlushProcess()
	}
	if rt.ownsBus {
		errs = append(errs, rt.bus.Close())
	}
	return errors.Join(errs...)
}

// DestroyAll destroys every role of the namespace and releases its drivers' reservations. Live drivers see their roles
// end.
func (rt *Runtime) DestroyAll(ctx context.Context) error {
	reg, err := rt.registry(ctx)
	if err != nil {
		return err
	}
	all, err := reg.List(ctx)
	errs := []error{err}
	for _, rec := range all {
		errs = append(errs, rt.endRole(ctx, rec))
	}
	holds, err := reg.DriverReservations(ctx)
	errs = append(errs, err)
	for _, h := range holds {
		errs = append(errs, rt.releaseDriverReservation(ctx, h))
	}
	return errors.Join(errs...)
}
