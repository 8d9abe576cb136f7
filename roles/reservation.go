package roles

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"troupe/bus"
	"troupe/placement"
)

// Reservation is devices that a driver holds for roles to come. Roles are laid over it with Process.Needs.Colocate, and
// share a device wherever they overlap. It ends with the driver's lease, unless it is released before.
type Reservation struct {
	placement.Record
	rt *Runtime
}

// hold is a reservation in the registry: the key <namespace>.hold.<id>. It is written before the
// reservation is asked for, so that one whose driver is gone can be found.
type hold struct {
	ID    string        `json:"id"`
	Owner string        `json:"owner"` // session of the driver
	By    string        `json:"by"`    // the driver, for people
	Lease time.Duration `json:"lease"`
	Since time.Time     `json:"since"`
}

func holdKey(id string) string { return "hold." + id }

// Reserve holds devices for this driver; it waits in the queue until ctx ends, or a minute if ctx has no end. A request
// that names no id gets one.
func (rt *Runtime) Reserve(ctx context.Context, request placement.Request) (*Reservation, error) {
	if rt.local == nil {
		return nil, bus.Errorf(bus.CodeRefused, "a worker reserves nothing: it holds no lease that could end it; let the driver do it")
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
	if err := reg.hold(ctx, hold{ID: request.ID, Owner: rt.ep.Session(), By: rt.cfg.Name, Lease: rt.cfg.Lease, Since: time.Now().UTC()}); err != nil {
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
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), registryActs) // ctx has often ended by then
			defer cancel()
			err = errors.Join(err, reg.unhold(last, request.ID))
		}
		return nil, err
	}
	return &Reservation{Record: rec, rt: rt}, nil
}

// Release gives the devices back. It may be called more than once.
func (r *Reservation) Release(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseActs)
	defer cancel()
	return r.rt.releaseHold(ctx, r.ID, r.Token)
}

// releaseHold gives a reservation back and forgets it.
func (rt *Runtime) releaseHold(ctx context.Context, id string, token uint64) error {
	client, err := rt.placement()
	if err != nil {
		return err
	}
	if err := release(ctx, client, []Held{{ID: id, Token: token}}); err != nil {
		return err
	}
	reg, err := rt.registry(ctx)
	if err != nil {
		return err
	}
	return reg.unhold(ctx, id)
}

func (g registry) hold(ctx context.Context, h hold) error {
	value, err := json.Marshal(h)
	if err != nil {
		return bus.Errorf(bus.CodeInternal, "encode the hold of %s: %w", h.ID, err)
	}
	if _, err := g.kv.Create(ctx, g.key(holdKey(h.ID)), value); errors.Is(err, bus.ErrExists) {
		return bus.Errorf(bus.CodeExists, "reservation %s exists already in this namespace; choose another id", h.ID)
	} else if err != nil {
		return err
	}
	return nil
}

func (g registry) unhold(ctx context.Context, id string) error {
	e, err := g.kv.Get(ctx, g.key(holdKey(id)))
	if err == nil {
		err = g.kv.Delete(ctx, g.key(holdKey(id)), e.Revision)
	}
	if errors.Is(err, bus.ErrNotFound) {
		return nil
	}
	return err
}

// holds lists what drivers hold. What cannot be read is left alone: it is nobody's that we know of.
func (g registry) holds(ctx context.Context) ([]hold, error) {
	entries, err := g.kv.List(ctx, g.key("hold"))
	if err != nil {
		return nil, err
	}
	var out []hold
	for _, e := range entries {
		var h hold
		if json.Unmarshal(e.Value, &h) == nil && h.ID != "" {
			out = append(out, h)
		}
	}
	return out, nil
}

// sweepHold gives back what a driver held that is gone.
func (rt *Runtime) sweepHold(ctx context.Context, h hold) error {
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
	return rt.releaseHold(ctx, h.ID, token)
}

// releaseOwn gives back what this driver holds.
func (rt *Runtime) releaseOwn(ctx context.Context) error {
	reg, err := rt.registry(ctx)
	if err != nil {
		return err
	}
	all, err := reg.holds(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, h := range all {
		if h.Owner == rt.ep.Session() {
			errs = append(errs, rt.sweepHold(ctx, h))
		}
	}
	return errors.Join(errs...)
}
