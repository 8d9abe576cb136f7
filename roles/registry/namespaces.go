package registry

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"troupe/bus"
	"troupe/bus/kv"
)

// namespaces lists the non-empty namespaces, by name.
func (g Registry) namespaces(ctx context.Context) ([]string, error) {
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
	reg, err := Open(ctx, b, "")
	if err != nil {
		return nil, err
	}
	found := map[string]*Namespace{}
	team, _ := b.Team() // it sees its own
	for _, bucket := range []*kv.Bucket{reg.kv, reg.leases} {
		entries, err := bucket.List(ctx, team.Namespace)
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

// All lists the roles of every namespace, by key, for tools of operators. Records that cannot be decoded are skipped.
func All(ctx context.Context, b *bus.Bus) ([]RoleRecord, error) {
	reg, err := Open(ctx, b, "")
	if err != nil {
		return nil, err
	}
	team, _ := b.Team() // it sees its own
	entries, err := reg.kv.List(ctx, team.Namespace)
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
