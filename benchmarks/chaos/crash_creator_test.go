package chaos

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/placement"
	"troupe/roles"
)

// creator is a driver that creates and destroys roles, and is closed and opened again.
type creator struct {
	m         *Model
	cfg       bus.Config
	namespace string
	processes bool // its workers are processes on nodes

	rt     *roles.Runtime
	own    map[string]*roles.Cluster
	failed map[string]bool // names whose creation or end failed: they stay unused until the driver is closed
}

// echoClass is what goroutine workers play.
func echoClass() *actors.Class {
	type worker struct{}
	k := actors.NewClass("echo", func(context.Context, actors.Setup) (*worker, error) { return &worker{}, nil })
	actors.Method(k, "echo", func(_ *worker, _ context.Context, n int) (int, error) { return n, nil })
	return k.Class
}

func (c *creator) close() {
	if c.rt != nil {
		_ = c.rt.Close(context.Background()) // the server may be gone
	}
}

func (c *creator) step(ctx context.Context, rng *rand.Rand) {
	if c.rt == nil {
		c.open(ctx)
		return
	}
	if rng.IntN(12) == 0 {
		c.end(ctx)
		return
	}
	if c.processes && rng.IntN(4) > 0 {
		return // processes take their time
	}
	name := "role" + strconv.Itoa(rng.IntN(4))
	switch cluster := c.own[name]; {
	case c.failed[name]:
	case cluster == nil:
		c.create(ctx, name)
	default:
		c.destroy(ctx, name, cluster)
	}
}

func (c *creator) open(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, opLimit)
	defer cancel()
	rt, err := roles.Open(ctx, roles.Config{BusConfig: c.cfg, Namespace: c.namespace, Name: "creator", Classes: []*actors.Class{echoClass()}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		c.m.Logf("open a driver in %s: %v", c.namespace, err)
		return
	}
	c.rt, c.own, c.failed = rt, map[string]*roles.Cluster{}, map[string]bool{}
	c.m.Logf("open driver %s in %s", rt.Session(), c.namespace)
	c.m.Set("lease/"+rt.Session(), "held")
}

// end closes the driver, and with it its roles.
func (c *creator) end(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, opLimit)
	defer cancel()
	err := c.rt.Close(ctx)
	c.m.Logf("close driver %s in %s: %v", c.rt.Session(), c.namespace, err)
	names := map[string]bool{}
	for name := range c.own {
		names[name] = true
	}
	for name := range c.failed {
		names[name] = true
	}
	for name := range names {
		c.gone(name, err)
	}
	// A lease whose end was not acknowledged, or came back with the store, ends by its clock.
	c.m.SetAfter("lease/"+c.rt.Session(), absent, 17*time.Second)
	c.rt = nil
}

// gone tells the model of the end of a role.
func (c *creator) gone(name string, err error) {
	for _, key := range []string{"role/" + c.namespace + "/" + name, "held/" + c.namespace + "/" + name} {
		if err != nil || c.failed[name] {
			c.m.MaybeLater(key, absent)
		} else {
			c.m.Set(key, absent)
		}
	}
}

func (c *creator) create(ctx context.Context, name string) {
	ctx, cancel := context.WithTimeout(ctx, opLimit)
	defer cancel()
	spec := roles.Spec{Name: name, Class: "echo", World: 2, StopGrace: 100 * time.Millisecond}
	if c.processes {
		needs := placement.Request{Bundles: []placement.Bundle{{Devices: 50}}}
		spec.Class, spec.World, spec.Process = "chaos", 1, &roles.Process{Command: roles.Self(), Needs: needs}
	}
	roleKey, heldKey := "role/"+c.namespace+"/"+name, "held/"+c.namespace+"/"+name
	if _, certain := c.m.Value(roleKey); !certain {
		return // another driver's of that name may still be there
	}
	cluster, err := c.rt.Create(ctx, spec)
	if err != nil {
		c.m.Logf("create %s/%s: %v", c.namespace, name, err)
		c.failed[name] = true
		c.m.MaybeAny(roleKey, true)
		if c.processes {
			c.m.MaybeAny(heldKey, true)
		}
		return
	}
	rec := cluster.Record()
	c.m.Logf("create %s/%s: incarnation %s", c.namespace, name, rec.Incarnation)
	c.own[name] = cluster
	c.m.Set(roleKey, rec.Incarnation)
	if len(rec.Reservations) > 0 {
		c.m.Set(heldKey, rec.Reservations[0].ID)
	}
}

func (c *creator) destroy(ctx context.Context, name string, cluster *roles.Cluster) {
	ctx, cancel := context.WithTimeout(ctx, opLimit)
	defer cancel()
	err := cluster.Destroy(ctx)
	c.m.Logf("destroy %s/%s: %v", c.namespace, name, err)
	delete(c.own, name)
	c.gone(name, err)
	if err != nil {
		c.failed[name] = true
	}
}
