package roles

import "context"

// Reown makes another driver the owner of a role.
func (rt *Runtime) Reown(ctx context.Context, name, session string) error {
	reg, err := rt.registry(ctx)
	if err != nil {
		return err
	}
	rec, rev, err := reg.read(ctx, name)
	if err != nil {
		return err
	}
	rec.Owner = session
	value, err := encodeRecord(rec)
	if err == nil {
		_, err = reg.kv.Update(ctx, reg.key(roleKey(name)), value, rev)
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
	return reg.remove(ctx, c.Record())
}

// Step changes the state of a role in the registry, as another driver would.
func (rt *Runtime) Step(ctx context.Context, c *Cluster, to RoleState) error {
	reg, err := rt.registry(ctx)
	if err == nil {
		_, err = reg.step(ctx, c.Record(), to, "")
	}
	return err
}

// Alive reports whether a driver's lease exists.
func (rt *Runtime) Alive(ctx context.Context, session string) bool {
	reg, err := rt.registry(ctx)
	return err != nil || reg.alive(ctx, session)
}
