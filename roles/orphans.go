package roles

import (
	"context"
	"errors"
	"strings"

	"troupe/bus"
)

// Orphans lists the namespaces of the bus in which a role or a reservation has lost its driver. Whoever opens a session there
// ends those, once their driver has had time to come back: a head does so, because after the last driver nobody else is left.
func Orphans(ctx context.Context, b *bus.Bus) ([]string, error) {
	lister := b.JetStream().KeyValueStoreNames(ctx)
	var namespaces, out []string
	for bucket := range lister.Name() {
		if ns, ours := strings.CutPrefix(bucket, bucketOf("")); ours {
			namespaces = append(namespaces, ns)
		}
	}
	if err := lister.Error(); err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "list the namespaces: %w", err)
	}
	for _, ns := range namespaces {
		kv, err := b.KV(ctx, bus.KVConfig{Bucket: bucketOf(ns)})
		if err != nil {
			return nil, err
		}
		has, err := registry{kv: kv}.orphans(ctx)
		if err != nil {
			return nil, err
		}
		if has {
			out = append(out, ns)
		}
	}
	return out, nil
}

// orphans reports whether a role should have ended with its driver and has not, or has processes that nobody watches over.
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
