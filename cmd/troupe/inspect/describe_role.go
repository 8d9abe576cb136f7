package inspect

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"sync"
	"time"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/cmd/troupe/dashboard"
	"troupe/nodes"
	"troupe/placement"
	"troupe/roles/registry"
)

// roleDescription is the JSON output of describe role.
type roleDescription struct {
	roleOutput
	Ranks        []rankDescription       `json:"ranks"`
	Methods      []methodDescription     `json:"methods_called"`
	Lagging      []dashboard.LaggingRank `json:"lagging"`
	Reservations []placement.Record      `json:"reservations_held"`
	Events       []nodes.Event           `json:"events"`
}

type rankDescription struct {
	dashboard.Rank
	Worker  string `json:"worker,omitempty"`
	Devices []int  `json:"devices,omitempty"`
}

type methodDescription struct {
	Method string  `json:"method"`
	Calls  uint64  `json:"calls"`
	Errors uint64  `json:"errors"`
	MeanS  float64 `json:"mean_s"`
}

func (c command) describeRole(ctx context.Context, name string) error {
	if err := bus.CheckRoleName(name); err != nil {
		return cli.Usagef("%w", err)
	}
	return c.WithBus(ctx, func(b *bus.Bus, s cli.Server) error {
		workers, err := dashboard.WatchWorkers(b)
		if err != nil {
			return err
		}
		defer workers.Close()
		s, err = s.FindRole(ctx, b, name)
		if err != nil {
			return err
		}
		all, err := registry.All(ctx, b)
		if err != nil {
			return err
		}
		var names []string
		at := -1
		for i, r := range all {
			if r.Namespace != s.Namespace {
				continue
			}
			if names = append(names, r.Name); r.Name == name {
				at = i
			}
		}
		if at < 0 {
			return bus.Errorf(bus.CodeNotFound, "no role %q in this namespace; %s", name, cli.ThereAre(names))
		}
		d := roleDescription{roleOutput: roleJSON(all[at]), Ranks: []rankDescription{}, Methods: []methodDescription{}, Lagging: []dashboard.LaggingRank{}, Reservations: []placement.Record{}, Events: []nodes.Event{}}
		if err := d.collect(ctx, b, workers); err != nil {
			return err
		}
		if c.JSON {
			return c.PrintJSON(d)
		}
		return c.showRole(d)
	})
}

func (d *roleDescription) collect(ctx context.Context, b *bus.Bus, workers *dashboard.Workers) error {
	var group sync.WaitGroup
	var events []nodes.Event
	var held placement.Listing
	var heldErr error
	group.Go(func() {
		events = eventsAbout(ctx, b, func(e nodes.Event) bool { return e.Namespace == d.Namespace && e.Role == d.Name })
	})
	group.Go(func() { held, heldErr = listReservations(ctx, b, d.Namespace) })
	group.Wait()
	if heldErr != nil {
		return heldErr
	}
	_ = bus.Sleep(ctx, topListen) // the heartbeats of all workers
	d.Events = append(d.Events, events...)
	own := map[string]bool{}
	for _, ref := range d.RoleRecord.Reservations {
		own[ref.ID] = true
	}
	for _, r := range held.Records {
		if own[r.ID] {
			d.Reservations = append(d.Reservations, r)
		}
	}
	heard := map[int]dashboard.Rank{}
	for _, w := range workers.Roles(time.Now()) {
		if w.Address != d.Address() {
			continue
		}
		for _, r := range w.Ranks {
			heard[r.Rank] = r
		}
		for _, m := range w.Methods {
			one := methodDescription{Method: m.Method, Calls: m.Calls, Errors: m.Errors}
			if m.Calls > 0 {
				one.MeanS = m.Seconds / float64(m.Calls)
			}
			d.Methods = append(d.Methods, one)
		}
		d.Lagging = append(d.Lagging, w.Lagging...)
	}
	for rank := range d.World {
		one, ok := heard[rank]
		if !ok {
			one = dashboard.Rank{Rank: rank, State: "silent"}
		}
		r := rankDescription{Rank: one}
		if rank < len(d.Placements) {
			p := d.Placements[rank]
			r.Worker, r.Devices, r.Node = p.Name, p.Devices, cmp.Or(one.Node, p.Node)
		}
		d.Ranks = append(d.Ranks, r)
	}
	return nil
}

func (c command) showRole(d roleDescription) error {
	life := "owned: it ends with its driver"
	if d.Detached {
		life = "detached"
	}
	c.field("role", "%s", d.Name)
	c.field("namespace", "%s", d.Namespace)
	c.field("class", "%s", d.Class)
	c.field("world", "%d, %s", d.World, d.Mesh)
	switch {
	case d.MaxReplicas > 0:
		c.field("replicas", "%d, of %d to %d", d.Mesh.DP, max(d.MinReplicas, 1), d.MaxReplicas)
	case d.MinReplicas > 0:
		c.field("replicas", "%d, at least %d", d.Mesh.DP, d.MinReplicas)
	}
	c.field("state", "%s since %s", d.State, stamp(d.Since))
	if cause := causeOf(d.RoleRecord); cause != "" {
		c.field("cause", "%s", cause)
	}
	c.field("life", "%s", life)
	c.field("made by", "%s", d.By)
	c.field("incarnation", "%s", d.Incarnation)
	c.field("restarts", "%d", d.Restarts)
	for _, l := range d.Lagging {
		c.Printf("\nrank %d holds up the others: %s\n", l.Rank.Rank, l.Why)
		for _, e := range l.Evidence {
			c.Printf("  %s\n", e)
		}
	}
	var rows [][]string
	for _, r := range d.Ranks {
		busy := "idle"
		if r.Busy > 0 {
			busy = shortSpan(r.Busy)
		}
		rows = append(rows, []string{strconv.Itoa(r.Rank.Rank), cmp.Or(r.Node, "–"), cli.Indices(r.Devices), r.State, cmp.Or(r.Method, "–"), busy, strconv.Itoa(r.Queued), fmt.Sprint(r.Done), r.Error})
	}
	if err := c.section("Ranks", "RANK NODE DEVICES STATE METHOD BUSY QUEUED DONE ERROR", rows); err != nil {
		return err
	}
	rows = nil
	for _, m := range d.Methods {
		rows = append(rows, []string{m.Method, fmt.Sprint(m.Calls), fmt.Sprint(m.Errors), shortSpan(m.MeanS)})
	}
	if err := c.section("Methods", "METHOD CALLS ERRORS MEAN", rows); err != nil {
		return err
	}
	if err := c.section("Reservations", "ID STATE SINCE WORKERS DEVICES WHY", reservationRows(d.Reservations)); err != nil {
		return err
	}
	return c.showEvents(d.Events)
}
