package roles

import (
	"context"
	"slices"
	"strings"

	"troupe/bus"
)

// The registry of all namespaces is two buckets, in which each namespace has the keys that begin with its name: so a
// namespace with nothing in it costs nothing. Nobody has to delete a namespace.
const (
	registryBucket = "troupe_registry" // <namespace>.role.<name>, .recipe.<name>, .replay.<name>, .hold.<id>
	leaseBucket    = "troupe_leases"   // <namespace>.driver.<session>
	registryBytes  = 256 << 20
	leaseBytes     = 64 << 20
)

// registry is what one namespace has in KV: its roles and reservations, and the leases of its drivers.
type registry struct {
	kv        *bus.KV
	leases    *bus.KV
	namespace string
}

func openRegistry(ctx context.Context, b *bus.Bus, namespace string) (registry, error) {
	return openReplicated(ctx, b, namespace, 0)
}

func openReplicated(ctx context.Context, b *bus.Bus, namespace string, replicas int) (registry, error) {
	kv, err := b.KV(ctx, bus.KVConfig{Bucket: registryBucket, MaxBytes: registryBytes, Replicas: replicas})
	if err != nil {
		return registry{}, err
	}
	leases, err := b.KV(ctx, bus.KVConfig{Bucket: leaseBucket, MaxBytes: leaseBytes, Replicas: replicas, Leases: true})
	return registry{kv: kv, leases: leases, namespace: namespace}, err
}

// of is the registry of another namespace.
func (g registry) of(namespace string) registry {
	g.namespace = namespace
	return g
}

func (g registry) key(within string) string { return g.namespace + "." + within }

// namespaces lists the namespaces that have something, by name.
func (g registry) namespaces(ctx context.Context) ([]string, error) {
	var out []string
	for _, kv := range []*bus.KV{g.kv, g.leases} {
		keys, err := kv.Keys(ctx, "")
		if err != nil {
			return nil, err
		}
		for _, key := range keys {
			if ns, _, _ := strings.Cut(key, "."); bus.CheckName("namespace", ns) == nil {
				out = append(out, ns)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// Maintain keeps the registry of all namespaces small, until ctx ends: it removes what is left of deleted keys, and what a
// crash of the server brings back. A head runs it. An error means that it has not begun.
func Maintain(ctx context.Context, b *bus.Bus) error {
	reg, err := openRegistry(ctx, b, "")
	if err != nil {
		return err
	}
	reg.kv.Maintain(ctx)
	return nil
}

// Replicas gives the registry so many replicas, as in bus.KVConfig, and returns how many it has now.
func Replicas(ctx context.Context, b *bus.Bus, replicas int) (int, error) {
	reg, err := openReplicated(ctx, b, "", replicas)
	if err != nil {
		return 0, err
	}
	return min(reg.kv.Replicas(), reg.leases.Replicas()), nil
}
