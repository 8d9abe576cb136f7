package inspect

import (
	"cmp"
	"context"
	"time"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/placement"
)

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
		d, ids := reservationDescription{}, cli.ReservationIDs(list.Records)
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
	return c.WorkersTable(r.Workers)
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
