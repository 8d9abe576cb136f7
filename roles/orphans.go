package roles

import (
	"context"
	"errors"

	"troupe/bus"
)

// Orphans lists the namespaces in which a role or a reservation has lost its driver. A runtime opened there destroys
// them after the grace period: a head does so, because no other process of the run may be left.
func Orphans(ctx context.Context, b *bus.Bus) ([]string, error) {
	reg, err := openRegistry(ctx, b, "")
	if err != nil {
		return nil, err
	}
	all, err := reg.namespaces(ctx)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, ns := range all {
		has, err := reg.of(ns).orphans(ctx)
		if err != nil {
			return nil, err
		}
		if has {
			out = append(out, ns)
		}
	}
	return out, nil
}

// orphans reports whether a role should have ended with its driver, or has processes that no process monitors.
func (g registry) orphans(ctx context.Context) (bool, error) {
	all, err := g.list(ctx)
	for _, r := range all {
		if alive := g.alive(ctx, r.Owner); !r.Detached && !alive || r.needsWatch(alive) {
			return true, nil
		}
	}
	holds, holdErr := g.holds(ctx)
	for _, h := range holds {
		if !g.alive(ctx, h.Owner) {
			return true, nil
		}
	}
	return false, errors.Join(err, holdErr)
}
