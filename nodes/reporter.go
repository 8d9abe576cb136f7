package nodes

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/bus/wire"
	"troupe/gpu"
	"troupe/nodes/protocol"
)

// Reporter says that a node is there and how it is: a long lease for what is granted on it, a heartbeat for whether it
// is alive, and reports of its devices.
type Reporter struct {
	cfg     Config
	session string
}

// NewReporter is a reporter of the node that cfg describes. It does nothing before Run.
func NewReporter(cfg Config) (*Reporter, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	session := nuid.Next()
	if cfg.identity != "" {
		session = cfg.identity + "." + session
	}
	return &Reporter{cfg: cfg, session: session}, nil
}

// Name is the node's name.
func (r *Reporter) Name() string { return r.cfg.Name }

// Run reports until ctx ends, which is no error; then it says good-bye and gives the lease up. Who calls it has ended
// everything that runs on the node. A lease that somebody else holds is waited for; one that is lost in an outage is
// taken again.
func (r *Reporter) Run(ctx context.Context) error {
	bucket, err := r.open(ctx)
	if err != nil {
		return ended(ctx, err)
	}
	run := &running{Config: r.cfg, session: r.session, kv: bucket, askCh: make(chan struct{}, 1), changedCh: make(chan struct{}, 1)}
	run.stamp.Store(protocol.NoStamp)
	for _, whom := range []string{r.cfg.Name, ""} {
		sub, err := r.cfg.Bus.Conn().Subscribe(bus.NodeAsk(whom), bus.GuardMsg(func(m *nats.Msg) { run.asked(m.Data) }))
		if err != nil {
			return bus.Errorf(bus.CodeUnavailable, "node %s: listen for questions: %w", r.cfg.Name, err)
		}
		defer func() { _ = sub.Unsubscribe() }() // fails only if the connection is closed
	}
	watch, stop := context.WithCancel(ctx)
	watchedCh := make(chan struct{})
	bus.Go(func() {
		defer close(watchedCh)
		if err := r.cfg.Inventory.Watch(watch, func() { wake(run.changedCh) }); err != nil {
			r.cfg.Logger.Warn("nodes: the devices cannot be watched; they are still read", "node", r.cfg.Name, "error", err)
		}
	})
	err = run.loop(ctx)
	stop()
	<-watchedCh
	run.group.Wait()
	run.leave(ctx)
	return ended(ctx, err)
}

// open opens the bucket of the leases, and waits for a server that cannot be reached.
func (r *Reporter) open(ctx context.Context) (*kv.Bucket, error) {
	for {
		bucket, err := kv.Open(ctx, r.cfg.Bus, kv.Config{Bucket: protocol.LeaseBucket, Memory: true, Leases: true})
		full := errors.Is(err, bus.ErrNoSpace)
		if !full && !errors.Is(err, bus.ErrUnavailable) && !errors.Is(err, bus.ErrTimedOut) || ctx.Err() != nil {
			return bucket, err
		}
		r.cfg.Logger.Warn("nodes: the server is not to be had yet", "node", r.cfg.Name, "error", err)
		if full { // which is refused at once
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}
}

// ended is err, unless ctx was ended: that is what was asked for.
func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

func wake(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// running is one Run, whose goroutine owns it.
type running struct {
	Config
	session   string
	kv        *kv.Bucket
	askCh     chan struct{} // somebody wants the report
	stamp     atomic.Uint64 // of the newest question; set before askCh is woken
	changedCh chan struct{} // a device may have failed or recovered
	group     sync.WaitGroup

	lease  *kv.Lease
	report protocol.Report
	beats  int
	unread string // why the last reading failed; empty if it did not
}

// loop reads, beats and keeps the lease. It goes on beating while a lost lease is taken again: the node is alive.
func (r *running) loop(ctx context.Context) error {
	if err := r.read(ctx); err != nil {
		return err
	}
	lease, err := r.register(ctx, nil, r.report)
	if err != nil {
		return err
	}
	r.lease = lease
	r.tell()
	r.beat(true)
	beat := time.NewTicker(r.Beat)
	defer beat.Stop()
	read := time.NewTimer(rand.N(r.Read) + 1) // nodes that start together do not read together
	defer read.Stop()
	nc := r.Bus.Conn()
	backCh := nc.StatusChanged(nats.CONNECTED)
	defer nc.RemoveStatusListener(backCh)
	lostCh := lease.Lost()
	var againCh chan registered // holds one; nil unless the lease is being taken again
	defer func() {
		if againCh != nil { // ctx has ended, and so has that
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
			r.reread(ctx) // the node may have been given up meanwhile: what runs here now decides what is ended
		case _, open := <-backCh: // perhaps to a server that was started again, and has forgotten
			if !open {
				_, err := r.kv.Get(ctx, lease.Key()) // which says why the connection is closed
				return err
			}
			r.group.Go(bus.Guard(func() { r.recheck(ctx, r.lease) }))
			r.reread(ctx)
			changed = true
		case <-r.askCh:
			if r.report.Answered != r.stamp.Load() {
				r.reread(ctx) // the report must have been made after the question
			}
			changed = true
		case <-r.RunningCh:
			changed = r.rerun()
		case <-r.changedCh:
			changed = r.reread(ctx)
		case <-read.C:
			changed = r.reread(ctx)
			read.Reset(r.Read)
		case <-beat.C:
			r.beats++
			r.beat(r.beats%fullEvery == 0)
			continue
		}
		if changed {
			r.beat(true)
		}
		if r.toldFunc != nil {
			r.toldFunc() // what was not told anew has not changed
		}
	}
}

// asked hears a question. An empty one, of a leader of an older version, wants the report as it is.
func (r *running) asked(data []byte) {
	var q protocol.ReportRequest
	if len(data) > 0 {
		if err := wire.Unmarshal(data, &q); err != nil {
			r.Logger.Warn("nodes: a question cannot be read", "node", r.Name, "error", err)
			return
		}
	}
	if len(q.Ended) > 0 && r.EndFunc != nil {
		r.EndFunc(q.Ended)
	}
	if q.Stamp != 0 {
		r.stamp.Store(q.Stamp)
	}
	wake(r.askCh)
}

// rerun reads anew which workers run, and reports whether that is another than before.
func (r *running) rerun() bool {
	before := r.report.Running
	r.report.Seq++
	r.look()
	return !slices.EqualFunc(before, r.report.Running, sameRunning)
}

// look enters into the report which workers run.
func (r *running) look() {
	r.report.Running, r.report.RunningComplete = nil, false
	if r.RunningFunc != nil {
		r.report.Running, r.report.RunningComplete = protocol.LimitRunning(r.RunningFunc())
	}
}

func sameRunning(a, b protocol.RunningGrant) bool {
	return a.Reservation == b.Reservation && a.Token == b.Token && slices.Equal(a.Devices, b.Devices)
}

// recheck gives up a lease that the server has forgotten, so that it is taken again at once rather than at its next
// renewal.
func (r *running) recheck(ctx context.Context, lease *kv.Lease) {
	ctx, cancel := context.WithTimeout(ctx, recheckMost)
	defer cancel()
	for {
		_, err := r.kv.Get(ctx, lease.Key())
		switch {
		case err == nil, errors.Is(err, bus.ErrClosed):
			return
		case errors.Is(err, bus.ErrNotFound):
			_ = lease.Release(ctx) // it is lost in any case
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(recheckPause):
		}
	}
}

// registered is what came of taking the lease.
type registered struct {
	lease *kv.Lease
	err   error
}

// read fills the report.
func (r *running) read(ctx context.Context) error {
	stamp := r.stamp.Load() // before anything is read
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
		Node: r.Name, Session: r.session, Seq: r.report.Seq + 1, Labels: r.Labels, CPUs: r.CPUs, Memory: r.Memory,
		Source: r.Inventory.String(), Devices: devices, Foreign: foreign, Answered: stamp,
	}
	r.look()
	return nil
}

// reread reads again and reports whether that must be told at once. What cannot be read any more is told as unfit: a
// driver that does not answer is no reason to grant its devices.
func (r *running) reread(ctx context.Context) bool {
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
	r.report.Answered = stamp // the devices are told as unfit, which is true after the question too
	r.look()
	if err.Error() == r.unread {
		return !slices.EqualFunc(old.Running, r.report.Running, sameRunning)
	}
	r.unread = err.Error()
	r.Logger.Warn("nodes: the devices cannot be read", "node", r.Name, "error", err)
	r.report.Devices = slices.Clone(old.Devices)
	for i := range r.report.Devices {
		r.report.Devices[i].Health.Lost = "its driver does not answer: " + r.unread
	}
	return true
}

// differs reports whether what decides on grants is another than before. Readings such as the temperature do not count.
func (r *running) differs(old protocol.Report) bool {
	if !slices.EqualFunc(old.Running, r.report.Running, sameRunning) {
		return true
	}
	return !slices.EqualFunc(r.report.Devices, old.Devices, func(a, b gpu.Device) bool {
		return a.UUID == b.UUID && a.Index == b.Index &&
			slices.Equal(r.report.Unfit(a), old.Unfit(b)) && len(a.Sample.Processes) == len(b.Sample.Processes)
	})
}

// beat gives a sign of life. One that is lost, or cannot be sent, is made up for by the next.
func (r *running) beat(full bool) {
	beat := protocol.Heartbeat{Node: r.Name, Session: r.session}
	if full {
		beat.Report = &r.report
	}
	r.publish(beat)
}

func (r *running) publish(beat protocol.Heartbeat) {
	data, err := wire.Marshal(beat)
	if err == nil {
		err = r.Bus.Conn().Publish(bus.NodeBeat(r.Name), data)
	}
	if err != nil {
		r.Logger.Debug("nodes: a heartbeat is lost", "node", r.Name, "error", err)
	}
}

// register takes the lease, or takes back the one that was lost, and waits as long as it must. It touches nothing that
// the loop owns.
func (r *running) register(ctx context.Context, lost *kv.Lease, report protocol.Report) (*kv.Lease, error) {
	if lost != nil && lost.Regain(ctx) == nil {
		return lost, nil
	}
	value, err := wire.Marshal(report)
	if err != nil {
		return nil, err
	}
	said := false
	for wait := 20 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		lease, err := r.kv.Lease(ctx, protocol.LeaseKey(r.Name), value, r.Lease)
		switch {
		case err == nil:
			return lease, nil
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case errors.Is(err, bus.ErrInvalid), errors.Is(err, bus.ErrClosed), errors.Is(err, bus.ErrRefused):
			return nil, err
		case errors.Is(err, bus.ErrNoSpace):
		case r.inherit(ctx):
			continue
		case !said:
			said = true
			r.Logger.Warn("nodes: another agent has this node's name, or was killed a moment ago; waiting", "node", r.Name, "error", holder(err))
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(wait):
		}
	}
}

// holder says who has the name, without the whole of its report.
func holder(err error) error {
	var held *kv.LeaseHeldError
	var report protocol.Report
	if !errors.As(err, &held) || wire.Unmarshal(held.Holder, &report) != nil {
		return err
	}
	return bus.Errorf(bus.CodeExists, "the agent of session %s with %d devices has it until %s, unless it gives another sign of life", report.Session, len(report.Devices), held.Expires.Format(time.RFC3339))
}

// inherit ends the lease of an earlier agent of the same folder. That agent is dead, because we have its folder, and what
// it left has been ended.
func (r *running) inherit(ctx context.Context) bool {
	entry, err := r.kv.Get(ctx, protocol.LeaseKey(r.Name))
	var before protocol.Report
	if err != nil || r.identity == "" || wire.Unmarshal(entry.Value, &before) != nil || !strings.HasPrefix(before.Session, r.identity+".") {
		return false
	}
	return r.kv.Delete(ctx, protocol.LeaseKey(r.Name), entry.Revision) == nil
}

func (r *running) tell() {
	if r.RegisteredFunc != nil {
		r.RegisteredFunc()
	}
}

// leave ends the lease, so that nobody waits for it to expire.
func (r *running) leave(ctx context.Context) {
	if r.lease == nil {
		return
	}
	r.publish(protocol.Heartbeat{Node: r.Name, Session: r.session, Bye: true})
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastActs)
	defer cancel()
	if err := r.lease.Release(last); err != nil {
		r.Logger.Debug("nodes: the lease is left to expire", "node", r.Name, "error", err)
	}
}
