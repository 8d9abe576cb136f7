package roles

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"troupe/bus"
	"troupe/placement"
)

// Reservation is devices that a driver reserves for later roles. Roles use it with Process.Needs.Colocate, and share a
// device wherever they overlap. It ends with the driver's lease, or with Release.
type Reservation struct {
	placement.Record
	rt *Runtime
}

// driverReservation is a driver's reservation in the registry: the key <namespace>.hold.<id>. It is written before the request, so
// that the reservation of a dead driver can be found.
type driverReservation struct {
	ID    string        `json:"id"`
	Owner string        `json:"owner"` // session of the driver
	By    string        `json:"by"`    // the driver, for display
	Lease time.Duration `json:"lease"`
	Since time.Time     `json:"since"`
}

func reservationKey(id string) string { return "hold." + id }

// Reserve reserves devices for this driver or worker; it queues until ctx ends, or for a minute without a deadline. A request
// without an id gets one.
func (rt *Runtime) Reserve(ctx context.Context, request placement.Request) (*Reservation, error) {
	if err := rt.becomeCreator(ctx); err != nil {
		return nil, err
	}
	client, err := rt.placement()
	if err != nil {
		return nil, err
	}
	reg, err := rt.registry(ctx)
	if err != nil {
		return nil, err
	}
	if request.ID == "" {
		request.ID = bus.NewID()
	}
	if request.Holder == "" {
		request.Holder = rt.cfg.Name
	}
	if err := reg.createReservation(ctx, driverReservation{ID: request.ID, Owner: rt.ep.Session(), By: rt.cfg.Name, Lease: rt.cfg.Lease, Since: time.Now().UTC()}); err != nil {
		return nil, err
	}
	waiting, cancel := ctx, context.CancelFunc(func() {})
	if _, ok := ctx.Deadline(); !ok {
		waiting, cancel = context.WithTimeout(ctx, defaultStartTimeout)
	}
	defer cancel()
	rec, err := client.Reserve(waiting, request)
	if err != nil {
		if !errors.Is(err, bus.ErrOutcomeUnknown) {
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), registryTimeout) // ctx has often ended by then
			defer cancel()
			err = errors.Join(err, reg.deleteReservation(last, request.ID))
		}
		return nil, err
	}
	return &Reservation{Record: rec, rt: rt}, nil
}

// Release releases the devices. It may be called more than once.
func (r *Reservation) Release(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	return r.rt.releaseReservation(ctx, r.ID, r.Token)
}

// releaseReservation releases a reservation and deletes its key.
func (rt *Runtime) releaseReservation(ctx context.Context, id string, token uint64) error {
	client, err := rt.placement()
	if err != nil {
		return err
	}
	if err := release(ctx, client, []ReservationRef{{ID: id, Token: token}}); err != nil {
		return err
	}
	reg, err := rt.registry(ctx)
	if err != nil {
		return err
	}
	return reg.deleteReservation(ctx, id)
}

func (g registry) createReservation(ctx context.Context, h driverReservation) error {
	value, err := json.Marshal(h)
	if err != nil {
		return bus.Errorf(bus.CodeInternal, "encode the hold of %s: %w", h.ID, err)
	}
	if _, err := g.kv.Create(ctx, g.key(reservationKey(h.ID)), value); errors.Is(err, bus.ErrExists) {
		return g.takenReservation(ctx, h.ID)
	} else if err != nil {
		return err
	}
	return nil
}

// takenReservation is the error of an id that is taken.
func (g registry) takenReservation(ctx context.Context, id string) error {
	var held driverReservation
	if e, err := g.kv.Get(ctx, g.key(reservationKey(id))); err == nil && json.Unmarshal(e.Value, &held) == nil {
		return bus.Errorf(bus.CodeExists, "reservation %s exists already: %s holds it since %s; remove it with `troupe release %s`, or choose another id",
			id, held.By, held.Since.Format(time.RFC3339), id)
	}
	return bus.Errorf(bus.CodeExists, "reservation %s exists already in this namespace; choose another id", id)
}

func (g registry) deleteReservation(ctx context.Context, id string) error {
	e, err := g.kv.Get(ctx, g.key(reservationKey(id)))
	if err == nil {
		err = g.kv.Delete(ctx, g.key(reservationKey(id)), e.Revision)
	}
	if errors.Is(err, bus.ErrNotFound) {
		return nil
	}
	return err
}

// driverReservations lists the drivers' reservations. Malformed entries are skipped.
func (g registry) driverReservations(ctx context.Context) ([]driverReservation, error) {
	entries, err := g.kv.List(ctx, g.key("hold"))
	if err != nil {
		return nil, err
	}
	var out []driverReservation
	for _, e := range entries {
		var h driverReservation
		if json.Unmarshal(e.Value, &h) == nil && h.ID != "" {
			out = append(out, h)
		}
	}
	return out, nil
}

// releaseDriverReservation releases a driver's reservation.
func (rt *Runtime) releaseDriverReservation(ctx context.Context, h driverReservation) error {
	client, err := rt.placement()
	if err != nil {
		return err
	}
	list, err := client.List(ctx)
	if err != nil {
		return err
	}
	var token uint64
	for _, r := range list.Records {
		if r.ID == h.ID {
			token = r.Token
		}
	}
	return rt.releaseReservation(ctx, h.ID, token)
}

// releaseOwn releases this driver's reservations.
func (rt *Runtime) releaseOwn(ctx context.Context) error {
	reg, err := rt.registry(ctx)
	if err != nil {
		return err
	}
	all, err := reg.driverReservations(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, h := range all {
		if h.Owner == rt.ep.Session() {
			errs = append(errs, rt.releaseDriverReservation(ctx, h))
		}
	}
	return errors.Join(errs...)
}
