package nodes

import (
	"context"
	"errors"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/bus/wire"
	"troupe/gpu"
	"troupe/nodes/protocol"
)

// Reporter registers a node and reports its state: a long lease for the grants on it, heartbeats for its liveness, and
// reports of its devices.
type Reporter struct {
	cfg     Config
	session string
}

// NewReporter makes a reporter of the node that cfg describes. It does nothing before Run.
func NewReporter(cfg Config) (*Reporter, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	session := bus.NewID()
	if cfg.identity != "" {
		session = cfg.identity + "." + session
	}
	return &Reporter{cfg: cfg, session: session}, nil
}

// Run reports until ctx ends, which is no error; then it announces the end and releases the lease. The caller has
// stopped all workers of the node before. Run waits for a lease that another agent holds, and acquires a lost one
// again.
func (r *Reporter) Run(ctx context.Context) error {
	bucket, err := r.open(ctx)
	if err != nil {
		return ended(ctx, err)
	}
	run := &reporterRun{Config: r.cfg, session: r.session, kv: bucket, requestCh: make(chan struct{}, 1), changedCh: make(chan struct{}, 1)}
	run.stamp.Store(protocol.NoStamp)
	for _, name := range []string{r.cfg.Name, ""} {
		sub, err := r.cfg.Bus.Subscribe(bus.NodeAsk(name), func(m *bus.Msg) { run.requested(m.Data) })
		if err != nil {
			return bus.Errorf(bus.CodeOf(err), "node %s: %w", r.cfg.Name, err)
		}
		defer func() { _ = sub.Unsubscribe() }() // fails only on a closed connection
	}
	watch, stop := context.WithCancel(ctx)
	watchedCh := make(chan struct{})
	bus.Go(func() {
		defer close(watchedCh)
		if err := r.cfg.Inventory.Watch(watch, func() { wake(run.changedCh) }); err != nil {
			r.cfg.Logger.Warn("nodes: watching the devices failed; they are read periodically", "node", r.cfg.Name, "error", err)
		}
	})
	err = run.loop(ctx)
	stop()
	<-watchedCh
	run.group.Wait()
	run.leave(ctx)
	return ended(ctx, err)
}

// open opens the bucket of the leases, and retries while the server is unavailable or its disk is full.
func (r *Reporter) open(ctx context.Context) (bucket *kv.Bucket, err error) {
	err = bus.Retry(ctx, leaseBackoff, func() error {
		bucket, err = kv.Open(ctx, r.cfg.Bus, kv.Config{Bucket: protocol.LeaseBucket, Memory: true, Leases: true})
		if err != nil && !errors.Is(err, bus.ErrNoSpace) && !errors.Is(err, bus.ErrUnavailable) && !errors.Is(err, bus.ErrTimedOut) {
			return bus.Permanent(err)
		}
		if err != nil && ctx.Err() == nil {
			r.cfg.Logger.Warn("nodes: the server is unavailable; retrying", "node", r.cfg.Name, "error", err)
		}
		return err
	})
	return bucket, err
}

// leaseBackoff paces attempts to acquire a node's lease.
var leaseBackoff = bus.Backoff{First: 20 * time.Millisecond, Most: time.Second}

// ended is err, or nil when ctx has ended.
func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// wake wakes the receiver of a channel that holds one.
func wake(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// closed reports whether ch is closed; nothing is sent on it.
func closed(ch chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// reporterRun is the state of one Run, whose goroutine owns it.
type reporterRun struct {
	Config
	session   string
	kv        *kv.Bucket
	requestCh chan struct{} // a report was requested
	stamp     atomic.Uint64 // of the newest request; set before askCh is woken
	changedCh chan struct{} // a device may have failed or recovered
	group     sync.WaitGroup

	lease  *kv.Lease
	report protocol.Report
	sent   protocol.Report // the last one
	beats  int
	unread string // error of the last reading; empty: it succeeded
}

// loop reads, sends heartbeats and holds the lease. Heartbeats continue while a lost lease is acquired again: the node
// is alive.
func (r *reporterRun) loop(ctx context.Context) error {
	if err := r.read(ctx); err != nil {
		return err
	}
	lease, err := r.register(ctx, nil, r.report)
	if err != nil {
		return err
	}
	r.lease = lease
	r.callRegistered()
	r.beat(true)
	beat := time.NewTicker(r.Beat)
	defer beat.Stop()
	read := time.NewTimer(rand.N(r.Read) + 1) // nodes that start together read at different times
	defer read.Stop()
	connectedCh, stopConnections := r.Bus.Connections()
	defer stopConnections()
	lostCh := lease.Lost()
	var againCh chan registered // holds one; nil unless a lost lease is being acquired
	defer func() {
		if againCh != nil { // ctx has ended, and with it register
			if again := <-againCh; again.err == nil {
				r.lease = again.lease
			}
		}
	}()
	for {
		changed := false
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-lostCh:
			lostCh, againCh = nil, make(chan registered, 1)
			ch, report := againCh, r.report
			bus.Go(func() {
				lease, err := r.register(ctx, r.lease, report)
				ch <- registered{lease, err}
			})
		case again := <-againCh:
			againCh = nil
			if again.err != nil {
				return again.err
			}
			r.lease, lostCh, changed = again.lease, again.lease.Lost(), true
			r.reread(ctx) // the leader may have given the node up: the report of running workers decides which are killed
		case up := <-connectedCh: // a restarted server may have lost the lease
			if r.Bus.Closed() {
				_, err := r.kv.Get(ctx, lease.Key()) // returns the error of the closed connection
				return err
			}
			if !up {
				continue
			}
			r.group.Go(bus.Guard(func() { r.recheck(ctx, r.lease) }))
			r.reread(ctx)
			changed = true
		case <-r.requestCh:
			if r.report.Answered != r.stamp.Load() {
				r.reread(ctx) // the report must be newer than the request
			}
			changed = true
		case <-r.RunningCh:
			changed = r.runningChanged()
		case <-r.changedCh:
			changed = r.reread(ctx)
		case <-read.C:
			changed = r.reread(ctx)
			read.Reset(r.Read)
		case <-beat.C:
			r.beats++
			r.beat(r.beats%reportAtLeast == 0 || r.beats%reportEvery == 0 && !sameReadings(r.sent, r.report))
			continue
		}
		if changed {
			r.beat(true)
		}
		if r.reportedFunc != nil {
			r.reportedFunc() // an unchanged result needs no new report
		}
	}
}

// requested handles a request for the report.
func (r *reporterRun) requested(data []byte) {
	var q protocol.ReportRequest
	if err := wire.Unmarshal(data, &q); err != nil {
		r.Logger.Warn("nodes: a malformed report request", "node", r.Name, "error", err)
		return
	}
	if len(q.Ended) > 0 && r.EndFunc != nil {
		r.EndFunc(q.Ended)
	}
	if q.Stamp != 0 {
		r.stamp.Store(q.Stamp)
	}
	wake(r.requestCh)
}

// runningChanged reads the running workers, and reports whether they have changed.
func (r *reporterRun) runningChanged() bool {
	before := r.report
	r.report.Seq++
	r.readRunning()
	return !sameWork(before, r.report)
}

// readRunning adds the running workers to the report.
func (r *reporterRun) readRunning() {
	r.report.Running, r.report.RunningComplete = nil, false
	r.report.Idle = r.IdleFunc != nil && r.IdleFunc()
	if r.RunningFunc != nil {
		r.report.Running, r.report.RunningComplete = protocol.LimitRunning(r.RunningFunc())
	}
}

// sameWork reports whether the same workers run.
func sameWork(a, b protocol.Report) bool {
	return a.Idle == b.Idle && slices.EqualFunc(a.Running, b.Running, func(a, b protocol.RunningGrant) bool {
		return a.Reservation == b.Reservation && a.Token == b.Token && slices.Equal(a.Devices, b.Devices)
	})
}

// recheck releases a lease that the server has lost, so that it is acquired again at once rather than at its next
// renewal.
func (r *reporterRun) recheck(ctx context.Context, lease *kv.Lease) {
	ctx, cancel := context.WithTimeout(ctx, recheckTimeout)
	defer cancel()
	_ = bus.Retry(ctx, bus.Backoff{}, func() error { // without an answer the next renewal decides
		_, err := r.kv.Get(ctx, lease.Key())
		if errors.Is(err, bus.ErrNotFound) {
			_ = lease.Release(ctx) // lost already
		}
		if errors.Is(err, bus.ErrClosed) || errors.Is(err, bus.ErrNotFound) {
			return nil
		}
		return err
	})
}

// registered is the result of register.
type registered struct {
	lease *kv.Lease
	err   error
}

// read fills the report.
func (r *reporterRun) read(ctx context.Context) error {
	stamp := r.stamp.Load() // before the devices are read
	devices, err := r.Inventory.Devices(ctx)
	if err != nil {
		return bus.Errorf(bus.CodeOf(err), "node %s: read the devices: %w", r.Name, err)
	}
	foreign := map[string][]gpu.Process{}
	for _, d := range devices {
		if found := d.Foreign(r.OwnFunc); len(found) > 0 {
			foreign[d.UUID] = found
		}
	}
	r.report = protocol.Report{
		Node: r.Name, Session: r.session, Seq: r.report.Seq + 1, Labels: r.Labels, CPUs: r.CPUs, Memory: r.Memory, Resources: r.Resources,
		Source: r.Inventory.String(), Devices: devices, Foreign: foreign, Answered: stamp,
	}
	r.readRunning()
	return nil
}

// reread reads the devices and reports whether the report must be published at once. Unreadable devices are reported as
// unfit: they must not be granted.
func (r *reporterRun) reread(ctx context.Context) bool {
	old, stamp := r.report, r.stamp.Load()
	err := r.read(ctx)
	switch {
	case ctx.Err() != nil:
		return false
	case err == nil:
		r.unread = ""
		return r.differs(old)
	}
	r.report.Seq++
	r.report.Answered = stamp // the unfit devices are newer than the request too
	r.readRunning()
	if err.Error() == r.unread {
		return !sameWork(old, r.report)
	}
	r.unread = err.Error()
	r.Logger.Warn("nodes: reading the devices failed", "node", r.Name, "error", err)
	r.report.Devices = slices.Clone(old.Devices)
	for i := range r.report.Devices {
		r.report.Devices[i].Health.Lost = "its driver does not answer: " + r.unread
	}
	return true
}

// differs reports whether something that decides on grants has changed. Readings such as the temperature do not count.
func (r *reporterRun) differs(old protocol.Report) bool {
	if !sameWork(old, r.report) {
		return true
	}
	return !slices.EqualFunc(r.report.Devices, old.Devices, func(a, b gpu.Device) bool {
		return a.UUID == b.UUID && a.Index == b.Index &&
			slices.Equal(r.report.Unfit(a), old.Unfit(b)) && len(a.Sample.Processes) == len(b.Sample.Processes)
	})
}

// beat sends a heartbeat. The next one makes up for a lost one.
func (r *reporterRun) beat(full bool) {
	beat := protocol.Heartbeat{Node: r.Name, Session: r.session}
	if full {
		beat.Report, r.sent = &r.report, r.report
	}
	r.publish(beat)
}

// sameReadings reports whether two reports say the same.
func sameReadings(a, b protocol.Report) bool {
	a.Seq = b.Seq
	return reflect.DeepEqual(a, b)
}

func (r *reporterRun) publish(beat protocol.Heartbeat) {
	data, err := wire.Marshal(beat)
	if err == nil {
		err = r.Bus.Publish(bus.NodeBeat(r.Name), data)
	}
	if err != nil {
		r.Logger.Debug("nodes: sending a heartbeat failed", "node", r.Name, "error", err)
	}
}

// register acquires the lease, or regains the lost one, and retries until ctx ends. It uses nothing that the loop owns.
func (r *reporterRun) register(ctx context.Context, lost *kv.Lease, report protocol.Report) (*kv.Lease, error) {
	if lost != nil && lost.Regain(ctx) == nil {
		return lost, nil
	}
	value, err := wire.Marshal(report)
	if err != nil {
		return nil, err
	}
	said := false
	var lease *kv.Lease
	err = bus.Retry(ctx, leaseBackoff, func() error {
		lease, err = r.kv.Lease(ctx, protocol.LeaseKey(r.Name), value, r.Lease)
		switch {
		case err == nil || ctx.Err() != nil:
		case errors.Is(err, bus.ErrInvalid), errors.Is(err, bus.ErrClosed), errors.Is(err, bus.ErrRefused):
			return bus.Permanent(err)
		case errors.Is(err, bus.ErrNoSpace), r.inherit(ctx):
		case !said:
			said = true
			r.Logger.Warn("nodes: another agent holds this node's name, or was killed less than a lease ago; waiting", "node", r.Name, "error", holder(err))
		}
		return err
	})
	return lease, err
}

// holder describes the agent that holds the name, without its whole report.
func holder(err error) error {
	var held *kv.LeaseHeldError
	var report protocol.Report
	if !errors.As(err, &held) || wire.Unmarshal(held.Holder, &report) != nil {
		return err
	}
	return bus.Errorf(bus.CodeExists, "the agent of session %s with %d devices holds it until %s, or longer if it renews", report.Session, len(report.Devices), held.Expires.Format(time.RFC3339))
}

// inherit deletes the lease of an earlier agent of the same folder. That agent is dead, because this one has locked the
// folder, and its processes have been killed.
func (r *reporterRun) inherit(ctx context.Context) bool {
	entry, err := r.kv.Get(ctx, protocol.LeaseKey(r.Name))
	var before protocol.Report
	if err != nil || r.identity == "" || wire.Unmarshal(entry.Value, &before) != nil || !strings.HasPrefix(before.Session, r.identity+".") {
		return false
	}
	return r.kv.Delete(ctx, protocol.LeaseKey(r.Name), entry.Revision) == nil
}

func (r *reporterRun) callRegistered() {
	if r.RegisteredFunc != nil {
		r.RegisteredFunc()
	}
}

// leave announces the end of the node and releases the lease, so that no process waits for it to expire.
func (r *reporterRun) leave(ctx context.Context) {
	if r.lease == nil {
		return
	}
	r.publish(protocol.Heartbeat{Node: r.Name, Session: r.session, Bye: true})
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	if err := r.lease.Release(last); err != nil {
		r.Logger.Debug("nodes: releasing the lease failed; it expires", "node", r.Name, "error", err)
	}
}
