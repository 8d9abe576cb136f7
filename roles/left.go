package roles

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"troupe/bus"
	"troupe/nodes"
	"troupe/placement"
)

// maxMade is how many roles a driver remembers to have made.
const maxMade = 4096

// Left is what is still there of what a driver made: after it has closed its roles, nothing.
type Left struct {
	Roles        []Record           `json:"roles"`
	Workers      []nodes.Status     `json:"workers"`      // processes that run
	Reservations []placement.Record `json:"reservations"` // that are held
	Payloads     int                `json:"payloads"`     // large bodies that nobody has fetched
}

// Empty reports whether nothing is left.
func (l Left) Empty() bool {
	return len(l.Roles) == 0 && len(l.Workers) == 0 && len(l.Reservations) == 0 && l.Payloads == 0
}

// String says it in a line, or in several.
func (l Left) String() string {
	if l.Empty() {
		return "nothing is left"
	}
	var lines []string
	for _, r := range l.Roles {
		lines = append(lines, fmt.Sprintf("role %s is %s", r.Name, r.State))
	}
	for _, w := range l.Workers {
		lines = append(lines, fmt.Sprintf("worker %s (pid %d) runs on node %s", w.Name, w.PID, w.Node))
	}
	for _, r := range l.Reservations {
		lines = append(lines, fmt.Sprintf("reservation %s is held by %s", r.ID, r.Holder))
	}
	if l.Payloads > 0 {
		lines = append(lines, fmt.Sprintf("%d large bodies have not been fetched", l.Payloads))
	}
	return strings.Join(lines, "\n")
}

// made is the roles that a driver has made, by incarnation.
type made struct {
	mu   sync.Mutex
	list []Record
}

func (m *made) add(rec Record) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.list) == maxMade {
		m.list = slices.Delete(m.list, 0, maxMade/2)
	}
	m.list = append(m.list, Record{Namespace: rec.Namespace, Name: rec.Name, Incarnation: rec.Incarnation, Detached: rec.Detached})
}

func (m *made) all() []Record {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.list)
}

// Left looks for what is left of what this driver made, its detached roles apart.
func (rt *Runtime) Left(ctx context.Context) (Left, error) {
	var left Left
	incarnations, reservations := map[string]bool{}, map[string]bool{}
	for _, rec := range rt.made.all() {
		if !rec.Detached {
			incarnations[rec.Incarnation], reservations[reservationID(rec)] = true, true
		}
	}
	left.Payloads = rt.ep.Uploads()
	all, err := rt.Roles(ctx)
	for _, r := range all {
		if incarnations[r.Incarnation] {
			left.Roles = append(left.Roles, r)
		}
	}
	if !rt.services.used() {
		return left, err
	}
	holdsErr := rt.addHolds(ctx, reservations)
	return left, errors.Join(err, holdsErr, rt.leftHeld(ctx, reservations, &left), rt.leftRunning(ctx, incarnations, &left))
}

func (rt *Runtime) addHolds(ctx context.Context, reservations map[string]bool) error {
	reg, err := rt.registry(ctx)
	if err != nil {
		return err
	}
	holds, err := reg.holds(ctx)
	for _, h := range holds {
		if h.Owner == rt.ep.Session() {
			reservations[h.ID] = true
		}
	}
	return err
}

func (rt *Runtime) leftHeld(ctx context.Context, reservations map[string]bool, left *Left) error {
	client, err := rt.placement()
	if err != nil {
		return err
	}
	list, err := client.List(ctx)
	for _, r := range list.Records {
		if reservations[r.ID] {
			left.Reservations = append(left.Reservations, r)
		}
	}
	return err
}

// leftRunning asks the agents of all nodes at once.
func (rt *Runtime) leftRunning(ctx context.Context, incarnations map[string]bool, left *Left) error {
	client, err := rt.placement()
	if err != nil {
		return err
	}
	all, err := client.Nodes(ctx)
	if err != nil {
		return err
	}
	var group sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	for _, node := range all {
		group.Go(bus.Guard(func() {
			workers, err := rt.agents().Running(ctx, node.Report.Node)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs = append(errs, err)
			}
			for _, w := range workers {
				if w.Exit == nil && incarnations[w.ID.Incarnation] {
					left.Workers = append(left.Workers, w)
				}
			}
		}))
	}
	group.Wait()
	slices.SortFunc(left.Workers, func(a, b nodes.Status) int { return strings.Compare(a.Name, b.Name) })
	return errors.Join(errs...)
}
