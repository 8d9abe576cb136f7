package inspect

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/gpu"
	"troupe/nodes"
	"troupe/placement"
)

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
		if err := cli.CheckNode(ctx, client, name); err != nil {
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
		rows = append(rows, []string{w.ID.Namespace, w.ID.Role, strconv.Itoa(w.ID.Rank), strconv.Itoa(w.PID), shortSpan(w.ForS), cmp.Or(w.Reservation, "–"), cmp.Or(strings.Join(w.Devices, ","), "–")})
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
