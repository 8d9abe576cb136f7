package roles

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/kv"
	"troupe/dispatch"
)

// Record is what the registry says of a role: the key <namespace>.role.<name> in its bucket. It is JSON, so that an
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
	Lease       time.Duration       `json:"lease"` // how long the driver may be silent before it counts as gone
	Cause       string              `json:"cause,omitempty"`

	// Process says that the workers are processes on nodes; the rest is of those alone.
	Process bool   `json:"process,omitempty"`
	Seats   []Seat `json:"seats,omitempty"`  // where they run, by rank
	Held    []Held `json:"held,omitempty"`   // on which reservations
	Master  string `json:"master,omitempty"` // where their rank 0 can be found: HOST:PORT
	Policy  Policy `json:"policy,omitempty"`
	Gens    uint32 `json:"gens,omitempty"` // how many generations of workers there have been after the first

	Restarts   int      `json:"restarts,omitempty"`    // how often its policy has restarted workers
	Restart    *Restart `json:"restart,omitempty"`     // the restart that is under way, while it is restarting
	Former     []Former `json:"former,omitempty"`      // workers that were replaced, and are not known to have ended
	OnlyDriver string   `json:"only_driver,omitempty"` // why the head cannot restart its workers; empty: it can
}

// RoleState is where a role is in its life.
//
//	starting ──► ready ◄──► restarting
//	    │          │            │
//	    │          ├────────────┤
//	    │          ▼            ▼
//	    ├──────► failed ──► stopping ──► (the record is gone)
//	    └───────────────────────▲
//
// Ready and restarting become stopping as well, without having failed.
type RoleState string

const (
	RoleStarting   RoleState = "starting"   // its workers are being made
	RoleReady      RoleState = "ready"      // every worker has proved that it hears every subject
	RoleRestarting RoleState = "restarting" // workers were lost and are being replaced, by its policy; Restart says which
	RoleStopping   RoleState = "stopping"   // it is being taken down
	RoleFailed     RoleState = "failed"     // a worker failed; Cause says why, and the name is held until it is destroyed
)

var roleSuccessors = map[RoleState][]RoleState{
	RoleStarting:   {RoleReady, RoleStopping, RoleFailed},
	RoleReady:      {RoleRestarting, RoleStopping, RoleFailed},
	RoleRestarting: {RoleReady, RoleStopping, RoleFailed},
	RoleFailed:     {RoleStopping},
}

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

func roleKey(name string) string      { return "role." + name }
func driverKey(session string) string { return "driver." + session }

func decodeRecord(e kv.Entry) (Record, error) {
	var r Record
	err := json.Unmarshal(e.Value, &r)
	if err == nil {
		err = r.check()
	}
	if err != nil {
		return r, bus.Errorf(bus.CodeMalformed, "the registry's record %s cannot be read: %w", e.Key, err)
	}
	return r, nil
}

// check refuses a record, or a handle's part of one, that is not of a role.
func (r Record) check() error {
	if err := r.Address().Check(); err != nil {
		return err
	}
	if r.World > maxWorld {
		return bus.Errorf(bus.CodeMalformed, "role %s has a world of %d; the most is %d", r.Name, r.World, maxWorld)
	}
	if mesh, err := r.Mesh.Resolve(r.World); err != nil || mesh != r.Mesh {
		return bus.Errorf(bus.CodeMalformed, "role %s has a world of %d and the mesh %s", r.Name, r.World, r.Mesh)
	}
	return nil
}

// get returns a role's record; an unknown role is an error that names those that exist.
func (g registry) get(ctx context.Context, name string) (Record, error) {
	r, _, err := g.read(ctx, name)
	if errors.Is(err, bus.ErrNotFound) {
		return Record{}, g.unknown(ctx, name)
	}
	return r, err
}

// read returns a role's record and its revision.
func (g registry) read(ctx context.Context, name string) (Record, uint64, error) {
	e, err := g.kv.Get(ctx, g.key(roleKey(name)))
	if err != nil {
		return Record{}, 0, err
	}
	r, err := decodeRecord(e)
	return r, e.Revision, err
}

func (g registry) unknown(ctx context.Context, name string) error {
	there := "there is none"
	if all, _ := g.list(ctx); len(all) > 0 { // what can be read helps already
		names := make([]string, len(all))
		for i, r := range all {
			names[i] = r.Name
		}
		there = "there are " + strings.Join(names, ", ")
	}
	return bus.Errorf(bus.CodeNotFound, "no role %q in this namespace; %s", name, there)
}

// list returns the roles by name. Records that cannot be read are an error beside the others.
func (g registry) list(ctx context.Context) ([]Record, error) {
	entries, err := g.kv.List(ctx, g.key("role"))
	if err != nil {
		return nil, err
	}
	out := make([]Record, 0, len(entries))
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

// create writes the record of a new role. A name that is taken is ErrExists.
func (g registry) create(ctx context.Context, r Record) error {
	value, err := encodeRecord(r)
	if err == nil {
		_, err = g.kv.Create(ctx, g.key(roleKey(r.Name)), value)
	}
	return err
}

func encodeRecord(r Record) ([]byte, error) {
	value, err := json.Marshal(r)
	if err != nil {
		return nil, bus.Errorf(bus.CodeInternal, "encode the record of %s: %w", r.Name, err)
	}
	return value, nil
}

// alive reports whether a driver's lease is there. Doubt counts for the driver.
func (g registry) alive(ctx context.Context, session string) bool {
	_, err := g.leases.Get(ctx, g.key(driverKey(session)))
	return !errors.Is(err, bus.ErrNotFound)
}

// step takes one incarnation of a role to another state and returns its record. Several may be at it; a step that the
// diagram does not have is ErrConflict, and a role that is gone ErrNotFound.
func (g registry) step(ctx context.Context, r Record, to RoleState, cause string) (Record, error) {
	for {
		held, rev, err := g.read(ctx, r.Name)
		if err != nil {
			return r, err
		}
		if held.Incarnation != r.Incarnation {
			return r, bus.Errorf(bus.CodeNotFound, "this role %s has ended; there is another", r.Name)
		}
		if !slices.Contains(roleSuccessors[held.State], to) {
			return held, bus.Errorf(bus.CodeConflict, "role %s is %s and does not become %s", r.Name, held.State, to)
		}
		held.State, held.Since, held.Cause = to, time.Now().UTC(), cmp.Or(cause, held.Cause)
		value, err := encodeRecord(held)
		if err != nil {
			return r, err
		}
		if _, err = g.kv.Update(ctx, g.key(roleKey(r.Name)), value, rev); !errors.Is(err, bus.ErrConflict) {
			return held, err
		}
	}
}

// edit changes what one incarnation's record says beside its state. Of a role that is being taken down, or has failed, it
// is ErrConflict: whoever ends it has read what there is to end.
func (g registry) edit(ctx context.Context, r Record, change func(*Record)) (Record, error) {
	for {
		held, rev, err := g.read(ctx, r.Name)
		if err == nil && held.Incarnation != r.Incarnation {
			err = bus.Errorf(bus.CodeNotFound, "this role %s has ended; there is another", r.Name)
		}
		if err == nil && (held.State == RoleStopping || held.State == RoleFailed) {
			err = bus.Errorf(bus.CodeConflict, "role %s is %s since %s", r.Name, held.State, held.Since.Format(time.RFC3339))
		}
		if err != nil {
			return r, err
		}
		change(&held)
		value, err := encodeRecord(held)
		if err != nil {
			return r, err
		}
		if _, err = g.kv.Update(ctx, g.key(roleKey(r.Name)), value, rev); !errors.Is(err, bus.ErrConflict) {
			return held, err
		}
	}
}

// remove deletes the record of one incarnation. Somebody else's, or none, is left as it is.
func (g registry) remove(ctx context.Context, r Record) error {
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

// TakenError is a role name that somebody holds. It matches bus.ErrExists.
type TakenError struct{ Record Record }

func (e *TakenError) Error() string {
	r := e.Record
	words := fmt.Sprintf("role %s exists already: it is %s since %s, held by %s", r.Name, r.State, r.Since.Format(time.RFC3339), r.By)
	switch r.State {
	case RoleFailed:
		return words + ", and failed: " + r.Cause + "; destroy it first, or choose another name"
	case RoleStopping:
		return words + "; try again when it is gone, or choose another name"
	}
	return words + "; attach to it, or choose another name"
}

func (e *TakenError) Unwrap() error { return bus.Errorf(bus.CodeExists, "%s", e.Error()) }
