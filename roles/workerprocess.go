package roles

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/recorder/otlp"
	"troupe/bus/wire"
	"troupe/gpu"
	"troupe/nodes"
)

// workerGrace is how long the running call of a worker process may continue after a signal. It is shorter than the
// agent's grace, which ends in SIGKILL.
const workerGrace = 5 * time.Second

// Main runs this program as the worker that an agent started it for, and does not return then; otherwise it does
// nothing. A driver's program whose roles run in processes of their own calls it first, with its classes:
//
//	func main() {
//		roles.Main(trainer.Class)
//		...
//	}
func Main(classes ...*actors.Class) {
	if err := nodes.AwaitTakeover(); err != nil {
		os.Exit(1) // the agent starts another process
	}
	path := os.Getenv(nodes.AssignmentEnv)
	if path == "" {
		return
	}
	_ = os.Unsetenv(nodes.AssignmentEnv) // child processes are no workers
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	err := RunWorker(ctx, path, classes...)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "troupe worker:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// RunWorker runs the worker of the assignment file at path until it is stopped or ctx ends, which is no error.
func RunWorker(ctx context.Context, path string, classes ...*actors.Class) error {
	p, err := OpenWorkerProcess(ctx, WorkerProcessConfig{Assignment: path, Classes: classes, Values: bus.ValuesConfigOf(os.Getenv)})
	if err != nil {
		return err
	}
	if err := nodes.ServeDebug(filepath.Dir(path)); err != nil {
		p.bus.Logger().Warn("roles: the stacks of this worker cannot be shown", "error", err)
	}
	if err := p.Start(ctx); err != nil {
		return errors.Join(err, p.Close(ctx))
	}
	select {
	case <-p.Done():
	case <-ctx.Done():
	}
	return p.Close(context.WithoutCancel(ctx))
}

// WorkerProcessConfig configures a worker process that an agent has started.
type WorkerProcessConfig struct {
	Assignment string          // path of the assignment file; see nodes.AssignmentEnv
	Classes    []*actors.Class // classes of the program
	// ClassFunc finds other classes by name. Zero: none.
	ClassFunc func(name string) (*actors.Class, error)
	// LocalClassFunc finds the classes of roles that the worker creates in its own process. Zero: ClassFunc.
	LocalClassFunc func(name string) (*actors.Class, error)
	Values         bus.ValuesConfig // bus.Config.Values
	Logger         *slog.Logger     // zero: the logger of the bus
}

// WorkerProcess is the worker of a worker process.
type WorkerProcess struct {
	Assignment Assignment
	Node       string

	bus     *bus.Bus
	host    *workerHost
	worker  *actors.Worker
	unclaim func() // releases simulated devices
	store   storeClient
}

// OpenWorkerProcess reads the assignment and connects. Start makes the worker, so that a program can inspect the assignment
// first; a program that cannot run it calls Fail.
func OpenWorkerProcess(ctx context.Context, cfg WorkerProcessConfig) (*WorkerProcess, error) {
	assigned, err := nodes.ReadAssignmentFile(cfg.Assignment)
	if err != nil {
		return nil, err
	}
	p := &WorkerProcess{Node: assigned.Node, unclaim: func() {}}
	if err := wire.Unmarshal(assigned.Assignment, &p.Assignment); err != nil {
		return nil, bus.Errorf(bus.CodeMalformed, "the assignment of %s: %w", assigned.Name, err)
	}
	if err := p.Assignment.check(); err != nil {
		return nil, err
	}
	if p.unclaim, err = gpu.ClaimSim(os.Getenv(gpu.SimUseEnv)); err != nil {
		return nil, err
	}
	otlp.Begin()
	busCfg := assigned.BusConfig()
	busCfg.Wait, busCfg.Logger, busCfg.Values = true, cfg.Logger, cfg.Values
	if p.bus, err = bus.Open(ctx, busCfg); err != nil {
		p.unclaim()
		return nil, err
	}
	local := newLocal(p.bus, cfg.Classes)
	local.node, local.ownProcess, local.classFunc, local.beatEvery = assigned.Node, true, cfg.ClassFunc, p.Assignment.BeatEvery
	if p.host, err = local.newWorkerHost(p.bus, p.Assignment.Namespace, 1); err != nil {
		p.unclaim()
		return nil, errors.Join(err, p.bus.Close())
	}
	p.host.rt.setWorker(p.Assignment, p.Node)
	if cfg.LocalClassFunc != nil {
		p.host.rt.cfg.ClassFunc = cfg.LocalClassFunc
	}
	return p, nil
}

// Start makes the worker. The bus has been told of a failure.
func (p *WorkerProcess) Start(ctx context.Context) (err error) {
	p.worker, err = p.host.host.Start(ctx, p.Assignment.Spec())
	return err
}

// Fail reports that the worker cannot be made.
func (p *WorkerProcess) Fail(why error) { p.host.host.Fail(p.Assignment.Spec(), why) }

// Worker is the worker; nil before Start.
func (p *WorkerProcess) Worker() *actors.Worker { return p.worker }

// Done is closed when the worker has ended.
func (p *WorkerProcess) Done() <-chan struct{} { return p.worker.Done() }

// Runtime makes the worker's calls to other roles.
func (p *WorkerProcess) Runtime() *Runtime { return p.host.rt }

// Close stops the worker, if it runs, and disconnects. It returns the worker's failure, if any.
func (p *WorkerProcess) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, workerGrace)
	defer cancel()
	_ = p.host.host.Close(ctx) // the exit of the process ends the rest
	var err error
	if p.worker != nil {
		_, err = p.worker.State()
	}
	p.host.rt.closeWorkerRuntime(ctx)
	p.host.ep.Close()
	otlp.FlushProcess()
	p.unclaim()
	return errors.Join(err, p.bus.Close())
}
