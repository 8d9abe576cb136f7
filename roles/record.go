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

// RoleRecord is the registry entry of a role: the key <namespace>.role.<name>. It is JSON, so that an operator can read it
// with any tool.
type RoleRecord struct {
	Namespace   string              `json:"namespace"`
	Name        string              `json:"name"`
	Incarnation string              `json:"incarnation"`
	Class       string              `json:"class"`
	World       int                 `json:"world"`
	Mesh        dispatch.Mesh       `json:"mesh"`
	Ordered     bool                `json:"ordered,omitempty"`
	Detached    bool                `json:"detached,omitempty"`
	Open        bool                `json:"open,omitempty"` // methods outside the table may be called
	Methods     []actors.MethodInfo `json:"methods"`
	// DeviceTensors: arguments may be tensors that stay on their device
	DeviceTensors bool          `json:"device_tensors,omitempty"`
	State         RoleState     `json:"state"`
	Since         time.Time     `json:"since"`         // of the state, by the writer's clock
	Owner         string        `json:"owner"`         // session of the driver or worker with which the role ends
	By            string        `json:"by"`            // the driver, for display
	Lease         time.Duration `json:"lease"`         // of the driver: how long the server must be reachable before a missing lease counts
	Run           string        `json:"run,omitempty"` // session of the run's driver, if a worker created the role; empty: Owner
	Cause         string        `json:"cause,omitempty"`

	// Process says that the workers are processes on nodes; the following fields belong to them.
	Process      bool             `json:"process,omitempty"`
	Placements   []RankPlacement  `json:"seats,omitempty"`  // by rank
	Reservations []ReservationRef `json:"held,omitempty"`   // reservations of the workers
	Master       string           `json:"master,omitempty"` // address of rank 0: HOST:PORT
	Policy       Policy           `json:"policy,omitempty"`
	Generations  uint32           `json:"gens,omitempty"` // generations of workers after the first

	Restarts   int              `json:"restarts,omitempty"`    // restarts so far
	Restart    *Restart         `json:"restart,omitempty"`     // the restart in progress
	Replaced   []ReplacedWorker `json:"former,omitempty"`      // replaced workers that are not known to have exited
	DriverOnly string           `json:"only_driver,omitempty"` // why the head cannot restart the workers; empty: it can
}

// RoleState is the state of a role.
//
// \tstarting ──► ready ◄──► restarting
// \t    │          │            │
// \t    │          ├────────────┤
// \t    │          ▼            ▼
// \t    ├──────► failed ──► stopping ──► (no record)
// \t    └───────────────────────▲
//
// Ready and restarting also become stopping without a failure.
type RoleState string

const (
	RoleStarting   RoleState = "starting"   // workers are being started
	RoleReady      RoleState = "ready"      // every worker has answered on every subject
	RoleRestarting RoleState = "restarting" // lost workers are being replaced; see Restart
	RoleStopping   RoleState = "stopping"   // the role is being destroyed
	RoleFailed     RoleState = "failed"     // a worker failed, see Cause; the name is taken until the role is destroyed
)

var roleSuccessors = map[RoleState][]RoleState{
	RoleStarting:   {RoleReady, RoleStopping, RoleFailed},
	RoleReady:      {RoleRestarting, RoleStopping, RoleFailed},
	RoleRestarting: {RoleReady, RoleStopping, RoleFailed},
	RoleFailed:     {RoleStopping},
}

// Address is the address of the role on the bus.
func (r RoleRecord) Address() bus.Address {
	return bus.Address{Namespace: r.Namespace, Role: r.Name, Incarnation: r.Incarnation}
}

// method is the declaration of a method.
func (r RoleRecord) method(name string) (actors.MethodInfo, error) {
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

func decodeRecord(e kv.Entry) (RoleRecord, error) {
	var r RoleRecord
	err := json.Unmarshal(e.Value, &r)
	if err == nil {
		err = r.check()
	}
	if err != nil {
		return r, bus.Errorf(bus.CodeMalformed, "the registry entry %s is malformed: %w", e.Key, err)
	}
	return r, nil
}

// check refuses an invalid record, or part of one in a handle.
func (r RoleRecord) check() error {
	if err := r.Address().Check(); err != nil {
		return err
	}
	if r.World > maxWorld {
		return bus.Errorf(bus.CodeMalformed, "role %s has world %d; the maximum is %d", r.Name, r.World, maxWorld)
	}
	if mesh, err := r.Mesh.Resolve(r.World); err != nil || mesh != r.Mesh {
		return bus.Errorf(bus.CodeMalformed, "role %s has world %d and mesh %s, which do not match", r.Name, r.World, r.Mesh)
	}
	return nil
}

// get returns a role's record; the error of an unknown role lists the existing ones.
func (g registry) get(ctx context.Context, name string) (RoleRecord, error) {
	r, _, err := g.read(ctx, name)
	if errors.Is(err, bus.ErrNotFound) {
		return RoleRecord{}, g.unknown(ctx, name)
	}
	return r, err
}

// read returns a role's record and its revision.
func (g registry) read(ctx context.Context, name string) (RoleRecord, uint64, error) {
	e, err := g.kv.Get(ctx, g.key(roleKey(name)))
	if err != nil {
		return RoleRecord{}, 0, err
	}
	r, err := decodeRecord(e)
	return r, e.Revision, err
}

func (g registry) unknown(ctx context.Context, name string) error {
	there := "there is none"
	if all, _ := g.list(ctx); len(all) > 0 { // a partial list helps
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
func (g registry) namespacesOf(ctx context.Context, role string) (names []string) {
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

// list returns the roles by name. Malformed records are an error beside the others.
func (g registry) list(ctx context.Context) ([]RoleRecord, error) {
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

// create writes the record of a new role. The error of a taken name is ErrExists.
func (g registry) create(ctx context.Context, r RoleRecord) error {
	value, err := encodeRecord(r)
	if err == nil {
		_, err = g.kv.Create(ctx, g.key(roleKey(r.Name)), value)
	}
	return err
}

func encodeRecord(r RoleRecord) ([]byte, error) {
	value, err := json.Marshal(r)
	if err != nil {
		return nil, bus.Errorf(bus.CodeInternal, "encode the record of %s: %w", r.Name, err)
	}
	return value, nil
}

// alive reports whether a driver's lease exists; true if unknown.
func (g registry) alive(ctx context.Context, session string) bool {
	_, err := g.leases.Get(ctx, g.key(driverKey(session)))
	return !errors.Is(err, bus.ErrNotFound)
}

// step changes the state of one incarnation of a role and returns its record. Several processes may do so; a transition
// that the diagram does not have is ErrConflict, and an ended role ErrNotFound.
func (g registry) step(ctx context.Context, r RoleRecord, to RoleState, cause string) (RoleRecord, error) {
	for {
		held, rev, err := g.read(ctx, r.Name)
		if err != nil {
			return r, err
		}
		if held.Incarnation != r.Incarnation {
			return r, bus.Errorf(bus.CodeNotFound, "this incarnation of role %s has ended; there is another", r.Name)
		}
		if !slices.Contains(roleSuccessors[held.State], to) {
			return held, bus.Errorf(bus.CodeConflict, "role %s is %s and cannot become %s", r.Name, held.State, to)
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

// edit changes one incarnation's record except its state. For a stopping or failed role it is ErrConflict: the process
// that ends it has read what to end.
func (g registry) edit(ctx context.Context, r RoleRecord, change func(*RoleRecord)) (RoleRecord, error) {
	for {
		held, rev, err := g.read(ctx, r.Name)
		if err == nil && held.Incarnation != r.Incarnation {
			err = bus.Errorf(bus.CodeNotFound, "this incarnation of role %s has ended; there is another", r.Name)
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

// remove deletes the record of one incarnation. Another incarnation, or none, is no error.
func (g registry) remove(ctx context.Context, r RoleRecord) error {
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

// TakenError is the error of a role name that is taken. It matches bus.ErrExists.
type TakenError struct{ Record RoleRecord }

func (e *TakenError) Error() string {
	r := e.Record
	words := fmt.Sprintf("role %s exists already: it is %s since %s, owned by %s", r.Name, r.State, r.Since.Format(time.RFC3339), r.By)
	remove := fmt.Sprintf("remove it with `troupe destroy %s --namespace %s`", r.Name, r.Namespace)
	switch r.State {
	case RoleFailed:
		return words + ", and failed: " + r.Cause + "; " + remove + ", or choose another name"
	case RoleStopping:
		return words + "; try again when it is gone, " + remove + " if its end was interrupted, or choose another name"
	}
	return words + "; attach to it, " + remove + ", or choose another name"
}

func (e *TakenError) Unwrap() error { return bus.Errorf(bus.CodeExists, "%s", e.Error()) }
