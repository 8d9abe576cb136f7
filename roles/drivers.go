package roles

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/kv"
)

const (
	driverLook  = 250 * time.Millisecond // interval of checking driver processes on this host
	driverKnock = time.Second            // interval of probing the inboxes of drivers
	driverGone  = 5 * time.Second        // a driver whose inbox has had no subscriber for this long is dead
	goneKept    = time.Minute            // lifetime of the proof of a driver's death
)

// DriverWatch monitors the drivers of all namespaces and ends the leases of dead ones: otherwise their roles and
// devices are held until the lease expires. Every agent runs one for the drivers on its host, and so does the head.
type DriverWatch struct {
	// Bus is the connection; the caller closes it.
	Bus *bus.Bus
	// Remote monitors drivers on other hosts too: one whose inbox has had no subscriber for five seconds, while the
	// server was reachable and the lease was not renewed, is dead. One DriverWatch of a bus, the head's, needs it.
	Remote bool
	// Logger receives errors and warnings. Zero: the logger of Bus.
	Logger *slog.Logger
}

// Start starts the watch. The channel, which holds one, is ready when the lease of a driver with roles or reservations
// has ended (with Remote; otherwise when this watch has ended one): they can be destroyed now. stop returns when the
// watch has ended.
func (w DriverWatch) Start(ctx context.Context) (endedCh <-chan struct{}, stop func()) {
	if w.Logger == nil {
		w.Logger = w.Bus.Logger()
	}
	ctx, cancel := context.WithCancel(ctx)
	d := &drivers{DriverWatch: w, newsCh: make(chan leaseNews), endedCh: make(chan struct{}, 1), absentCh: make(chan string, 1024), all: map[string]*driver{}}
	var group sync.WaitGroup
	group.Go(bus.Guard(func() { followLeases(ctx, w.Bus, w.Logger, d.newsCh) }))
	group.Go(bus.Guard(func() { d.reach.watch(ctx, w.Bus) }))
	group.Go(bus.Guard(func() { d.run(ctx) }))
	return d.endedCh, func() { cancel(); group.Wait() }
}

// leaseNews is a change of one driver's lease.
type leaseNews struct {
	reg      registry
	space    string // namespace
	session  string
	value    []byte
	revision uint64
	gone     bool
}

// driver is one driver, as its lease describes it.
type driver struct {
	leaseNews
	holder
	knocked uint64    // the round in which its inbox was last probed
	absent  uint64    // the last round in which its inbox had no subscriber
	since   time.Time // since when the inbox has no subscriber; zero: it has one
	again   time.Time // when ending its lease may be retried
}

// drivers is a running DriverWatch. Its goroutine owns all fields but the channels and reach.
type drivers struct {
	DriverWatch
	newsCh   chan leaseNews
	endedCh  chan struct{}
	absentCh chan string // sessions whose inbox has no subscriber
	reach    reach

	all    map[string]*driver // by session
	round  uint64
	proofs []proof
}

// proof is the key of a driver that is known to be dead.
type proof struct {
	lease *kv.Lease
	until time.Time
}

func (d *drivers) run(ctx context.Context) {
	look := time.NewTicker(driverLook)
	defer look.Stop()
	ask := func() {}
	if d.Remote {
		sub, inbox, err := d.hearAbsent()
		if err != nil {
			d.Logger.Warn("roles: inboxes cannot be probed; drivers on other hosts are monitored by their leases only", "error", err)
		} else {
			defer func() { _ = sub.Unsubscribe() }() // fails only on a closed connection
			ask = func() { d.ask(inbox) }
		}
	}
	fullCh, full := d.Bus.StoreErr()
	d.reach.block(full != nil)
	for asked := time.Now(); ; {
		select {
		case <-ctx.Done():
			d.dropProofs(time.Time{})
			return
		case news := <-d.newsCh:
			d.hear(ctx, news)
		case session := <-d.absentCh:
			if one := d.all[session]; one != nil && one.knocked == d.round && one.absent != d.round {
				one.absent = d.round
				if one.since.IsZero() {
					one.since = time.Now()
				}
			}
		case <-fullCh: // a full store takes no renewals, so that expired leases prove nothing
			fullCh, full = d.Bus.StoreErr()
			d.reach.block(full != nil)
		case now := <-look.C:
			d.judge(ctx, now)
			if now.Sub(asked) >= driverKnock {
				asked = now
				ask()
			}
			d.dropProofs(now)
		}
	}
}

// hear handles a change of a lease. A lease that expires while the server was reachable all the time is a proof of
// death; after an outage it is not, because the driver could not renew it.
func (d *drivers) hear(ctx context.Context, news leaseNews) {
	one := d.all[news.session]
	if !news.gone {
		d.all[news.session] = &driver{leaseNews: news, holder: readHolder(news.value)} // a renewal resets the probes of its inbox
		return
	}
	delete(d.all, news.session)
	if one == nil || !d.Remote || !one.owns(ctx) {
		return // a driver that closes owns nothing
	}
	if d.reach.missing(cmp.Or(one.Lease, defaultLease)) == 0 {
		d.prove(ctx, one, "its lease has expired")
	}
	wake(d.endedCh)
}

// owns reports whether a role or a reservation ends with the driver.
func (one *driver) owns(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, registryActs)
	defer cancel()
	all, _ := one.reg.list(ctx) // a partial list counts
	for _, rec := range all {
		if rec.Owner == one.session {
			return true
		}
	}
	holds, _ := one.reg.holds(ctx)
	for _, h := range holds {
		if h.Owner == one.session {
			return true
		}
	}
	return false
}

// judge ends the leases of dead drivers.
func (d *drivers) judge(ctx context.Context, now time.Time) {
	for _, one := range d.all {
		switch {
		case now.Before(one.again):
		case one.here() && one.dead():
			d.end(ctx, one, "its process has exited")
		case !one.since.IsZero() && now.Sub(one.since) >= driverGone && d.reach.missing(cmp.Or(one.Lease, defaultLease)) == 0:
			d.end(ctx, one, "its inbox has had no subscriber for "+driverGone.String())
		}
	}
}

// end writes the proof that a driver is dead, and ends its lease. A lease that was renewed meanwhile stays.
func (d *drivers) end(ctx context.Context, one *driver, why string) {
	one.again = time.Now().Add(driverKnock)
	d.Logger.Warn("roles: a driver died; ending its lease", "driver", one.Name, "namespace", one.space, "why", why)
	d.prove(ctx, one, why)
	ctx, cancel := context.WithTimeout(ctx, registryActs)
	defer cancel()
	err := one.reg.leases.Delete(ctx, one.reg.key(driverKey(one.session)), one.revision)
	switch {
	case err == nil:
		delete(d.all, one.session)
		wake(d.endedCh)
	case !errors.Is(err, bus.ErrConflict) && ctx.Err() == nil:
		d.Logger.Warn("roles: ending the lease of a dead driver failed; retrying", "driver", one.Name, "error", err)
	}
}

// prove writes the proof: with it, a missing lease needs no grace period. The proof is a lease too, so that it ends
// with this process at the latest.
func (d *drivers) prove(ctx context.Context, one *driver, why string) {
	ctx, cancel := context.WithTimeout(ctx, registryActs)
	defer cancel()
	lease, err := one.reg.leases.Lease(ctx, one.reg.key(goneKey(one.session)), []byte(why), goneKept)
	if err == nil {
		d.proofs = append(d.proofs, proof{lease, time.Now().Add(goneKept)})
	} else if !errors.Is(err, bus.ErrExists) { // another watch may have written it
		d.Logger.Debug("roles: writing the proof of a driver's death failed; its roles end later", "driver", one.Name, "error", err)
	}
}

// dropProofs releases expired proofs; at the zero time all.
func (d *drivers) dropProofs(now time.Time) {
	for len(d.proofs) > 0 && (now.IsZero() || now.After(d.proofs[0].until)) {
		ctx, cancel := context.WithTimeout(context.Background(), registryActs)
		_ = d.proofs[0].lease.Release(ctx) // otherwise it expires
		cancel()
		d.proofs = d.proofs[1:]
	}
}

// hearAbsent subscribes to the server's no-responders answers to probes of inboxes.
func (d *drivers) hearAbsent() (*bus.Subscription, string, error) {
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

// ask probes the inbox of every driver. Inboxes without an answer to the last probe have a subscriber.
func (d *drivers) ask(inbox string) {
	for _, one := range d.all {
		if one.absent != d.round {
			one.since = time.Time{}
		}
	}
	d.round++
	for _, one := range d.all {
		one.knocked = d.round
		d.Bus.Knock(one.space, one.session, inbox+"."+one.session)
	}
}

func wake(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// gone reports whether a driver is proved dead.
func (g registry) gone(ctx context.Context, session string) bool {
	_, err := g.leases.Get(ctx, g.key(goneKey(session)))
	return err == nil
}

// goneKey is the key of the proof that a driver is dead, beside its lease.
func goneKey(session string) string { return "gone." + session }

// followLeases sends every change and renewal of a driver's lease, of all namespaces, until ctx ends.
func followLeases(ctx context.Context, b *bus.Bus, log *slog.Logger, newsCh chan<- leaseNews) {
	for waits := watchBackoff.Start(); ctx.Err() == nil; {
		err := followOnce(ctx, b, newsCh)
		if err == nil {
			waits.Reset()
		} else if ctx.Err() == nil {
			log.Debug("roles: watching the leases of drivers failed; retrying", "error", err)
		}
		_ = waits.Wait(ctx) // the loop checks ctx
	}
}

// watchBackoff paces attempts to watch a bucket again.
var watchBackoff = bus.Backoff{First: time.Second, Most: sweepAgain}

// followOnce is one watch, until it ends.
func followOnce(ctx context.Context, b *bus.Bus, newsCh chan<- leaseNews) error {
	reg, err := openRegistry(ctx, b, "")
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
		news := leaseNews{reg: reg.of(space), space: space, session: session, value: ev.Value, revision: ev.Revision, gone: ev.Kind == kv.EventDelete}
		select {
		case newsCh <- news:
		case <-ctx.Done():
		}
	}
	return nil
}
