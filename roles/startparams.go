package roles

import (
	"context"
	"errors"
	"fmt"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
	"troupe/nodes"
	"troupe/placement"
	"troupe/roles/registry"
)

// startParams is the start parameters of a role's workers. If the role's policy restarts workers, it is stored beside the
// role's record, so that the head can restart them when the driver cannot. It contains the workers' environment, which
// may have secrets: readers need the same credentials as for launch messages, and it is never printed.
type startParams struct {
	Incarnation    string              `msgpack:"incarnation"`
	Program        nodes.Program       `msgpack:"program"`
	RankEnv        []map[string]string `msgpack:"rank_env,omitempty"`
	LateRendezvous bool                `msgpack:"late_rendezvous,omitempty"`
	Config         wire.Raw            `msgpack:"config"`
	QueueLimit     int                 `msgpack:"queue_limit,omitempty"`
	PanicFails     bool                `msgpack:"panic_fails,omitempty"`
	Needs          placement.Request   `msgpack:"needs"`
	Over           string              `msgpack:"over,omitempty"`
	Private        bool                `msgpack:"private,omitempty"` // see Assignment
	PlaceTimeout   time.Duration       `msgpack:"place_timeout"`
	StartTimeout   time.Duration       `msgpack:"start_timeout"`
	Restarts       int                 `msgpack:"restarts"`
	Spares         int                 `msgpack:"spares,omitempty"`
	MinReplicas    int                 `msgpack:"min_replicas,omitempty"`
	Backoff        time.Duration       `msgpack:"backoff"`
	MaxBackoff     time.Duration       `msgpack:"max_backoff"`
}

// restartProcess is the part of a Process that restarts need.
func (r *startParams) restartProcess() *Process {
	return &Process{
		Needs: r.Needs, Over: r.Over, PlaceTimeout: r.PlaceTimeout, Restarts: r.Restarts, Backoff: r.Backoff, MaxBackoff: r.MaxBackoff,
		LateRendezvous: r.LateRendezvous, RankEnv: r.RankEnv,
	}
}

// storeStartParams stores the start parameters, here and, if the role's policy restarts workers, in the registry. If they are
// too large for the registry only the driver can restart workers, which the record says.
func (w *workforce) storeStartParams(ctx context.Context, config wire.Raw) error {
	p, rec := w.c.spec.Process, w.c.Record()
	w.mu.Lock()
	w.startParams = &startParams{
		Incarnation: rec.Incarnation, Program: w.program, RankEnv: p.RankEnv, LateRendezvous: p.LateRendezvous, Config: config, QueueLimit: w.c.spec.QueueLimit,
		Private: w.c.rt.cfg.Private || w.c.rt.bus.Embedded(), PanicFails: w.c.spec.PanicFails, Needs: p.Needs, Over: p.Over, PlaceTimeout: p.PlaceTimeout, StartTimeout: w.c.spec.StartTimeout,
		Restarts: p.Restarts, Backoff: p.Backoff, MaxBackoff: p.MaxBackoff, Spares: p.Spares, MinReplicas: p.MinReplicas,
	}
	w.mu.Unlock()
	return w.putStartParams(ctx)
}

// putStartParams stores the start parameters of a role whose policy restarts workers in the registry.
func (w *workforce) putStartParams(ctx context.Context) error {
	w.mu.Lock()
	r, rec := w.startParams, w.c.Record()
	w.mu.Unlock()
	if r == nil || !rec.ReplacesWorkers() || rec.DriverOnly != "" {
		return nil
	}
	value, err := wire.Marshal(r)
	if err != nil {
		return bus.Errorf(bus.CodeInternal, "role %s: encode the start parameters of its workers: %w", w.c.Name(), err)
	}
	if len(value) > registry.MaxValue {
		why := fmt.Sprintf("the start parameters of its workers have %d KiB, and the registry takes %d KiB; reduce its configuration or environment", len(value)>>10, registry.MaxValue>>10)
		return w.c.record.edit(ctx, func(r *registry.RoleRecord) { r.DriverOnly = why })
	}
	reg, err := w.c.rt.registry(ctx)
	if err != nil {
		return err
	}
	return reg.PutStartParams(ctx, rec.Name, value)
}

// loadStartParams is the start parameters; those of a role created elsewhere are read from the registry.
func (w *workforce) loadStartParams(ctx context.Context, rec registry.RoleRecord) (*startParams, error) {
	w.mu.Lock()
	r := w.startParams
	w.mu.Unlock()
	if r != nil {
		return r, nil
	}
	if rec.DriverOnly != "" {
		return nil, bus.Errorf(bus.CodeRefused, "only its driver can restart it: %s", rec.DriverOnly)
	}
	reg, err := w.c.rt.registry(ctx)
	if err != nil {
		return nil, err
	}
	value, err := reg.StartParams(ctx, rec.Name)
	if errors.Is(err, bus.ErrNotFound) {
		return nil, bus.Errorf(bus.CodeRefused, "only its driver can restart it: the registry does not have the start parameters of its workers")
	}
	if err != nil {
		return nil, err
	}
	r = &startParams{}
	if err := wire.Unmarshal(value, r); err != nil || r.Incarnation != rec.Incarnation {
		return nil, bus.Errorf(bus.CodeRefused, "only its driver can restart it: the start parameters of its workers in the registry are malformed (%v)", err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.startParams, w.program = r, r.Program
	return r, nil
}
