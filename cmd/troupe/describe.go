package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/cmd/troupe/dashboard"
	"troupe/cmd/troupe/doctor"
	"troupe/gpu"
	"troupe/nodes"
	"troupe/placement"
	"troupe/roles/registry"
)

// recentEvents is how many events a description shows.
const recentEvents = 10

func newDescribe(c command) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "describe",
		Short:   "Show everything that is known about one role, node or reservation",
		Example: "  troupe describe role actor_train\n  troupe describe node box-1\n  troupe describe reservation trainer",
	}
	sub := func(use, short, long, example string, complete func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective), show func(ctx context.Context, name string) error) {
		var watch cli.WatchFlags
		one := &cobra.Command{Use: use, Short: short, Long: long, Example: "  troupe describe " + example, Args: cobra.ExactArgs(1), ValidArgsFunction: complete, RunE: func(cmd *cobra.Command, args []string) error {
			return c.Repeat(cmd.Context(), watch, func(ctx context.Context) error { return show(ctx, args[0]) })
		}}
		watch.Add(one)
		c.ServerFlags(one)
		c.JSONFlag(one, "print one JSON object")
		cmd.AddCommand(one)
	}
	sub("role NAME", "Show a role: record, ranks, methods, reservations, events",
		"Role prints the record of a role, its ranks with what they run, the ranks that the others wait for, its reservations and its last events.",
		"role actor_train", c.completeRole, c.describeRole)
	sub("node NAME", "Show a node: machine, devices, workers, reservations, events",
		"Node prints the state of a node, its agent's version and clock, disks and limits, its devices and their holders, its workers and its last events.",
		"node box-1", c.completeNode, c.describeNode)
	sub("reservation ID", "Show a reservation, or why a request waits",
		"Reservation prints the holder, the devices and the state of a reservation; of a request in the queue its place, and what it waits for.",
		"reservation trainer", c.completeReservation, c.describeReservation)
	return cmd
}

// field prints one line of a description.
func (c command) field(name, format string, args ...any) {
	c.Printf("%-14s%s\n", name+":", fmt.Sprintf(format, args...))
}

// section prints a table under a heading, or nothing if there are no rows.
func (c command) section(heading, header string, rows [][]string) error {
	if len(rows) == 0 {
		return nil
	}
	c.Printf("\n%s\n", heading)
	return c.Table(header, rows)
}

func stamp(t time.Time) string {
	if t.IsZero() {
		return "–"
	}
	return t.UTC().Format(time.DateTime) + " UTC (" + cli.Age(t) + ")"
}

// roleDescription is the JSON output of describe role.
type roleDescription struct {
	roleOutput
	Ranks        []rankDescription    `json:"ranks"`
	Methods      []methodDescription  `json:"methods_called"`
	Lagging      []doctor.LaggingRank `json:"lagging"`
	Reservations []placement.Record   `json:"reservations_held"`
	Events       []nodes.Event        `json:"events"`
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
		d := roleDescription{roleOutput: roleJSON(all[at]), Ranks: []rankDescription{}, Methods: []methodDescription{}, Lagging: []doctor.LaggingRank{}, Reservations: []placement.Record{}, Events: []nodes.Event{}}
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
		d.Lagging = append(d.Lagging, doctor.Lagging(w.Ranks)...)
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
		rows = append(rows, []string{itoa(r.Rank.Rank), cmp.Or(r.Node, "–"), indices(r.Devices), r.State, cmp.Or(r.Method, "–"), busy, itoa(r.Queued), fmt.Sprint(r.Done), r.Error})
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

func reservationRows(all []placement.Record) (rows [][]string) {
	for _, r := range all {
		rows = append(rows, []string{r.ID, string(r.State), cli.Age(r.Since), itoa(len(r.Workers)), deviceCount(r), why(r)})
	}
	return rows
}

func (c command) showEvents(events []nodes.Event) error {
	if len(events) > 0 {
		c.Printf("\nEvents\n")
	}
	for _, e := range events {
		c.Printf("%s %s\n", e.At.Format(time.DateTime), e)
	}
	return nil
}

// eventsAbout is the last stored events that a filter keeps.
func eventsAbout(ctx context.Context, b *bus.Bus, keep func(nodes.Event) bool) []nodes.Event {
	ctx, cancel := context.WithTimeout(ctx, factWait)
	defer cancel()
	var out []nodes.Event
	_ = nodes.ReadEvents(ctx, b, nodes.EventQuery{}, func(e nodes.Event) error { // what was read so far is shown
		if keep(e) {
			out = append(out, e)
			out = out[max(0, len(out)-recentEvents):]
		}
		return nil
	})
	return out
}

func listReservations(ctx context.Context, b *bus.Bus, namespace string) (placement.Listing, error) {
	client, err := placement.NewClient(b, namespace)
	if err != nil {
		return placement.Listing{}, err
	}
	defer client.Close()
	return client.List(ctx)
}

// nodeDescription is the JSON output of describe node.
type nodeDescription struct {
	placement.NodeStatus
	Overview     nodeOverview       `json:"overview"`
	Host         *nodes.HostInfo    `json:"host"` // null if the agent does not answer
	Problem      string             `json:"problem,omitempty"`
	ClockS       float64            `json:"clock_offset_s"`
	ClockErrorS  float64            `json:"clock_error_s"`
	Rows         []gpu.Row          `json:"devices"`
	Reservations []placement.Record `json:"reservations"`
	Events       []nodes.Event      `json:"events"`
}

func (c command) describeNode(ctx context.Context, name string) error {
	return c.WithBus(ctx, func(b *bus.Bus, _ cli.Server) error {
		client, err := placement.NewClient(b, "")
		if err != nil {
			return err
		}
		defer client.Close()
		if err := checkNode(ctx, client, name); err != nil {
			return err
		}
		list, err := client.Nodes(ctx)
		if err != nil {
			return err
		}
		held, err := client.List(ctx)
		if err != nil {
			return err
		}
		list = slices.DeleteFunc(list, func(n placement.NodeStatus) bool { return n.Report.Node != name })
		if len(list) == 0 {
			return bus.Errorf(bus.CodeNotFound, "node %s has just left", name)
		}
		d := nodeDescription{NodeStatus: list[0], Overview: lookAtNodes(ctx, b, list, held.Records)[0], Rows: []gpu.Row{}, Reservations: []placement.Record{}, Events: []nodes.Event{}}
		ask, cancel := context.WithTimeout(ctx, askNode)
		host, clock, err := nodes.NewClient(b).Host(ask, name)
		cancel()
		if err == nil {
			d.Host, d.ClockS, d.ClockErrorS = &host, clock.Offset.Seconds(), clock.Error.Seconds()
		} else {
			d.Problem = err.Error()
		}
		rows, err := deviceRows(ctx, client)
		if err != nil {
			return err
		}
		for _, row := range rows {
			if row.Node == name {
				d.Rows = append(d.Rows, row)
			}
		}
		for _, r := range held.Records {
			if slices.ContainsFunc(r.Workers, func(w placement.Worker) bool { return w.Node == name }) {
				d.Reservations = append(d.Reservations, r)
			}
		}
		d.Events = append(d.Events, eventsAbout(ctx, b, func(e nodes.Event) bool { return e.Node == name })...)
		if c.JSON {
			return c.PrintJSON(d)
		}
		return c.showNode(d)
	})
}

func (c command) showNode(d nodeDescription) error {
	c.field("node", "%s", d.Report.Node)
	c.field("state", "%s", d.Overview.State)
	if d.Overview.Why != "" {
		c.field("why", "%s", d.Overview.Why)
	}
	c.field("rank", "%d", d.Rank)
	c.field("labels", "%s", cmp.Or(labelsText(d.Report.Labels), "–"))
	c.field("resources", "%d CPUs, %s memory, %s", d.Report.CPUs, d.Report.Memory, cli.Counted(len(d.Report.Devices), "device"))
	if h := d.Host; h == nil {
		c.field("agent", "it does not answer: %s", d.Problem)
	} else {
		c.field("agent", "version %s, pid %d, since %s", h.Version, h.PID, stamp(h.Since))
		c.field("clock", "%+.3f s against this machine, to within %.3f s", d.ClockS, d.ClockErrorS)
		for _, disk := range append(slices.Clone(h.Disks), h.SharedMemory) {
			c.field("disk", "%s: %s free of %s", disk.Path, gpu.Bytes(disk.Free), gpu.Bytes(disk.Total))
		}
		c.field("limits", "open files %s, processes %s, locked memory %s", limitOf(h.OpenFiles), limitOf(h.Processes), limitOf(h.LockedMemory))
	}
	for _, cordon := range d.Cordons {
		c.field("cordon", "%s", cordon)
	}
	if len(d.Rows) > 0 {
		c.Printf("\nDevices\n%s", gpu.Table(d.Rows))
	}
	var rows [][]string
	for _, w := range d.Overview.Workers {
		rows = append(rows, []string{w.ID.Namespace, w.ID.Role, itoa(w.ID.Rank), itoa(w.PID), shortSpan(w.ForS), cmp.Or(w.Reservation, "–"), cmp.Or(strings.Join(w.Devices, ","), "–")})
	}
	if err := c.section("Workers", "NAMESPACE ROLE RANK PID FOR RESERVATION DEVICES", rows); err != nil {
		return err
	}
	if err := c.section("Reservations", "ID STATE SINCE WORKERS DEVICES WHY", reservationRows(d.Reservations)); err != nil {
		return err
	}
	return c.showEvents(d.Events)
}

func limitOf(l nodes.ResourceLimit) string {
	if l.Soft == nodes.Unlimited {
		return "unlimited"
	}
	return fmt.Sprint(l.Soft)
}

// reservationDescription is the JSON output of describe reservation: one of the two.
type reservationDescription struct {
	Held    *placement.Record  `json:"reservation,omitempty"`
	Waiting *placement.Waiting `json:"waiting,omitempty"`
	Place   int                `json:"place,omitempty"` // in the queue, from 1
}

func (c command) describeReservation(ctx context.Context, id string) error {
	return c.WithBus(ctx, func(b *bus.Bus, _ cli.Server) error {
		list, err := listReservations(ctx, b, "")
		if err != nil {
			return err
		}
		d, ids := reservationDescription{}, reservationIDs(list.Records)
		for i := range list.Records {
			if list.Records[i].ID == id {
				d.Held = &list.Records[i]
			}
		}
		for i := range list.Waiting {
			if ids = append(ids, list.Waiting[i].ID); list.Waiting[i].ID == id {
				d.Waiting, d.Place = &list.Waiting[i], i+1
			}
		}
		switch {
		case d.Held == nil && d.Waiting == nil:
			return bus.Errorf(bus.CodeNotFound, "no reservation %q; %s", id, cli.ThereAre(ids))
		case c.JSON:
			return c.PrintJSON(d)
		case d.Held != nil:
			return c.showReservation(*d.Held)
		}
		c.showWaiting(*d.Waiting, d.Place)
		return nil
	})
}

func (c command) showReservation(r placement.Record) error {
	c.field("reservation", "%s", r.ID)
	c.field("namespace", "%s", cmp.Or(r.Namespace, "–"))
	c.field("holder", "%s", r.Holder)
	c.field("state", "%s since %s", r.State, stamp(r.Since))
	if text := why(r); text != "" {
		c.field("why", "%s", text)
	}
	if r.Unmet != "" {
		c.field("unmet", "%s", r.Unmet)
	}
	c.field("priority", "%d", r.Priority)
	c.field("token", "%d", r.Token)
	c.field("devices", "%s nodes", deviceCount(r))
	c.Printf("\nWorkers\n")
	return c.workersTable(r.Workers)
}

func (c command) showWaiting(w placement.Waiting, place int) {
	c.field("reservation", "%s", w.ID)
	c.field("namespace", "%s", cmp.Or(w.Namespace, "–"))
	c.field("holder", "%s", w.Holder)
	c.field("state", "waits for %v at place %d of the queue", (time.Duration(w.Waited) * time.Millisecond).Round(time.Second), place)
	c.field("priority", "%d", w.Priority)
	c.field("devices", "%s", w.Devices)
	c.field("why", "%s", w.Wait.Text)
	for _, o := range w.Wait.WaitsFor {
		c.Printf("  %s\n", o)
	}
}

// completeNode and completeReservation complete names from the placement service.
func (c command) completeNode(cmd *cobra.Command, words []string, _ string) ([]string, cobra.ShellCompDirective) {
	return c.completePlacement(cmd, words, func(ctx context.Context, client *placement.Client) ([]string, error) {
		list, err := client.Nodes(ctx)
		var names []string
		for _, n := range list {
			names = append(names, fmt.Sprintf("%s\t%s, %s", n.Report.Node, cmp.Or(string(n.State), "ready"), cli.Counted(len(n.Report.Devices), "device")))
		}
		return names, err
	})
}

func (c command) completeReservation(cmd *cobra.Command, words []string, _ string) ([]string, cobra.ShellCompDirective) {
	return c.completePlacement(cmd, words, func(ctx context.Context, client *placement.Client) ([]string, error) {
		list, err := client.List(ctx)
		var names []string
		for _, r := range list.Records {
			names = append(names, r.ID+"\t"+r.Holder)
		}
		for _, w := range list.Waiting {
			names = append(names, w.ID+"\t"+w.Holder+", waits")
		}
		return names, err
	})
}

func (c command) completePlacement(cmd *cobra.Command, words []string, names func(context.Context, *placement.Client) ([]string, error)) (out []string, d cobra.ShellCompDirective) {
	if len(words) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), cli.CompletionWait)
	defer cancel()
	err := c.WithPlacement(ctx, true, func(client *placement.Client) (err error) {
		out, err = names(ctx, client)
		return err
	})
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}
