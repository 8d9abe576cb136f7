package roles

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

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

// registry is the keys of one namespace: its roles and reservations, and the leases of its drivers.
type registry struct {
	kv        *kv.Bucket
	leases    *kv.Bucket
	namespace string
}

func openRegistry(ctx context.Context, b *bus.Bus, namespace string) (registry, error) {
	return openReplicated(ctx, b, namespace, 0)
}

func openReplicated(ctx context.Context, b *bus.Bus, namespace string, replicas int) (registry, error) {
	bucket, err := kv.Open(ctx, b, kv.Config{Bucket: registryBucket, MaxBytes: registryBytes, Replicas: replicas})
	if err != nil {
		return registry{}, err
	}
	leases, err := kv.Open(ctx, b, kv.Config{Bucket: leaseBucket, MaxBytes: leaseBytes, Replicas: replicas, Leases: true})
	return registry{kv: bucket, leases: leases, namespace: namespace}, err
}

// of is the registry of another namespace.
func (g registry) of(namespace string) registry {
	g.namespace = namespace
	return g
}

func (g registry) key(within string) string { return g.namespace + "." + within }

// namespaces lists the non-empty namespaces, by name.
func (g registry) namespaces(ctx context.Context) ([]string, error) {
	var out []string
	for _, bucket := range []*kv.Bucket{g.kv, g.leases} {
		keys, err := bucket.Keys(ctx, "")
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

// Maintain keeps the registry of all namespaces small, until ctx ends: it removes the tombstones of deleted keys, and
// keys that a crash of the server has restored. A head runs it. An error means that it has not started.
func Maintain(ctx context.Context, b *bus.Bus) error {
	reg, err := openRegistry(ctx, b, "")
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

// Namespace is the content of a namespace.
type Namespace struct {
	Name         string    `json:"name"`
	Drivers      []string  `json:"drivers"`      // live drivers, for display
	Roles        []string  `json:"roles"`        // by name
	Reservations []string  `json:"reservations"` // of drivers, without a role
	Used         time.Time `json:"used"`         // last write, by the server's clock
}

// Namespaces lists the non-empty namespaces, by name.
func Namespaces(ctx context.Context, b *bus.Bus) ([]Namespace, error) {
	reg, err := openRegistry(ctx, b, "")
	if err != nil {
		return nil, err
	}
	found := map[string]*Namespace{}
	for _, bucket := range []*kv.Bucket{reg.kv, reg.leases} {
		entries, err := bucket.List(ctx, "")
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			name, rest, _ := strings.Cut(e.Key, ".")
			kind, id, _ := strings.Cut(rest, ".")
			if bus.CheckName("namespace", name) != nil {
				continue
			}
			if found[name] == nil {
				found[name] = &Namespace{Name: name, Drivers: []string{}, Roles: []string{}, Reservations: []string{}}
			}
			found[name].add(kind, id, e)
		}
	}
	out := make([]Namespace, 0, len(found))
	for _, name := range slices.Sorted(maps.Keys(found)) {
		out = append(out, *found[name])
	}
	return out, nil
}

func (n *Namespace) add(kind, id string, e kv.Entry) {
	if e.Time.After(n.Used) {
		n.Used = e.Time
	}
	switch kind {
	case "role":
		n.Roles = append(n.Roles, id)
	case "hold":
		n.Reservations = append(n.Reservations, id)
	case "driver":
		n.Drivers = append(n.Drivers, cmp.Or(readDriverProcess(e.Value).Name, id))
	}
}

// DestroyAll destroys every role of the namespace and releases its drivers' reservations. Live drivers see their roles
// end.
func (rt *Runtime) DestroyAll(ctx context.Context) error {
	reg, err := rt.registry(ctx)
	if err != nil {
		return err
	}
	all, err := reg.list(ctx)
	errs := []error{err}
	for _, rec := range all {
		errs = append(errs, rt.endRole(ctx, rec))
	}
	holds, err := reg.driverReservations(ctx)
	errs = append(errs, err)
	for _, h := range holds {
		errs = append(errs, rt.releaseDriverReservation(ctx, h))
	}
	return errors.Join(errs...)
}

// All lists the roles of every namespace, by key, for tools of operators. Records that cannot be decoded are skipped.
func All(ctx context.Context, b *bus.Bus) ([]RoleRecord, error) {
	reg, err := openRegistry(ctx, b, "")
	if err != nil {
		return nil, err
	}
	entries, err := reg.kv.List(ctx, "")
	if err != nil {
		return nil, err
	}
	all := []RoleRecord{}
	for _, e := range entries {
		namespace, rest, _ := strings.Cut(e.Key, ".")
		if !strings.HasPrefix(rest, roleKey("")) || bus.CheckName("namespace", namespace) != nil {
			continue
		}
		if r, err := decodeRecord(e); err == nil {
			all = append(all, r)
		}
	}
	return all, nil
}
