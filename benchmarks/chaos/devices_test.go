package chaos

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"troupe/placement"
)

const (
	lookEvery = 100 * time.Millisecond
	leftAfter = 60 * time.Second // a head kills orphan processes after 15 to 20 s, and a lost driver's roles after its lease
)

// Devices watches the processes on the devices and compares them with the ledger, while faults happen. The processes are
// seen in /proc, so that those of a node which is cut off are seen too.
type Devices struct {
	dirs []string // of the agents
	op   *placement.Client

	mu    sync.Mutex
	looks int
	bad   []string

	// Of the goroutine that looks.
	since map[string]time.Time // when a process was first seen that no reservation covers
	told  map[string]bool
	known map[int]bool // processes of the last look
}

// NewDevices watches a cluster whose agents are all there, through an operator's client.
func NewDevices(c *Cluster, op *placement.Client) *Devices {
	return &Devices{dirs: c.agentDirs(), op: op, since: map[string]time.Time{}, told: map[string]bool{}}
}

// Run looks until ctx ends.
func (d *Devices) Run(ctx context.Context) {
	for ctx.Err() == nil {
		d.look(ctx, markersOf(d.dirs))
		sleep(ctx, lookEvery)
	}
}

// Bad is what was wrong so far.
func (d *Devices) Bad() (looks int, bad []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.looks, d.bad
}

// look reads the ledger first and the processes afterwards: a process that is there then was there when the ledger was read,
// unless it has only just been started.
func (d *Devices) look(ctx context.Context, markers []string) {
	asking, cancel := context.WithTimeout(ctx, time.Second)
	list, err := d.op.List(asking)
	cancel()
	processes := workerProcesses(markers)
	bad := twoOnOne(processes)
	if err == nil {
		bad = slices.Concat(bad, overGranted(list.Records), d.grantedToOthers(processes, list.Records), d.leftBehind(processes, list.Records))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.looks++
	for _, words := range bad {
		what, _, _ := strings.Cut(words, "; ") // the rest differs from look to look
		if !d.told[what] {
			d.told[what] = true
			d.bad = append(d.bad, time.Now().Format("15:04:05.000 ")+words)
		}
	}
	d.known = map[int]bool{}
	for _, p := range processes {
		d.known[p.PID] = true
	}
}

// twoOnOne are the devices on which processes of two reservations run. The roles here take whole devices.
func twoOnOne(processes []workerProcess) (bad []string) {
	on := map[string]workerProcess{}
	for _, p := range processes {
		for _, uuid := range p.Devices {
			if other, ok := on[uuid]; ok && other.Key != p.Key && !ended(other.PID) { // neither has ended while we looked
				bad = append(bad, fmt.Sprintf("device %s has two holders: process %d of %s and process %d of %s", uuid, other.PID, other.Key, p.PID, p.Key))
			}
			on[uuid] = p
		}
	}
	return bad
}

// overGranted are the devices of which the ledger has granted more than there is.
func overGranted(records []placement.Record) (bad []string) {
	used := map[string]placement.Share{}
	for _, r := range records {
		for _, w := range r.Workers {
			for _, s := range w.Slots {
				if used[s.UUID] += s.Share; used[s.UUID] > placement.Whole {
					bad = append(bad, fmt.Sprintf("device %s is granted beyond its whole", s.UUID))
				}
			}
		}
	}
	return bad
}

// grantedToOthers are the processes on devices that the ledger has granted to another reservation.
func (d *Devices) grantedToOthers(processes []workerProcess, records []placement.Record) (bad []string) {
	holder := map[string]placement.Record{}
	for _, r := range records {
		for _, w := range r.Workers {
			for _, s := range w.Slots {
				holder[s.UUID] = r
			}
		}
	}
	for _, p := range processes {
		if !d.known[p.PID] {
			continue
		}
		for _, uuid := range p.Devices {
			if r, ok := holder[uuid]; ok && r.ID != p.Key {
				bad = append(bad, fmt.Sprintf("device %s is granted to others while process %d of %s runs on it; now to %s with token %d", uuid, p.PID, p.Key, r.ID, r.Token))
			}
		}
	}
	return bad
}

// leftBehind are the processes that no reservation has covered for long.
func (d *Devices) leftBehind(processes []workerProcess, records []placement.Record) (bad []string) {
	held := map[string]bool{}
	for _, r := range records {
		held[r.ID] = true
	}
	uncovered := map[string]time.Time{}
	for _, p := range processes {
		if held[p.Key] {
			continue
		}
		words := fmt.Sprintf("process %d of %s is left behind: no reservation covers it", p.PID, p.Key)
		first, seen := d.since[words]
		if !seen {
			first = time.Now()
		}
		if uncovered[words] = first; time.Since(first) > leftAfter {
			bad = append(bad, words)
		}
	}
	d.since = uncovered
	return bad
}
