package roles

import (
	"context"
	"errors"
	"sync"

	"troupe/bus"
	"troupe/roles/registry"
)

// recordBook is the record of a role as this process last read or wrote it.
type recordBook struct {
	rt *Runtime
	to bus.Address

	claims func() bool // this process speaks for the role, also if its record is missing

	mu  sync.Mutex // guards what follows
	rec registry.RoleRecord
}

// get is the record.
func (b *recordBook) get() registry.RoleRecord {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.rec
}

// step changes the role's state in the registry.
func (b *recordBook) step(ctx context.Context, to registry.RoleState, cause string) error {
	reg, err := b.rt.registry(ctx)
	if err != nil {
		return err
	}
	rec, err := reg.Step(ctx, b.get(), to, cause)
	if err == nil {
		b.setRecord(rec)
	}
	return err
}

// edit changes the role's record.
func (b *recordBook) edit(ctx context.Context, change func(*registry.RoleRecord)) error {
	reg, err := b.rt.registry(ctx)
	if err != nil {
		return err
	}
	rec, err := reg.Edit(ctx, b.get(), change)
	if err == nil {
		b.setRecord(rec)
	}
	return err
}

// alter changes the role's record, in any state.
func (b *recordBook) alter(ctx context.Context, change func(*registry.RoleRecord) error) error {
	reg, err := b.rt.registry(ctx)
	if err != nil {
		return err
	}
	rec, err := reg.Alter(ctx, b.get(), change)
	if err == nil {
		b.setRecord(rec)
	}
	return err
}

func (b *recordBook) setRecord(rec registry.RoleRecord) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rec = rec
}

// readRecord reads the record. That of a role that is being destroyed is not found.
func (b *recordBook) readRecord() (registry.RoleRecord, error) {
	ctx, cancel := context.WithTimeout(b.rt.ctx, registryTimeout)
	defer cancel()
	reg, err := b.rt.registry(ctx)
	if err != nil {
		return registry.RoleRecord{}, err
	}
	rec, err := reg.Read(ctx, b.to.Role)
	if err == nil && (rec.Incarnation != b.to.Incarnation || rec.State == registry.RoleStopping) {
		err = bus.ErrNotFound
	}
	if errors.Is(err, bus.ErrNotFound) && b.rt.unclaimed.Load() && b.claims() { // the registry may have lost it: no evidence of its end
		err = bus.Errorf(bus.CodeUnavailable, "role %s is not claimed yet", b.to.Role)
	}
	return rec, err
}

// alterRestart changes the record while this process restarts the role.
func (b *recordBook) alterRestart(ctx context.Context, change func(*registry.RoleRecord)) error {
	gen := b.get().Restart.Gen
	return b.alter(ctx, func(r *registry.RoleRecord) error {
		if r.State != registry.RoleRestarting || r.Restart == nil || r.Restart.Gen != gen {
			return errSuperseded
		}
		change(r)
		return nil
	})
}
