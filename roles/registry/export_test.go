package registry

import (
	"context"
	"encoding/json"
	"time"

	"troupe/bus/kv"
)

// Announcement is what a process of this host would announce, and to which subject.
func Announcement(namespace, session string, pid int) (subject string, data []byte, err error) {
	start, err := startedAt(pid)
	if err != nil {
		return "", nil, err
	}
	data, err = json.Marshal(announcement{Session: session, Process: driverProcess{Host: thisHost(), PID: pid, Start: start}})
	return driversOf(namespace, thisHost()), data, err
}

// LeaseOf is the lease of a driver whose process is another one of this host.
func (g Registry) LeaseOf(ctx context.Context, session string, pid int) (*kv.Lease, error) {
	start, err := startedAt(pid)
	if err != nil {
		return nil, err
	}
	value, err := json.Marshal(driverProcess{Host: thisHost(), PID: pid, Start: start})
	if err != nil {
		return nil, err
	}
	return g.leases.Lease(ctx, g.key(driverKey(session)), value, time.Hour)
}
