package roles

import (
	"context"

	"troupe/roles/registry"
)

// Reown makes another driver the owner of a role.
func (rt *Runtime) Reown(ctx context.Context, name, session string) error {
	reg, err := rt.registry(ctx)
	if err != nil {
		return err
	}
	rec, err := reg.Get(ctx, name)
	if err == nil {
		_, err = reg.Alter(ctx, rec, func(r *registry.RoleRecord) error { r.Owner = session; return nil })
	}
	return err
}

// Holds counts the clusters of a runtime.
func (rt *Runtime) Holds() int {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	return len(rt.clusters)
}

// Forget removes a role's record, as if it had been destroyed while its nodes were unreachable.
func (rt *Runtime) Forget(ctx context.Context, c *Cluster) error {
	reg, err := rt.registry(ctx)
	if err != nil {
		return err
	}
	return reg.Remove(ctx, c.Record())
}

// Step changes the state of a role in the registry, as another driver would.
func (rt *Runtime) Step(ctx context.Context, c *Cluster, to registry.RoleState) error {
	reg, err := rt.registry(ctx)
	if err == nil {
		_, err = reg.Step(ctx, c.Record(), to, "")
	}
	return err
}

// Alive reports whether a driver's lease exists.
func (rt *Runtime) Alive(ctx context.Context, session string) bool {
	reg, err := rt.registry(ctx)
	return err != nil || reg.DriverAlive(ctx, session)
}
