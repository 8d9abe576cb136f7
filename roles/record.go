package roles

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/dispatch"
)

// Record is what the registry says of a role: the key role.<name> in the namespace's bucket. It is JSON, so that an
// operator can read it with any tool.
type Record struct {
	Namespace   string              `json:"namespace"`
	Name        string              `json:"name"`
	Incarnation string              `json:"incarnation"`
	Class       string              `json:"class"`
	World       int                 `json:"world"`
	Mesh        dispatch.Mesh       `json:"mesh"`
	Ordered     bool                `json:"ordered,omitempty"`
	Detached    bool                `json:"detached,omitempty"`
	Open        bool                `json:"open,omitempty"` // methods beyond the table may be called
	Methods     []actors.MethodInfo `json:"methods"`
	State       RoleState           `json:"state"`
	Since       time.Time           `json:"since"` // of the state, by the owner's clock
	Owner       string              `json:"owner"` // session of the driver
	By          string              `json:"by"`    // the driver, for people
	Cause       string              `json:"cause,omitempty"`
}

// RoleState is where a role is in its life.
//
//	starting ──► ready ──► stopping ──► (the record is gone)
//	    │          │
//	    └──────────┴──► failed ──► (destroyed by its owner)
type RoleState string

const (
	RoleStarting RoleState = "starting" // its workers are being made
	RoleReady    RoleState = "ready"    // every worker has proved that it hears every subject
	RoleStopping RoleState = "stopping" // it is being taken down
	RoleFailed   RoleState = "failed"   // a worker failed; Cause says why
)

// Address is where the role is on the bus.
func (r Record) Address() bus.Address {
	return bus.Address{Namespace: r.Namespace, Role: r.Name, Incarnation: r.Incarnation}
}

// method finds what the class declares of a method.
func (r Record) method(name string) (actors.MethodInfo, error) {
	for _, m := range r.Methods {
		if m.Name == name {
			return m, nil
		}
	}
	if r.Open || strings.HasPrefix(name, "@") {
		return actors.MethodInfo{Name: name, Lane: actors.Serial}, nil
	}
	names := make([]string, len(r.Methods))
	for i, m := range r.Methods {
		names[i] = m.Name
	}
	slices.Sort(names)
	return actors.MethodInfo{}, bus.Errorf(bus.CodeNotFound, "role %s (class %s) has no method %q; it has %s", r.Name, r.Class, name, strings.Join(names, ", "))
}

func bucketOf(namespace string) string { return "troupe_" + namespace }

func roleKey(name string) string      { return "role." + name }
func driverKey(session string) string { return "driver." + session }

// registry is the roles of one namespace in KV.
type registry struct{ kv *bus.KV }

func decodeRecord(e bus.Entry) (Record, error) {
	var r Record
	if err := json.Unmarshal(e.Value, &r); err != nil {
		return r, bus.Errorf(bus.CodeMalformed, "the registry's record %s cannot be read: %w", e.Key, err)
	}
	return r, nil
}

// get returns a role's record and its revision; an unknown role is an error that names those that exist.
func (g registry) get(ctx context.Context, name string) (Record, uint64, error) {
	e, err := g.kv.Get(ctx, roleKey(name))
	if errors.Is(err, bus.ErrNotFound) {
		return Record{}, 0, g.unknown(ctx, name)
	}
	if err != nil {
		return Record{}, 0, err
	}
	r, err := decodeRecord(e)
	return r, e.Revision, err
}

func (g registry) unknown(ctx context.Context, name string) error {
	there := "there is none"
	if all, err := g.list(ctx); err == nil && len(all) > 0 {
		names := make([]string, len(all))
		for i, r := range all {
			names[i] = r.Name
		}
		there = "there are " + strings.Join(names, ", ")
	}
	return bus.Errorf(bus.CodeNotFound, "no role %q in this namespace; %s", name, there)
}

func (g registry) list(ctx context.Context) ([]Record, error) {
	entries, err := g.kv.List(ctx, "role")
	if err != nil {
		return nil, err
	}
	out := make([]Record, 0, len(entries))
	for _, e := range entries {
		r, err := decodeRecord(e)
		if err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, nil
}

// claim writes the record of a new role. A name whose owner is gone is taken over; one that is held is an error that
// says who holds it.
func (g registry) claim(ctx context.Context, r Record) (uint64, error) {
	value, err := json.Marshal(r)
	if err != nil {
		return 0, bus.Errorf(bus.CodeInternal, "encode the record of %s: %w", r.Name, err)
	}
	for {
		rev, err := g.kv.Create(ctx, roleKey(r.Name), value)
		if !errors.Is(err, bus.ErrExists) {
			return rev, err
		}
		held, heldRev, err := g.get(ctx, r.Name)
		if errors.Is(err, bus.ErrNotFound) {
			continue // it ended in between
		}
		if err != nil {
			return 0, err
		}
		if held.Detached || g.alive(ctx, held.Owner) {
			return 0, &TakenError{Record: held}
		}
		rev, err = g.kv.Update(ctx, roleKey(r.Name), value, heldRev)
		if !errors.Is(err, bus.ErrConflict) {
			return rev, err
		}
	}
}

// alive reports whether a driver's lease is there. Doubt counts for the driver.
func (g registry) alive(ctx context.Context, session string) bool {
	_, err := g.kv.Get(ctx, driverKey(session))
	return !errors.Is(err, bus.ErrNotFound)
}

func (g registry) put(ctx context.Context, r Record, rev uint64) (uint64, error) {
	value, err := json.Marshal(r)
	if err != nil {
		return 0, bus.Errorf(bus.CodeInternal, "encode the record of %s: %w", r.Name, err)
	}
	return g.kv.Update(ctx, roleKey(r.Name), value, rev)
}

// remove deletes the record of one incarnation. Somebody else's, or none, is left as it is.
func (g registry) remove(ctx context.Context, r Record) error {
	for {
		held, rev, err := g.get(ctx, r.Name)
		if errors.Is(err, bus.ErrNotFound) || err == nil && held.Incarnation != r.Incarnation {
			return nil
		}
		if err != nil {
			return err
		}
		if err := g.kv.Delete(ctx, roleKey(r.Name), rev); !errors.Is(err, bus.ErrConflict) {
			return err
		}
	}
}

// TakenError is a role name that somebody holds.
type TakenError struct{ Record Record }

func (e *TakenError) Error() string {
	r := e.Record
	return "role " + r.Name + " exists already: it is " + string(r.State) + " since " + r.Since.Format(time.RFC3339) +
		", held by " + r.By + "; attach to it, or choose another name"
}

// Is makes a taken name an ErrExists.
func (e *TakenError) Is(target error) bool { return target == error(bus.ErrExists) }
