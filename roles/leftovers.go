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
	"troupe/roles/registry"
)

// maxRoleLog is the number of created roles that a driver remembers.
const maxRoleLog = 4096

// Leftovers is what remains of what a driver created: after it has closed its roles, nothing.
type Leftovers struct {
	Roles        []registry.RoleRecord `json:"roles"`
	Workers      []nodes.Status        `json:"workers"`      // running processes
	Reservations []placement.Record    `json:"reservations"` // granted
	Payloads     int                   `json:"payloads"`     // large bodies that were not fetched
}

// Empty reports whether nothing remains.
func (l Leftovers) Empty() bool {
	return len(l.Roles) == 0 && len(l.Workers) == 0 && len(l.Reservations) == 0 && l.Payloads == 0
}

// String describes it, one line per item.
func (l Leftovers) String() string {
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

// roleLog is the roles that a driver has created, by incarnation.
type roleLog struct {
	mu   sync.Mutex
	list []registry.RoleRecord
}

func (m *roleLog) add(rec registry.RoleRecord) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.list) == maxRoleLog {
		m.list = slices.Delete(m.list, 0, maxRoleLog/2)
	}
	m.list = append(m.list, registry.RoleRecord{Namespace: rec.Namespace, Name: rec.Name, Incarnation: rec.Incarnation, Detached: rec.Detached})
}

func (m *roleLog) all() []registry.RoleRecord {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.list)
}

// Leftovers finds what remains of what this driver created, except its detached roles.
func (rt *Runtime) Leftovers(ctx context.Context) (Leftovers, error) {
	var left Leftovers
	incarnations, reservations := map[string]bool{}, map[string]bool{}
	for _, rec := range rt.createdRoles.all() {
		if !rec.Detached {
			incarnations[rec.Incarnation], reservations[rec.ReservationID()] = true, true
		}
	}
	left.Payloads = rt.ep.Values().Uploads()
	all, err := rt.Roles(ctx)
	for _, r := range all {
		if incarnations[r.Incarnation] {
			left.Roles = append(left.Roles, r)
		}
	}
	if !rt.services.used() {
		return left, err
	}
	holdsErr := rt.addReservations(ctx, reservations)
	return left, errors.Join(err, holdsErr, rt.findReservations(ctx, reservations, &left), rt.findWorkers(ctx, incarnations, &left))
}

func (rt *Runtime) addReservations(ctx context.Context, reservations map[string]bool) error {
	reg, err := rt.registry(ctx)
	if err != nil {
		return err
	}
	holds, err := reg.DriverReservations(ctx)
	for _, h := range holds {
		if h.Owner == rt.ep.Session() {
			reservations[h.ID] = true
		}
	}
	return err
}

func (rt *Runtime) findReservations(ctx context.Context, reservations map[string]bool, left *Leftovers) error {
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

// findWorkers asks the agents of all nodes concurrently.
func (rt *Runtime) findWorkers(ctx context.Context, incarnations map[string]bool, left *Leftovers) error {
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
