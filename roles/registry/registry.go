package registry

import (
	"context"
	"errors"

	"troupe/bus"
	"troupe/bus/kv"
)

// The registry of all namespaces is two buckets, in which the keys of a namespace begin with its name: an empty
// namespace costs nothing and need not be deleted.
const (
	registryBucket = "troupe_registry" // <namespace>.role.<name>, .recipe.<name>, .replay.<name>, .hold.<id>
	leaseBucket    = "troupe_leases"   // <namespace>.driver.<session>
	registryBytes  = 256 << 20
	leaseBytes     = 64 << 20
)

// Registry is the keys of one namespace: its roles and reservations, and the leases of its drivers.
type Registry struct {
	kv        *kv.Bucket
	leases    *kv.Bucket
	namespace string
}

// Open opens the registry of a namespace; "" is for functions that read all of them.
func Open(ctx context.Context, b *bus.Bus, namespace string) (Registry, error) {
	return openReplicated(ctx, b, namespace, 0)
}

func openReplicated(ctx context.Context, b *bus.Bus, namespace string, replicas int) (Registry, error) {
	bucket, err := kv.Open(ctx, b, kv.Config{Bucket: registryBucket, MaxBytes: registryBytes, Replicas: replicas})
	if err != nil {
		return Registry{}, err
	}
	leases, err := kv.Open(ctx, b, kv.Config{Bucket: leaseBucket, MaxBytes: leaseBytes, Replicas: replicas, Leases: true})
	return Registry{kv: bucket, leases: leases, namespace: namespace}, err
}

// Of is the registry of another namespace.
func (g Registry) Of(namespace string) Registry {
	g.namespace = namespace
	return g
}

func (g Registry) key(within string) string { return g.namespace + "." + within }

// deleteKey deletes a key; none is no error.
func (g Registry) deleteKey(ctx context.Context, key string) error {
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

// Maintain keeps the registry of all namespaces small, until ctx ends: it removes the tombstones of deleted keys, and
// keys that a crash of the server has restored. A head runs it. An error means that it has not started.
func Maintain(ctx context.Context, b *bus.Bus) error {
	reg, err := Open(ctx, b, "")
	if err != nil {
		return err
	}
	reg.kv.Maintain(ctx)
	return nil
}

// Replicas sets the number of replicas of the registry, as in kv.Config, and returns the current number.
func Replicas(ctx context.Context, b *bus.Bus, replicas int) (int, error) {
	reg, err := openReplicated(ctx, b, "", replicas)
	if err != nil {
		return 0, err
	}
	return min(reg.kv.Replicas(), reg.leases.Replicas()), nil
}
