package roles

import (
	"context"
	"errors"
	"fmt"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/nodes"
	"troupe/placement"
)

// maxStored is how many bytes one value of the registry may have: half of what a server lets through in one message.
const maxStored = 512 << 10

// recipe is what the workers of a role are started with. Of a role whose policy restarts workers it is stored beside the
// role's record, so that the head can restart them when the driver cannot. It holds the workers' environment, which may
// have secrets: it is read by those who can read launch messages, with the same credentials, and is never printed.
type recipe struct {
	Incarnation    string            `msgpack:"incarnation"`
	Program        nodes.Program     `msgpack:"program"`
	LateRendezvous bool              `msgpack:"late_rendezvous,omitempty"`
	Config         wire.Raw          `msgpack:"config"`
	QueueLimit     int               `msgpack:"queue_limit,omitempty"`
	PanicFails     bool              `msgpack:"panic_fails,omitempty"`
	Needs          placement.Request `msgpack:"needs"`
	Over           string            `msgpack:"over,omitempty"`
	PlaceTimeout   time.Duration     `msgpack:"place_timeout"`
	StartTimeout   time.Duration     `msgpack:"start_timeout"`
	Restarts       int               `msgpack:"restarts"`
	Backoff        time.Duration     `msgpack:"backoff"`
	MaxBackoff     time.Duration     `msgpack:"max_backoff"`
}

func recipeKey(role string) string { return "recipe." + role }

// restarts reports whether workers of the role that are lost are replaced by others.
func (r Record) restarts() bool {
	return r.Process && (r.Policy == RestartRank || r.Policy == RestartRole)
}

// process is the part of a Process that restarts need.
func (r *recipe) process() *Process {
	return &Process{
		Needs: r.Needs, Over: r.Over, PlaceTimeout: r.PlaceTimeout, Restarts: r.Restarts, Backoff: r.Backoff, MaxBackoff: r.MaxBackoff,
		LateRendezvous: r.LateRendezvous,
	}
}

// keepRecipe notes what the workers are started with, here and, if the role's policy restarts them, in the registry. One
// that is too large for the registry leaves restarts to the driver, which the record says.
func (c *Cluster) keepRecipe(ctx context.Context, config wire.Raw) error {
	p, rec := c.spec.Process, c.Record()
	c.mu.Lock()
	c.recipe = &recipe{
		Incarnation: rec.Incarnation, Program: c.program, LateRendezvous: p.LateRendezvous, Config: config, QueueLimit: c.spec.QueueLimit,
		PanicFails: c.spec.PanicFails, Needs: p.Needs, Over: p.Over, PlaceTimeout: p.PlaceTimeout, StartTimeout: c.spec.StartTimeout,
		Restarts: p.Restarts, Backoff: p.Backoff, MaxBackoff: p.MaxBackoff,
	}
	r := c.recipe
	c.mu.Unlock()
	if !rec.restarts() {
		return nil
	}
	value, err := wire.Marshal(r)
	if err != nil {
		return bus.Errorf(bus.CodeInternal, "role %s: encode what its workers are started with: %w", c.Name(), err)
	}
	if len(value) > maxStored {
		why := fmt.Sprintf("what its workers are started with takes %d KiB, and the registry keeps %d; make its configuration or environment smaller", len(value)>>10, maxStored>>10)
		return c.edit(ctx, func(r *Record) { r.OnlyDriver = why })
	}
	reg, err := c.rt.registry(ctx)
	if err != nil {
		return err
	}
	_, err = reg.kv.Put(ctx, reg.key(recipeKey(rec.Name)), value) // over what an earlier role of the name has left
	return err
}

// forget deletes a value.
func (g registry) forget(ctx context.Context, key string) error {
	for {
		e, err := g.kv.Get(ctx, key)
		if err == nil {
			err = g.kv.Delete(ctx, key, e.Revision)
		}
		switch {
		case errors.Is(err, bus.ErrNotFound):
			return nil
		case !errors.Is(err, bus.ErrConflict):
			return err
		}
	}
}

// startedWith is what the workers are started with; a role that was not created here has it in the registry.
func (c *Cluster) startedWith(ctx context.Context, rec Record) (*recipe, error) {
	c.mu.Lock()
	r := c.recipe
	c.mu.Unlock()
	if r != nil {
		return r, nil
	}
	if rec.OnlyDriver != "" {
		return nil, bus.Errorf(bus.CodeRefused, "only its driver can restart it: %s", rec.OnlyDriver)
	}
	reg, err := c.rt.registry(ctx)
	if err != nil {
		return nil, err
	}
	e, err := reg.kv.Get(ctx, reg.key(recipeKey(rec.Name)))
	if errors.Is(err, bus.ErrNotFound) {
		return nil, bus.Errorf(bus.CodeRefused, "only its driver can restart it: the registry does not have what its workers are started with")
	}
	if err != nil {
		return nil, err
	}
	r = &recipe{}
	if err := wire.Unmarshal(e.Value, r); err != nil || r.Incarnation != rec.Incarnation {
		return nil, bus.Errorf(bus.CodeRefused, "only its driver can restart it: what its workers are started with cannot be read from the registry (%v)", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.recipe, c.program = r, r.Program
	return r, nil
}
