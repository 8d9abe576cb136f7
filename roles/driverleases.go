package roles

import (
	"cmp"
	"context"
	"strings"
	"time"

	"troupe/bus"
)

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
	reg, err := openRegistry(ctx, b, "")
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
