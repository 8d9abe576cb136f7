package registry

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"troupe/bus"
	"troupe/bus/kv"
	"troupe/bus/wire"
)

func roleKey(name string) string { return "role." + name }

func decodeRecord(e kv.Entry) (RoleRecord, error) {
	var r RoleRecord
	err := json.Unmarshal(e.Value, &r)
	if err == nil {
		err = r.Check()
	}
	if key := r.Namespace + "." + roleKey(r.Name); err == nil && e.Key != key {
		err = bus.Errorf(bus.CodeMalformed, "it says that it is %s", wire.Clip(key)) // others act on what it names
	}
	if err != nil {
		return r, bus.Errorf(bus.CodeMalformed, "the registry entry %s is malformed: %w", e.Key, err)
	}
	return r, nil
}

// Get returns a role's record; the error of an unknown role lists the existing ones.
func (g Registry) Get(ctx context.Context, name string) (RoleRecord, error) {
	r, _, err := g.read(ctx, name)
	if errors.Is(err, bus.ErrNotFound) {
		return RoleRecord{}, g.unknown(ctx, name)
	}
	return r, err
}

// Read returns a role's record; ErrNotFound: there is no role of the name.
func (g Registry) Read(ctx context.Context, name string) (RoleRecord, error) {
	r, _, err := g.read(ctx, name)
	return r, err
}

// read returns a role's record and its revision.
func (g Registry) read(ctx context.Context, name string) (RoleRecord, uint64, error) {
	e, err := g.kv.Get(ctx, g.key(roleKey(name)))
	if err != nil {
		return RoleRecord{}, 0, err
	}
	r, err := decodeRecord(e)
	return r, e.Revision, err
}

func (g Registry) unknown(ctx context.Context, name string) error {
	there := "there is none"
	if all, _ := g.List(ctx); len(all) > 0 { // a partial list helps
		names := make([]string, len(all))
		for i, r := range all {
			names[i] = r.Name
		}
		there = "there are " + strings.Join(names, ", ")
	}
	if elsewhere := g.namespacesOf(ctx, name); len(elsewhere) > 0 {
		there += fmt.Sprintf("; a role of that name is in namespace %s: name that namespace to use it", strings.Join(elsewhere, ", "))
	}
	return bus.Errorf(bus.CodeNotFound, "no role %q in this namespace; %s", name, there)
}

// namespacesOf lists the namespaces with a role of that name; none where the credentials do not allow to list them.
func (g Registry) namespacesOf(ctx context.Context, role string) (names []string) {
	entries, err := g.kv.List(ctx, "")
	if err != nil {
		return nil
	}
	for _, e := range entries {
		if namespace, ok := strings.CutSuffix(e.Key, "."+roleKey(role)); ok && bus.CheckName("namespace", namespace) == nil {
			names = append(names, namespace)
		}
	}
	return names
}

// List returns the roles by name. Malformed records are an error beside the others.
func (g Registry) List(ctx context.Context) ([]RoleRecord, error) {
	entries, err := g.kv.List(ctx, g.key("role"))
	if err != nil {
		return nil, err
	}
	out := make([]RoleRecord, 0, len(entries))
	var errs []error
	for _, e := range entries {
		r, err := decodeRecord(e)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		out = append(out, r)
	}
	return out, errors.Join(errs...)
}

// Create writes the record of a new role. The error of a taken name is ErrExists.
func (g Registry) Create(ctx context.Context, r RoleRecord) error {
	value, err := encodeRecord(r)
	if err == nil {
		_, err = g.kv.Create(ctx, g.key(roleKey(r.Name)), value)
	}
	return err
}

// Claim writes the record of a role that runs again, if the registry has lost it or has an older version: after a restore, or with an empty
// store. Another role of the name is ErrExists, unless it is of the same driver, who knows that it has ended.
func (g Registry) Claim(ctx context.Context, r RoleRecord) (claimed bool, err error) {
	value, err := encodeRecord(r)
	if err != nil {
		return false, err
	}
	held, rev, err := g.read(ctx, r.Name)
	switch {
	case errors.Is(err, bus.ErrNotFound):
		_, err = g.kv.Create(ctx, g.key(roleKey(r.Name)), value)
	case err != nil:
	case held.Incarnation == r.Incarnation && held.Version >= r.Version:
		return false, nil
	case held.Incarnation != r.Incarnation && held.Owner != r.Owner:
		return false, &TakenError{Record: held}
	default:
		_, err = g.kv.Update(ctx, g.key(roleKey(r.Name)), value, rev)
	}
	return err == nil, err
}

func encodeRecord(r RoleRecord) ([]byte, error) {
	value, err := json.Marshal(r)
	if err != nil {
		return nil, bus.Errorf(bus.CodeInternal, "encode the record of %s: %w", r.Name, err)
	}
	return value, nil
}

// Step changes the state of one incarnation of a role and returns its record. Several processes may do so; a transition
// that the diagram does not have is ErrConflict, and an ended role ErrNotFound.
func (g Registry) Step(ctx context.Context, r RoleRecord, to RoleState, cause string) (RoleRecord, error) {
	return g.Alter(ctx, r, func(held *RoleRecord) error {
		if !slices.Contains(roleSuccessors[held.State], to) {
			return bus.Errorf(bus.CodeConflict, "role %s is %s and cannot become %s", r.Name, held.State, to)
		}
		held.State, held.Since, held.Cause = to, time.Now().UTC(), cmp.Or(cause, held.Cause)
		return nil
	})
}

// Edit changes one incarnation's record except its state. For a stopping or failed role it is ErrConflict: the process
// that ends it has read what to end.
func (g Registry) Edit(ctx context.Context, r RoleRecord, change func(*RoleRecord)) (RoleRecord, error) {
	return g.Alter(ctx, r, func(held *RoleRecord) error {
		if held.State == RoleStopping || held.State == RoleFailed {
			return bus.Errorf(bus.CodeConflict, "role %s is %s since %s", r.Name, held.State, held.Since.Format(time.RFC3339))
		}
		change(held)
		return nil
	})
}

// Alter changes one incarnation's record by compare-and-set, in any state, and returns it. change may refuse; it is called
// again when another process has written in between.
func (g Registry) Alter(ctx context.Context, r RoleRecord, change func(*RoleRecord) error) (RoleRecord, error) {
	for {
		held, rev, err := g.read(ctx, r.Name)
		if err == nil && held.Incarnation != r.Incarnation {
			err = bus.Errorf(bus.CodeNotFound, "this incarnation of role %s has ended; there is another", r.Name)
		}
		if err == nil {
			err = change(&held)
		}
		if err != nil {
			return r, err
		}
		held.Version++
		value, err := encodeRecord(held)
		if err != nil {
			return r, err
		}
		if _, err = g.kv.Update(ctx, g.key(roleKey(r.Name)), value, rev); !errors.Is(err, bus.ErrConflict) {
			return held, err
		}
	}
}

// Remove deletes the record of one incarnation. Another incarnation, or none, is no error.
func (g Registry) Remove(ctx context.Context, r RoleRecord) error {
	for {
		held, rev, err := g.read(ctx, r.Name)
		if errors.Is(err, bus.ErrNotFound) || err == nil && held.Incarnation != r.Incarnation {
			return nil
		}
		if err != nil {
			return err
		}
		if err := g.kv.Delete(ctx, g.key(roleKey(r.Name)), rev); !errors.Is(err, bus.ErrConflict) {
			return err
		}
	}
}
