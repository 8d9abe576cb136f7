package registry

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"troupe/bus"
	"troupe/nodes"
)

const (
	// AnnounceEvery is how often a driver tells the agents of its host that it lives.
	AnnounceEvery = 5 * time.Second
	// forgetAfter is how long an agent checks the process of a driver that says nothing any more.
	forgetAfter = 3*AnnounceEvery + time.Second
	// maxHostDrivers bounds the drivers that an agent checks, and maxOfNamespace those of one namespace; it does not see the exits of more, but
	// the head misses their inboxes.
	maxHostDrivers = 4096
	maxOfNamespace = 1024
)

// announcement is what a driver, or a worker that has created roles, tells the agents of its host.
type announcement struct {
	Session string        `json:"session"`
	Process driverProcess `json:"process"`
}

// driversOf is troupe.<namespace>.@host.<host>: the announcements of the drivers on one host; see thisHost.
func driversOf(namespace, host string) string { return bus.Subject(namespace, "@host", hostWord(host)) }

func hostWord(host string) string {
	sum := sha256.Sum256([]byte(host))
	return hex.EncodeToString(sum[:8])
}

// HostWord is the word for this host in the subject of its drivers' announcements, and in the credential of its agent.
func HostWord() string { return hostWord(thisHost()) }

// Announce tells the agents of this host that a driver lives here, so that they see its process exit. One that is lost is made good by the
// next, after AnnounceEvery.
func Announce(b *bus.Bus, namespace, session, name string, worker *nodes.WorkerID) {
	p := thisProcess(name, worker)
	data, err := json.Marshal(announcement{Session: session, Process: p})
	if err == nil && p.visible() {
		_ = b.Publish(driversOf(namespace, p.Host), data)
	}
}

// thisProcess describes this process in a lease.
func thisProcess(name string, worker *nodes.WorkerID) driverProcess {
	p := driverProcess{Name: name, Host: thisHost(), PID: os.Getpid(), Worker: worker}
	p.Start, _ = startedAt(p.PID) // zero: unknown
	return p
}

// HostWatch ends the leases of the drivers on this host whose process has exited. Every agent runs one. It hears of drivers by what they
// announce to their host, and reads the lease of one whose process is gone: the lease decides, so that an announcement ends nothing.
type HostWatch struct {
	Bus *bus.Bus // the caller closes it
	// ExitedCh tells of workers whose process has exited: the roles that such a worker created end at once, without the wait
	// for the next check of processes. Zero: none.
	ExitedCh <-chan nodes.WorkerID
	Logger   *slog.Logger // zero: the logger of Bus
}

// Start starts the watch; stop returns when it has ended.
func (w HostWatch) Start(ctx context.Context) (stop func(), err error) {
	if w.Logger == nil {
		w.Logger = w.Bus.Logger()
	}
	ctx, cancel := context.WithCancel(ctx)
	h := &hostMonitor{HostWatch: w, newsCh: make(chan hostDriver), all: map[string]*hostDriver{}, ender: leaseEnder{log: w.Logger}}
	sub, err := w.Bus.Subscribe(driversOf("*", thisHost()), func(m *bus.Msg) {
		if one, ok := readAnnouncement(m); ok {
			select {
			case h.newsCh <- one:
			case <-ctx.Done():
			}
		}
	})
	if err != nil {
		cancel()
		return nil, err
	}
	var group sync.WaitGroup
	group.Go(bus.Guard(func() { h.run(ctx) }))
	return func() {
		cancel()
		_ = sub.Unsubscribe() // fails only on a closed connection
		group.Wait()
	}, nil
}

// hostDriver is a driver on this host, as it has announced itself.
type hostDriver struct {
	announcement
	space string    // namespace
	until time.Time // when it is forgotten, unless it announces itself again or its process is gone
	again time.Time // when its lease may be ended, after an attempt that failed
}

// readAnnouncement reads what anyone in the namespace may have written.
func readAnnouncement(m *bus.Msg) (one hostDriver, ok bool) {
	words := strings.Split(m.Subject, ".")
	if len(words) != 4 || json.Unmarshal(m.Data, &one.announcement) != nil {
		return one, false
	}
	one.space, one.until = words[1], time.Now().Add(forgetAfter)
	return one, bus.CheckName("namespace", one.space) == nil && bus.CheckName("session", one.Session) == nil && one.Process.visible()
}

// hostMonitor is a running HostWatch. Its goroutine owns all fields but the channels.
type hostMonitor struct {
	HostWatch
	newsCh chan hostDriver
	all    map[string]*hostDriver // by namespace and session
	ender  leaseEnder
}

func (h *hostMonitor) run(ctx context.Context) {
	look := time.NewTicker(processCheckEvery)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			h.ender.dropProofs(time.Time{})
			return
		case one := <-h.newsCh:
			key := one.space + "." + one.Session
			if h.all[key] != nil || h.hasRoom(one.space) {
				h.all[key] = &one
			}
		case id := <-h.ExitedCh:
			for key, one := range h.all {
				if one.Process.Worker != nil && *one.Process.Worker == id {
					h.settle(ctx, key, one, &id)
				}
			}
		case now := <-look.C:
			if h.Bus.Connected() {
				h.check(ctx, now)
			}
			h.ender.dropProofs(now)
		}
	}
}

// hasRoom reports whether another driver of a namespace is checked.
func (h *hostMonitor) hasRoom(namespace string) bool {
	if len(h.all) < maxOfNamespace || len(h.all) >= maxHostDrivers {
		return len(h.all) < maxHostDrivers
	}
	n := 0
	for _, one := range h.all {
		if one.space == namespace {
			n++
		}
	}
	return n < maxOfNamespace
}

// check settles the drivers whose process has exited, and forgets those that say nothing any more.
func (h *hostMonitor) check(ctx context.Context, now time.Time) {
	for key, one := range h.all {
		switch {
		case one.Process.dead():
			if !now.Before(one.again) {
				h.settle(ctx, key, one, nil)
			}
		case now.After(one.until):
			delete(h.all, key)
		}
	}
}

// settle ends the lease of a driver if the process that the lease describes has exited; exited is a worker that is known to have.
func (h *hostMonitor) settle(ctx context.Context, key string, one *hostDriver, exited *nodes.WorkerID) {
	one.again = time.Now().Add(inboxProbeEvery)
	reading, cancel := context.WithTimeout(ctx, operationTimeout)
	defer cancel()
	reg, err := Open(reading, h.Bus, one.space)
	if err != nil {
		return // tried again
	}
	lease, err := reg.leases.Get(reading, reg.key(driverKey(one.Session)))
	if err != nil && !errors.Is(err, bus.ErrNotFound) {
		return
	}
	holder := readDriverProcess(lease.Value)
	ours := holder.visible() && holder.dead() || exited != nil && holder.Worker != nil && *holder.Worker == *exited
	if err != nil || !ours || h.ender.end(ctx, reg, one.Session, holder.Name, lease.Revision, exitSeen) {
		delete(h.all, key) // it has closed, or was never here, or has ended now
	}
}
