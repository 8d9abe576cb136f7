package registry

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"time"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/nodes"
)

// DefaultLease is the lifetime of a driver's lease, the minimum on a busy server.
const DefaultLease = 15 * time.Second

func driverKey(session string) string { return "driver." + session }

// proofKey is the key of the proof that a driver is dead, beside its lease.
func proofKey(session string) string { return "gone." + session }

// AcquireLease acquires the lease that says that this process lives: a driver, or a worker that has created roles.
func (g Registry) AcquireLease(ctx context.Context, session, name string, lifetime time.Duration, worker *nodes.WorkerID) (*kv.Lease, error) {
	p := driverProcess{Name: name, Host: thisHost(), PID: os.Getpid(), Lease: lifetime, Worker: worker}
	p.Start, _ = startedAt(p.PID) // zero: unknown
	value, err := json.Marshal(p)
	if err != nil {
		value = []byte(name) // a name that JSON cannot encode
	}
	return g.leases.Lease(ctx, g.key(driverKey(session)), value, lifetime)
}

// WatchDrivers sends the changes of the drivers' leases, until ctx ends or the watch is interrupted.
func (g Registry) WatchDrivers(ctx context.Context) (<-chan kv.Event, error) {
	return g.leases.Watch(ctx, g.key("driver"))
}

// DriverAlive reports whether a driver's lease exists; true if unknown.
func (g Registry) DriverAlive(ctx context.Context, session string) bool {
	_, err := g.leases.Get(ctx, g.key(driverKey(session)))
	return !errors.Is(err, bus.ErrNotFound)
}

// DriverProvedDead reports whether a driver is proved dead.
func (g Registry) DriverProvedDead(ctx context.Context, session string) bool {
	_, err := g.leases.Get(ctx, g.key(proofKey(session)))
	return err == nil
}

// DriverLease is the lease of a driver as an observer sees it.
type DriverLease struct {
	Namespace string
	Session   string
	Driver    string // for display
	Lifetime  time.Duration
	Remaining time.Duration // unless it is renewed
}

// DriverLeases lists the leases of the drivers of all namespaces, for tools of operators.
func DriverLeases(ctx context.Context, b *bus.Bus) ([]DriverLease, error) {
	reg, err := Open(ctx, b, "")
	if err != nil {
		return nil, err
	}
	held, err := reg.leases.Leases(ctx)
	if err != nil {
		return nil, err
	}
	var out []DriverLease
	for _, l := range held {
		namespace, rest, _ := strings.Cut(l.Key, ".")
		kind, session, _ := strings.Cut(rest, ".")
		if kind == "driver" {
			out = append(out, DriverLease{Namespace: namespace, Session: session, Driver: cmp.Or(readDriverProcess(l.Value).Name, session), Lifetime: l.Lifetime, Remaining: l.Remaining})
		}
	}
	return out, nil
}
