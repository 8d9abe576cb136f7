package registry

import (
	"cmp"
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/nodes/evidence"
)

const (
	processCheckEvery = 250 * time.Millisecond // interval of checking driver processes on this host
	inboxProbeEvery   = time.Second            // interval of probing the inboxes of drivers
	operationTimeout  = 3 * time.Second        // timeout of one operation on the registry
)

// DriverWatch monitors the drivers of all namespaces and ends the leases of dead ones: otherwise their roles and
// devices are held until the lease expires. A driver is dead whose process on this host has exited, or whose inbox has had no
// subscriber for evidence.DriverAbsent, while the server was reachable and the lease was not renewed. The head runs one; each
// agent runs a HostWatch.
type DriverWatch struct {
	Bus    *bus.Bus     // the caller closes it
	Logger *slog.Logger // zero: the logger of Bus
}

// Start starts the watch. The channel, which holds one, is ready when the lease of a driver with roles or reservations
// has ended: they can be destroyed now. stop returns when the watch has ended.
func (w DriverWatch) Start(ctx context.Context) (endedCh <-chan struct{}, stop func()) {
	if w.Logger == nil {
		w.Logger = w.Bus.Logger()
	}
	ctx, cancel := context.WithCancel(ctx)
	d := &driverMonitor{DriverWatch: w, ender: leaseEnder{log: w.Logger}, newsCh: make(chan leaseEvent), endedCh: make(chan struct{}, 1), absentCh: make(chan string, 1024), all: map[string]*driver{}}
	var group sync.WaitGroup
	group.Go(bus.Guard(func() { followLeases(ctx, w.Bus, w.Logger, d.newsCh) }))
	d.uptime.Follow(w.Bus)
	group.Go(bus.Guard(func() { d.run(ctx) }))
	return d.endedCh, func() { cancel(); group.Wait() }
}

// leaseEvent is a change of one driver's lease.
type leaseEvent struct {
	reg      Registry
	space    string // namespace
	session  string
	value    []byte
	revision uint64
	gone     bool
}

// driver is one driver, as its lease describes it.
type driver struct {
	leaseEvent
	driverProcess
	probed uint64    // the round in which its inbox was last probed
	absent uint64    // the last round in which its inbox had no subscriber
	since  time.Time // since when the inbox has no subscriber; zero: it has one
	again  time.Time // when ending its lease may be retried
}

// driverMonitor is a running DriverWatch. Its goroutine owns all fields but the channels and uptime.
type driverMonitor struct {
	DriverWatch
	newsCh   chan leaseEvent
	endedCh  chan struct{}
	absentCh chan string // sessions whose inbox has no subscriber
	uptime   Uptime

	all   map[string]*driver // by session
	round uint64
	ender leaseEnder
}

func (d *driverMonitor) run(ctx context.Context) {
	look := time.NewTicker(processCheckEvery)
	defer look.Stop()
	ask := func() {}
	if sub, inbox, err := d.subscribeProbes(); err != nil {
		d.Logger.Warn("roles: inboxes cannot be probed; drivers on other hosts are monitored by their leases only", "error", err)
	} else {
		defer func() { _ = sub.Unsubscribe() }() // fails only on a closed connection
		ask = func() { d.probeInboxes(inbox) }
	}
	fullCh, full := d.Bus.StoreErr()
	d.uptime.Block(full != nil)
	for asked := time.Now(); ; {
		select {
		case <-ctx.Done():
			d.ender.dropProofs(time.Time{})
			return
		case news := <-d.newsCh:
			d.handleLease(ctx, news)
		case session := <-d.absentCh:
			if one := d.all[session]; one != nil && one.probed == d.round && one.absent != d.round {
				one.absent = d.round
				if one.since.IsZero() {
					one.since = time.Now()
				}
			}
		case <-fullCh: // a full store takes no renewals, so that expired leases prove nothing
			fullCh, full = d.Bus.StoreErr()
			d.uptime.Block(full != nil)
		case now := <-look.C:
			d.endDeadDrivers(ctx, now)
			if now.Sub(asked) >= inboxProbeEvery {
				asked = now
				ask()
			}
			d.ender.dropProofs(now)
		}
	}
}

// handleLease handles a change of a lease. A lease that expires while the server was reachable all the time is a proof of
// death; after an outage it is not, because the driver could not renew it.
func (d *driverMonitor) handleLease(ctx context.Context, news leaseEvent) {
	one := d.all[news.session]
	if !news.gone {
		d.all[news.session] = &driver{leaseEvent: news, driverProcess: readDriverProcess(news.value)} // a renewal resets the probes of its inbox
		return
	}
	delete(d.all, news.session)
	if one == nil || !one.owns(ctx) {
		return // a driver that closes owns nothing
	}
	if v := one.judge(evidence.Signs{Silence: one.limits().Silence + 1, Heard: d.uptime.Heard()}); v.Dead {
		d.ender.writeProof(ctx, one.reg, one.session, "its lease has expired: "+v.Why)
	}
	wake(d.endedCh)
}

// owns reports whether a role or a reservation ends with the driver.
func (one *driver) owns(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, operationTimeout)
	defer cancel()
	all, _ := one.reg.List(ctx) // a partial list counts
	for _, rec := range all {
		if rec.Owner == one.session {
			return true
		}
	}
	holds, _ := one.reg.DriverReservations(ctx)
	for _, h := range holds {
		if h.Owner == one.session {
			return true
		}
	}
	return false
}

// endDeadDrivers ends the leases of dead drivers.
func (d *driverMonitor) endDeadDrivers(ctx context.Context, now time.Time) {
	for _, one := range d.all {
		signs := evidence.Signs{Heard: d.uptime.Heard()}
		if one.visible() && one.dead() {
			signs.Exit = exitSeen
		}
		if !one.since.IsZero() {
			signs.Absent = now.Sub(one.since)
		}
		if v := one.judge(signs); v.Dead && !now.Before(one.again) {
			d.endLease(ctx, one, v.Why)
		}
	}
}

func (one *driver) limits() evidence.Limits {
	return evidence.Limits{Silence: cmp.Or(one.Lease, evidence.DriverLease), Absent: evidence.DriverAbsent}
}

func (one *driver) judge(s evidence.Signs) evidence.Verdict { return evidence.Judge(s, one.limits()) }

// endLease ends the lease of a dead driver.
func (d *driverMonitor) endLease(ctx context.Context, one *driver, why string) {
	one.again = time.Now().Add(inboxProbeEvery)
	if d.ender.end(ctx, one.reg, one.session, one.Name, one.revision, why) {
		delete(d.all, one.session)
		wake(d.endedCh)
	}
}

// subscribeProbes subscribes to the server's no-responders answers to probes of inboxes.
func (d *driverMonitor) subscribeProbes() (*bus.Subscription, string, error) {
	inbox := d.Bus.NewInbox()
	sub, err := d.Bus.Subscribe(inbox+".*", func(m *bus.Msg) {
		if len(m.Data) == 0 && m.Header.Get("Status") == "503" {
			select {
			case d.absentCh <- m.Subject[strings.LastIndexByte(m.Subject, '.')+1:]:
			default: // probed again
			}
		}
	})
	return sub, inbox, err
}

// probeInboxes probes the inbox of every driver. Inboxes without an answer to the last probe have a subscriber.
func (d *driverMonitor) probeInboxes(inbox string) {
	for _, one := range d.all {
		if one.absent != d.round {
			one.since = time.Time{}
		}
	}
	d.round++
	for _, one := range d.all {
		one.probed = d.round
		d.Bus.ProbeInbox(one.space, one.session, inbox+"."+one.session)
	}
}

func wake(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// followLeases sends every change and renewal of a driver's lease, of all namespaces, until ctx ends.
func followLeases(ctx context.Context, b *bus.Bus, log *slog.Logger, newsCh chan<- leaseEvent) {
	for waits := followBackoff.Start(); ctx.Err() == nil; {
		err := followOnce(ctx, b, newsCh)
		if err == nil {
			waits.Reset()
		} else if ctx.Err() == nil {
			log.Debug("roles: watching the leases of drivers failed; retrying", "error", err)
		}
		_ = waits.Wait(ctx) // the loop checks ctx
	}
}

// followBackoff paces attempts to watch the leases again.
var followBackoff = bus.Backoff{First: time.Second, Most: 5 * time.Second}

// followOnce is one watch, until it ends.
func followOnce(ctx context.Context, b *bus.Bus, newsCh chan<- leaseEvent) error {
	reg, err := Open(ctx, b, "")
	if err != nil {
		return err
	}
	events, err := reg.leases.Watch(ctx, "")
	if err != nil {
		return err
	}
	for ev := range events {
		space, rest, _ := strings.Cut(ev.Key, ".")
		session, ours := strings.CutPrefix(rest, driverKey(""))
		if ev.Kind == kv.EventComplete || !ours {
			continue
		}
		news := leaseEvent{reg: reg.Of(space), space: space, session: session, value: ev.Value, revision: ev.Revision, gone: ev.Kind == kv.EventDelete}
		select {
		case newsCh <- news:
		case <-ctx.Done():
		}
	}
	return nil
}
