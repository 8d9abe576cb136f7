package registry

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"troupe/bus"
)

// DriverReservation is a driver's reservation in the registry: the key <namespace>.hold.<id>. It is written before the request, so
// that the reservation of a dead driver can be found.
type DriverReservation struct {
	ID    string        `json:"id"`
	Owner string        `json:"owner"` // session of the driver
	By    string        `json:"by"`    // the driver, for display
	Lease time.Duration `json:"lease"`
	Since time.Time     `json:"since"`
}

// Owned is what the registry needs to judge the driver.
func (h DriverReservation) Owned() Owned {
	return Owned{Driver: h.Owner, Lease: h.Lease, Since: h.Since}
}

func reservationKey(id string) string { return "hold." + id }

// CreateReservation writes the reservation of a driver. The error of a taken id is ErrExists.
func (g Registry) CreateReservation(ctx context.Context, h DriverReservation) error {
	value, err := json.Marshal(h)
	if err != nil {
		return bus.Errorf(bus.CodeInternal, "encode the reservation %s: %w", h.ID, err)
	}
	if _, err := g.kv.Create(ctx, g.key(reservationKey(h.ID)), value); errors.Is(err, bus.ErrExists) {
		return g.takenReservation(ctx, h.ID)
	} else if err != nil {
		return err
	}
	return nil
}

// takenReservation is the error of an id that is taken.
func (g Registry) takenReservation(ctx context.Context, id string) error {
	var held DriverReservation
	if e, err := g.kv.Get(ctx, g.key(reservationKey(id))); err == nil && json.Unmarshal(e.Value, &held) == nil {
		return bus.Errorf(bus.CodeExists, "reservation %s exists already: %s holds it since %s; remove it with `troupe release %s`, or choose another id",
			id, held.By, held.Since.Format(time.RFC3339), id)
	}
	return bus.Errorf(bus.CodeExists, "reservation %s exists already in this namespace; choose another id", id)
}

// DeleteReservation deletes the reservation of a driver; none is no error.
func (g Registry) DeleteReservation(ctx context.Context, id string) error {
	return g.deleteKey(ctx, g.key(reservationKey(id)))
}

// DriverReservations lists the drivers' reservations. Malformed entries are skipped.
func (g Registry) DriverReservations(ctx context.Context) ([]DriverReservation, error) {
	entries, err := g.kv.List(ctx, g.key("hold"))
	if err != nil {
		return nil, err
	}
	var out []DriverReservation
	for _, e := range entries {
		var h DriverReservation
		if json.Unmarshal(e.Value, &h) == nil && h.ID != "" {
			out = append(out, h)
		}
	}
	return out, nil
}
