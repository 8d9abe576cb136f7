package roles

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"troupe/bus"
	"troupe/bus/kv"
)

const (
	driverLook  = 250 * time.Millisecond // between two looks at the processes of drivers on this host
	driverKnock = time.Second            // between two questions whether a driver's inbox has a subscriber
	driverGone  = 5 * time.Second        // a driver without one for so long is gone
	goneKept    = time.Minute            // how long the proof of a driver's end is kept
)

// DriverWatch is a watch over the drivers of all namespaces, which ends the leases of those that are known to have ended:
// without it their roles and devices are held until the lease expires. Every agent has one, for the drivers on its host,
// and so has the head.
type DriverWatch struct {
	// Bus is the connection; it stays the caller's.
	Bus *bus.Bus
	// Remote judges the drivers on other hosts as well: one whose inbox has had no subscriber for five seconds, while the
	// server could be reached and the lease was not renewed, is gone. One watch of a bus, the head's, needs to do so.
	Remote bool
	// Logger receives what goes wrong. Zero: the bus's.
	Logger *slog.Logger
}

// Start begins to watch. The channel, which holds one, is ready when the lease of a driver has ended that left something
// behind (with Remote; otherwise when this watch has ended one): it can be ended now. stop returns when nothing of the watch runs any more.
func (w DriverWatch) Start(ctx context.Context) (endedCh <-chan struct{}, stop func()) {
	if w.Logger == nil {
		w.Logger = w.Bus.Logger()
	}
	ctx, cancel := context.WithCancel(ctx)
	d := &drivers{DriverWatch: w, newsCh: make(chan leaseNews), endedCh: make(chan struct{}, 1), absentCh: make(chan string, 1024), all: map[string]*driver{}}
	var group sync.WaitGroup
	group.Go(bus.Guard(func() { followLeases(ctx, w.Bus, w.Logger, d.newsCh) }))
	group.Go(bus.Guard(func() { d.reach.watch(ctx, w.Bus.Conn()) }))
	group.Go(bus.Guard(func() { d.run(ctx) }))
	return d.endedCh, func() { cancel(); group.Wait() }
}

// leaseNews is what is heard of one driver's lease.
type leaseNews struct {
	reg      registry
	space    string // its namespace
	session  string
	value    []byte
	revision uint64
	gone     bool
}

// driver is one driver, as its lease says.
type driver struct {
	leaseNews
	holder
	knocked uint64    // the round in which it was last asked about
	absent  uint64    // the last round in which its inbox had no subscriber
	since   time.Time // since when that is so; zero: it has one
	again   time.Time // when an attempt to end its lease may be repeated
}

// drivers is a running watch. Its goroutine owns all but the channels and reach.
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

// proof is the mark of a driver that is known to have ended.
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
			d.Logger.Warn("roles: drivers on other hosts are judged by their leases alone", "error", err)
		} else {
			defer func() { _ = sub.Unsubscribe() }() // fails only if the connection is closed
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
		case <-fullCh: // a store that takes no writes takes no renewals either, and leases that end then prove nothing
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

// hear takes in what is said of a lease. One that has ended by itself while the server was there all the time is as good as
// a proof; after an outage it is not, because the driver could not renew it.
func (d *drivers) hear(ctx context.Context, news leaseNews) {
	one := d.all[news.session]
	if !news.gone {
		d.all[news.session] = &driver{leaseNews: news, holder: readHolder(news.value)} // a renewal: its inbox is asked about anew
		return
	}
	delete(d.all, news.session)
	if one == nil || !d.Remote || !one.owns(ctx) {
		return // a driver that ends in order leaves nothing
	}
	if d.reach.missing(cmp.Or(one.Lease, defaultLease)) == 0 {
		d.prove(ctx, one, "its lease has expired")
	}
	wake(d.endedCh)
}

// owns reports whether the registry has something that ends with the driver.
func (one *driver) owns(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, registryActs)
	defer cancel()
	all, _ := one.reg.list(ctx) // what can be read counts
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

// judge ends the leases of drivers that have ended.
func (d *drivers) judge(ctx context.Context, now time.Time) {
	for _, one := range d.all {
		switch {
		case now.Before(one.again):
		case one.here() && one.dead():
			d.end(ctx, one, "its process has ended")
		case !one.since.IsZero() && now.Sub(one.since) >= driverGone && d.reach.missing(cmp.Or(one.Lease, defaultLease)) == 0:
			d.end(ctx, one, "nothing has listened at its inbox for "+driverGone.String())
		}
	}
}

// end proves that a driver has ended, and ends its lease. A lease that was renewed since it was heard of last stays: then
// there is news of it soon.
func (d *drivers) end(ctx context.Context, one *driver, why string) {
	one.again = time.Now().Add(driverKnock)
	d.Logger.Warn("roles: a driver has ended without a word; its lease ends", "driver", one.Name, "namespace", one.space, "why", why)
	d.prove(ctx, one, why)
	ctx, cancel := context.WithTimeout(ctx, registryActs)
	defer cancel()
	err := one.reg.leases.Delete(ctx, one.reg.key(driverKey(one.session)), one.revision)
	switch {
	case err == nil:
		delete(d.all, one.session)
		wake(d.endedCh)
	case !errors.Is(err, bus.ErrConflict) && ctx.Err() == nil:
		d.Logger.Warn("roles: the lease of a driver that has ended cannot be ended; trying again", "driver", one.Name, "error", err)
	}
}

// prove leaves a mark for all who look for the driver's lease: that it is not there has no other reason. It is a lease
// itself, so that it ends with this process at the latest.
func (d *drivers) prove(ctx context.Context, one *driver, why string) {
	ctx, cancel := context.WithTimeout(ctx, registryActs)
	defer cancel()
	lease, err := one.reg.leases.Lease(ctx, one.reg.key(goneKey(one.session)), []byte(why), goneKept)
	if err == nil {
		d.proofs = append(d.proofs, proof{lease, time.Now().Add(goneKept)})
	} else if !errors.Is(err, bus.ErrExists) { // another watch may have seen it too
		d.Logger.Debug("roles: the end of a driver cannot be written down; its roles end later", "driver", one.Name, "error", err)
	}
}

// dropProofs releases the marks that are old enough; at the zero time all are let expire.
func (d *drivers) dropProofs(now time.Time) {
	for len(d.proofs) > 0 && (now.IsZero() || now.After(d.proofs[0].until)) {
		ctx, cancel := context.WithTimeout(context.Background(), registryActs)
		_ = d.proofs[0].lease.Release(ctx) // or it expires
		cancel()
		d.proofs = d.proofs[1:]
	}
}

// hearAbsent listens for the server's word that an inbox has no subscriber.
func (d *drivers) hearAbsent() (*nats.Subscription, string, error) {
	inbox := d.Bus.Conn().NewInbox()
	sub, err := d.Bus.Conn().Subscribe(inbox+".*", bus.GuardMsg(func(m *nats.Msg) {
		if len(m.Data) == 0 && m.Header.Get("Status") == "503" {
			select {
			case d.absentCh <- m.Subject[strings.LastIndexByte(m.Subject, '.')+1:]:
			default: // it is asked about again
			}
		}
	}))
	return sub, inbox, err
}

// ask has the server asked about every driver. Those of the last round that it said nothing about have a subscriber.
func (d *drivers) ask(inbox string) {
	for _, one := range d.all {
		if one.absent != d.round {
			one.since = time.Time{}
		}
	}
	d.round++
	for _, one := range d.all {
		one.knocked = d.round
		d.Bus.ProbeInbox(one.space, one.session, inbox+"."+one.session)
	}
}

func wake(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// gone reports whether it was proved that a driver without a lease has ended.
func (g registry) gone(ctx context.Context, session string) bool {
	_, err := g.leases.Get(ctx, g.key(goneKey(session)))
	return err == nil
}

// goneKey is the mark of a driver that is known to have ended, beside its lease.
func goneKey(session string) string { return "gone." + session }

// followLeases tells of every driver's lease in every namespace, again at each renewal, until ctx ends.
func followLeases(ctx context.Context, b *bus.Bus, log *slog.Logger, newsCh chan<- leaseNews) {
	for ctx.Err() == nil {
		err := followOnce(ctx, b, newsCh)
		if err != nil && ctx.Err() == nil {
			log.Debug("roles: the leases of drivers cannot be watched; trying again", "error", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(sweepAgain):
		}
	}
}

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
