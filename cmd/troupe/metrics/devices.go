package metrics

import (
	"cmp"
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"troupe/bus"
	"troupe/cmd/troupe/dashboard"
	"troupe/placement"
)

const (
	meterEvery  = 5 * time.Second // between two readings of the ledger
	meterForget = time.Hour       // how long the counter of a role without devices is exported
)

var (
	roleDevicesDesc   = describe("role_devices", "Devices that a role holds; those that several roles share are divided among them.", "namespace", "role")
	deviceSecondsDesc = describe("device_seconds_total", "Device seconds that a role has held since the head observes it.", "namespace", "role")
)

// deviceOwner is what devices are charged to: a role, or the holder of another reservation.
type deviceOwner struct{ namespace, role string }

// deviceUse is what an owner holds and has held.
type deviceUse struct {
	devices float64
	seconds float64
	used    time.Time // when it last held some
}

// deviceMeter counts device seconds by owner. It reads the ledger every five seconds and at each scrape: a reservation is charged from its
// grant to the last reading that has it.
type deviceMeter struct {
	mu     sync.Mutex // guards what follows
	owners map[deviceOwner]*deviceUse
	last   time.Time
}

// run reads the ledger until ctx ends.
func (m *deviceMeter) run(ctx context.Context, client *placement.Client) {
	for bus.Sleep(ctx, meterEvery) == nil {
		reading, cancel := context.WithTimeout(ctx, scrapeWait)
		if list, err := client.List(reading); err == nil { // otherwise the next reading charges for the time
			m.read(list.Records, time.Now())
		}
		cancel()
	}
}

// read charges the owners of the reservations for the time since the last reading.
func (m *deviceMeter) read(records []placement.Record, now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.last.IsZero() {
		m.last = now // what was held before is not known to be charged already, or not
	}
	for owner, use := range m.owners {
		if use.devices = 0; now.Sub(use.used) > meterForget {
			delete(m.owners, owner)
		}
	}
	claims := map[string]placement.Share{} // by device
	for _, r := range records {
		eachSlot(r, func(s placement.Slot) { claims[s.UUID] += s.Share })
	}
	for _, r := range records {
		devices := 0.0
		eachSlot(r, func(s placement.Slot) { devices += float64(s.Share) / float64(max(claims[s.UUID], placement.Whole)) })
		if devices == 0 {
			continue
		}
		from := m.last
		if r.Since.After(from) {
			from = r.Since
		}
		use := m.ownerLocked(r)
		use.devices, use.used = use.devices+devices, now
		use.seconds += devices * max(0, now.Sub(from).Seconds())
	}
	m.last = now
}

func eachSlot(r placement.Record, do func(placement.Slot)) {
	for _, w := range r.Workers {
		for _, s := range w.Slots {
			do(s)
		}
	}
}

// ownerLocked is the owner of a reservation. Further owners than the bound share one of their namespace, and further namespaces one.
func (m *deviceMeter) ownerLocked(r placement.Record) *deviceUse {
	owner := deviceOwner{r.Namespace, cmp.Or(r.Holder, r.ID)}
	if m.owners[owner] == nil && len(m.owners) >= maxRoleMetrics {
		owner.role = dashboard.OtherNamespaces
	}
	if m.owners[owner] == nil && len(m.owners) >= maxRoleMetrics+dashboard.MaxNamespaces {
		owner.namespace = dashboard.OtherNamespaces
	}
	if m.owners[owner] == nil {
		m.owners[owner] = &deviceUse{}
	}
	return m.owners[owner]
}

func (m *deviceMeter) send(t gauges) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for owner, use := range m.owners {
		t.send(roleDevicesDesc, use.devices, owner.namespace, owner.role)
		t <- prometheus.MustNewConstMetric(deviceSecondsDesc, prometheus.CounterValue, use.seconds, owner.namespace, owner.role)
	}
}
