package roles

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/user"
	"path/filepath"
	"sync"
	"time"

	"github.com/nats-io/nuid"

	"troupe/actors"
	"troupe/bus"
	"troupe/dispatch"
)

const (
	defaultNamespace = "default"
	defaultLease     = 15 * time.Second
	defaultLostAfter = 6 * time.Second
	lastActs         = 10 * time.Second // what closing may take when its context has ended
)

// Config says where a driver works and as whom. The zero Config is a private bus and the namespace "default".
type Config struct {
	// Bus is the connection to use; it stays the caller's. Zero: one is opened from BusConfig and closed at the end.
	Bus       *bus.Bus
	BusConfig bus.Config
	// Namespace is the space of names of this run. Zero: "default".
	Namespace string
	// Name says who holds a role, for people. Zero: user, program and process.
	Name string
	// Classes are the classes that roles of this driver can be made of.
	Classes []*actors.Class
	// Local is where workers run. Zero: goroutines of this process, which end with the runtime.
	Local *Local
	// Lease is how long the driver's roles outlive it when it dies. Zero: 15 s, which is also the least that is sane on
	// a busy server.
	Lease time.Duration
	// LostAfter is how long a worker may be silent before it counts as lost. Zero: 6 s.
	LostAfter time.Duration
	// Logger receives what goes wrong with no caller to tell. Zero: the bus's.
	Logger *slog.Logger
}

// Runtime is a driver's session in a namespace: it creates roles, attaches to them, and ends what it owns. It is safe
// for concurrent use.
type Runtime struct {
	cfg      Config
	bus      *bus.Bus
	ownsBus  bool
	ep       *bus.Endpoint
	lease    *bus.Lease
	local    *Local
	log      *slog.Logger

	ctx    context.Context // of the janitor and the watches
	cancel context.CancelFunc
	group  sync.WaitGroup

	mu       sync.Mutex
	kv       *bus.KV // opened at the first use
	clusters map[*Cluster]struct{}
	closed   bool
}

// Open starts a driver's session.
func Open(ctx context.Context, cfg Config) (*Runtime, error) {
	if cfg.Namespace == "" {
		cfg.Namespace = defaultNamespace
	}
	if err := bus.CheckName("namespace", cfg.Namespace); err != nil {
		return nil, err
	}
	if cfg.Name == "" {
		cfg.Name = whoAmI()
	}
	if cfg.Lease == 0 {
		cfg.Lease = defaultLease
	}
	if cfg.LostAfter == 0 {
		cfg.LostAfter = defaultLostAfter
	}
	rt := &Runtime{cfg: cfg, bus: cfg.Bus, clusters: map[*Cluster]struct{}{}}
	if err := rt.open(ctx); err != nil {
		_ = rt.Close(ctx) // what was opened so far
		return nil, err
	}
	return rt, nil
}

func (rt *Runtime) open(ctx context.Context) (err error) {
	rt.ctx, rt.cancel = context.WithCancel(context.Background())
	if rt.bus == nil {
		if rt.bus, err = bus.Open(ctx, rt.cfg.BusConfig); err != nil {
			return err
		}
		rt.ownsBus = true
	}
	if rt.log = rt.cfg.Logger; rt.log == nil {
		rt.log = rt.bus.Logger()
	}
	if rt.ep, err = rt.bus.Endpoint(rt.cfg.Namespace); err != nil {
		return err
	}
	reg, err := rt.registry(ctx)
	if err != nil {
		return err
	}
	if rt.lease, err = reg.kv.Lease(ctx, driverKey(rt.ep.Session()), []byte(rt.cfg.Name), rt.cfg.Lease); err != nil {
		return err
	}
	rt.local = rt.cfg.Local
	if rt.local == nil {
		rt.local = NewLocal(rt.bus, rt.cfg.Classes)
	}
	rt.group.Go(func() { rt.janitor(reg) })
	return nil
}

// registry opens the namespace's bucket if that has not been done.
func (rt *Runtime) registry(ctx context.Context) (registry, error) {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	if rt.kv == nil {
		kv, err := rt.bus.KV(ctx, bus.KVConfig{Bucket: bucketOf(rt.cfg.Namespace)})
		if err != nil {
			return registry{}, err
		}
		rt.kv = kv
	}
	return registry{kv: rt.kv}, nil
}

func whoAmI() string {
	name := "unknown"
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	host, _ := os.Hostname()
	return fmt.Sprintf("%s@%s %s[%d]", name, host, filepath.Base(os.Args[0]), os.Getpid())
}

// Namespace is the space of names this driver works in.
func (rt *Runtime) Namespace() string { return rt.cfg.Namespace }

// Session identifies this driver.
func (rt *Runtime) Session() string { return rt.ep.Session() }

// Roles lists the roles of the namespace.
func (rt *Runtime) Roles(ctx context.Context) ([]Record, error) {
	reg, err := rt.registry(ctx)
	if err != nil {
		return nil, err
	}
	return reg.list(ctx)
}

// Create starts a role: its name is claimed, its workers are made, and it is ready when every worker has answered a
// probe on every subject. If one worker fails to start, all are stopped, and the error is that worker's.
func (rt *Runtime) Create(ctx context.Context, spec Spec) (*Cluster, error) {
	mesh, err := spec.resolve()
	if err != nil {
		return nil, err
	}
	if rt.lease == nil {
		return nil, bus.Errorf(bus.CodeRefused, "a worker creates no roles: it holds no lease that could end them; let the driver create role %s", spec.Name)
	}
	spec = spec.withDefaults()
	class, err := rt.local.class(spec.Class)
	if err != nil {
		return nil, err
	}
	config, err := encodeConfig(spec)
	if err != nil {
		return nil, err
	}
	rec := Record{
		Namespace: rt.cfg.Namespace, Name: spec.Name, Incarnation: nuid.Next(), Class: spec.Class, World: mesh.World(), Mesh: mesh,
		Ordered: spec.Ordered, Detached: spec.Detached, Open: class.Open, Methods: class.Methods,
		State: RoleStarting, Since: time.Now(), Owner: rt.ep.Session(), By: rt.cfg.Name,
	}
	ctx, cancel := context.WithTimeout(ctx, spec.StartTimeout)
	defer cancel()
	reg, err := rt.registry(ctx)
	if err != nil {
		return nil, err
	}
	rev, err := reg.claim(ctx, rec)
	if err != nil {
		return nil, err
	}
	c, err := rt.newCluster(rec, rev, spec)
	if err != nil {
		return nil, err
	}
	if err := c.start(ctx, config); err != nil {
		last, stop := context.WithTimeout(context.WithoutCancel(ctx), lastActs)
		defer stop()
		return nil, errors.Join(err, c.takeDown(last, 0))
	}
	return c, nil
}

func encodeConfig(spec Spec) (bus.Raw, error) {
	if spec.Config == nil {
		return nil, nil
	}
	raw, err := bus.Marshal(spec.Config)
	if err != nil {
		return nil, bus.Errorf(bus.CodeInvalid, "role %q: Config: %w", spec.Name, err)
	}
	return raw, nil
}

// Attach returns a role that another driver created.
func (rt *Runtime) Attach(ctx context.Context, name string) (*Cluster, error) {
	if err := bus.CheckRoleName(name); err != nil {
		return nil, err
	}
	reg, err := rt.registry(ctx)
	if err != nil {
		return nil, err
	}
	rec, rev, err := reg.get(ctx, name)
	if err != nil {
		return nil, err
	}
	if rec.State == RoleStarting {
		return nil, bus.Errorf(bus.CodeRefused, "role %s is still starting, since %s; try again when it is ready", name, rec.Since.Format(time.RFC3339))
	}
	return rt.newCluster(rec, rev, Spec{}.withDefaults())
}

func (rt *Runtime) newCluster(rec Record, rev uint64, spec Spec) (*Cluster, error) {
	c := &Cluster{rt: rt, rec: rec, rev: rev, spec: spec}
	c.group = &dispatch.Group{Endpoint: rt.ep, To: rec.Address(), Mesh: rec.Mesh, MeshName: defaultMesh, Ordered: rec.Ordered}
	var err error
	if c.life, err = watchLife(rt, c); err != nil {
		return nil, err
	}
	rt.mu.Lock()
	defer rt.mu.Unlock()
	if rt.closed {
		c.life.stop()
		return nil, bus.Errorf(bus.CodeClosed, "the runtime is closed")
	}
	rt.clusters[c] = struct{}{}
	return c, nil
}

// Close destroys the roles this driver owns, lets go of those it is attached to, and ends the session. It takes no
// longer than ctx and ten seconds.
func (rt *Runtime) Close(ctx context.Context) error {
	rt.mu.Lock()
	if rt.closed {
		rt.mu.Unlock()
		return nil
	}
	rt.closed = true
	all := make([]*Cluster, 0, len(rt.clusters))
	for c := range rt.clusters {
		all = append(all, c)
	}
	rt.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastActs)
	defer cancel()
	errs := make([]error, len(all)+2)
	var group sync.WaitGroup
	for i, c := range all {
		group.Go(func() { errs[i] = c.Close(ctx) })
	}
	group.Wait()
	if rt.cancel != nil {
		rt.cancel()
	}
	rt.group.Wait()
	if rt.local != nil && rt.cfg.Local == nil {
		errs[len(all)] = rt.local.Close(ctx)
	}
	if rt.lease != nil {
		errs[len(all)+1] = rt.lease.Release(ctx)
	}
	if rt.ep != nil {
		rt.ep.Close()
	}
	if rt.ownsBus {
		errs = append(errs, rt.bus.Close())
	}
	return errors.Join(errs...)
}
