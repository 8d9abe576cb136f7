package roles

import (
	"context"
	"errors"
	"time"

	"troupe/bus"
	"troupe/placement"
	"troupe/roles/registry"
)

// Reservation is devices that a driver reserves for later roles. Roles use it with Process.Needs.Colocate, and share a
// device wherever they overlap. It ends with the driver's lease, or with Release.
type Reservation struct {
	placement.Record
	rt *Runtime
}

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
	hold := registry.DriverReservation{ID: request.ID, Owner: rt.ep.Session(), By: rt.cfg.Name, Lease: rt.cfg.Lease, Since: time.Now().UTC()}
	if err := reg.CreateReservation(ctx, hold); err != nil {
		return nil, err
	}
	rt.mu.Lock()
	rt.holds[hold.ID] = hold
	rt.mu.Unlock()
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
			err = errors.Join(err, reg.DeleteReservation(last, request.ID))
			rt.mu.Lock()
			delete(rt.holds, hold.ID)
			rt.mu.Unlock()
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
	if err := release(ctx, client, []registry.ReservationRef{{ID: id, Token: token}}); err != nil {
		return err
	}
	rt.mu.Lock()
	delete(rt.holds, id)
	rt.mu.Unlock()
	reg, err := rt.registry(ctx)
	if err != nil {
		return err
	}
	return reg.DeleteReservation(ctx, id)
}

// releaseDriverReservation releases a driver's reservation.
func (rt *Runtime) releaseDriverReservation(ctx context.Context, h registry.DriverReservation) error {
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
	all, err := reg.DriverReservations(ctx)
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
