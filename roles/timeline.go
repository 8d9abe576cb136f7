package roles

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"io"
	"slices"
	"strings"
	"time"

	"troupe/actors/timeline"
	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/recorder"
	"troupe/bus/stream"
	"troupe/bus/wire"
	"troupe/roles/registry"
)

const (
	timelineBucket = "troupe_timelines"
	timelineLife   = 7 * 24 * time.Hour
	timelinesMost  = 256 << 20 // bytes of all stored timelines
	timelineMost   = 4 << 20   // bytes of one
	timelineEvents = 50_000    // events of one
	timelineUnzip  = 256 << 20 // bytes of one that is read back

	timelineLast = 24 * time.Hour // how far back a recorder is asked to go

	failureLast = 30 * time.Second       // how far back the timeline of a failure goes
	failureWait = 250 * time.Millisecond // wait for the workers of a failing role, for their clocks and then for their records
)

// TimelineQuery selects the roles of a timeline.
type TimelineQuery struct {
	Namespace string
	Roles     []string
	Last      time.Duration // zero: a minute
	Wait      time.Duration // for each request; zero: two seconds
}

// Timeline merges the flight recorders of roles, and of the processes that call them. The error of an unknown role lists the existing
// ones; that of a failed role names the remedy.
func Timeline(ctx context.Context, b *bus.Bus, q TimelineQuery) (*timeline.Timeline, error) {
	reg, err := registry.Open(ctx, b, q.Namespace)
	if err != nil {
		return nil, err
	}
	cfg := timeline.Config{Last: q.Last, Wait: q.Wait}
	for _, name := range q.Roles {
		rec, err := reg.Get(ctx, name)
		if err != nil {
			return nil, err
		}
		if rec.State == registry.RoleFailed {
			return nil, bus.Errorf(bus.CodeRefused, "role %s failed at %s and its workers have ended; `troupe timeline %s --failure` shows what they did before", name, rec.Since.Format(time.RFC3339), name)
		}
		cfg.Roles = append(cfg.Roles, timelineRole(rec))
	}
	if cfg.Endpoint, err = calls.Open(b, q.Namespace); err != nil {
		return nil, err
	}
	defer cfg.Endpoint.Close()
	return timeline.Collect(ctx, cfg)
}

// Timeline merges the flight recorders of all roles of the namespace whose workers run, as far back as they go.
func (rt *Runtime) Timeline(ctx context.Context) (*timeline.Timeline, error) {
	all, err := rt.Roles(ctx)
	if err != nil {
		return nil, err
	}
	cfg := timeline.Config{Endpoint: rt.ep, Last: timelineLast}
	for _, rec := range all {
		if rec.State == registry.RoleReady {
			cfg.Roles = append(cfg.Roles, timelineRole(rec))
		}
	}
	return timeline.Collect(ctx, cfg)
}

// timelineRole is a role whose workers are asked.
func timelineRole(rec registry.RoleRecord) timeline.Role {
	out := timeline.Role{Address: rec.Address(), World: rec.World, Gens: map[int]uint32{}}
	for rank, placed := range rec.Placements {
		if placed.Gen != 0 && rank < rec.World {
			out.Gens[rank] = placed.Gen
		}
	}
	return out
}

func timelineStore() stream.ObjectStoreConfig {
	return stream.ObjectStoreConfig{Name: timelineBucket, MaxAge: timelineLife, MaxBytes: timelinesMost}
}

func openTimelines(ctx context.Context, b *bus.Bus) (*stream.ObjectStore, error) {
	return stream.OpenObjectStore(ctx, b, timelineStore())
}

// TeamObjects is the store of timelines for processes with a team's credential: those of the roles of their namespace.
func TeamObjects() stream.SharedObjects {
	return stream.SharedObjects{Config: timelineStore(), CheckFunc: func(namespace, object string) (sum string, err error) {
		role, own := strings.CutPrefix(object, timelineName(namespace, ""))
		if !own || bus.CheckRoleName(role) != nil {
			return "", bus.Errorf(bus.CodeRefused, "the credential of namespace %s does not permit the timeline %q", namespace, wire.Clip(object))
		}
		return "", nil
	}}
}

func timelineName(namespace, role string) string { return namespace + "." + role }

// FailureTimeline is what the workers of a role did before its last failure, stored for a week. The error is bus.ErrNotFound when
// nothing is stored.
func FailureTimeline(ctx context.Context, b *bus.Bus, namespace, role string) (*timeline.Timeline, error) {
	store, err := openTimelines(ctx, b)
	if err != nil {
		return nil, err
	}
	size, err := store.Size(ctx, timelineName(namespace, role))
	if err == nil && size > timelineMost {
		err = bus.Errorf(bus.CodeMalformed, "it has %d bytes, and at most %d are expected", size, timelineMost)
	}
	var data []byte
	if err == nil {
		data, err = store.Get(ctx, timelineName(namespace, role))
	}
	if err != nil {
		return nil, bus.Errorf(bus.CodeOf(err), "no timeline of a failure of role %s is stored in namespace %s: %w", role, namespace, err)
	}
	var t timeline.Timeline
	zip, err := gzip.NewReader(bytes.NewReader(data))
	if err == nil {
		err = json.NewDecoder(io.LimitReader(zip, timelineUnzip)).Decode(&t)
	}
	if err != nil {
		return nil, bus.Errorf(bus.CodeMalformed, "the stored timeline of role %s: %w", role, err)
	}
	return &t, nil
}

// storeFailureTimeline stores what the remaining workers of a failing role have recorded. It takes at most a fraction of a second
// and must end before the workers are stopped.
func (e *ender) storeFailureTimeline(ctx context.Context, why error) {
	if !recorder.On() {
		return
	}
	role := timelineRole(e.c.Record())
	left, _ := e.c.life.notOver(e.c.Record().AllRanks())
	role.Ranks = append([]int{}, left...) // not nil, which means all
	t, err := timeline.Collect(ctx, timeline.Config{
		Endpoint: e.c.rt.ep, Roles: []timeline.Role{role}, Last: failureLast, Wait: failureWait, RoundTrips: 1, MaxBytes: timelineMost,
	})
	if err != nil {
		e.c.rt.log.Debug("roles: the timeline of a failure is not collected", "role", e.c.Name(), "error", err)
		return
	}
	t.Failure = why.Error()
	for _, rank := range e.c.Record().AllRanks() {
		if !slices.Contains(left, rank) {
			t.Silent = append(t.Silent, timeline.Silent{Role: e.c.Name(), Rank: rank, Error: e.c.life.lossOf(rank).Error()})
		}
	}
	e.c.rt.spawn(func() { e.writeTimeline(t) }) // the workers may stop meanwhile
}

func (e *ender) writeTimeline(t *timeline.Timeline) {
	ctx, cancel := context.WithTimeout(e.c.rt.ctx, closeTimeout)
	defer cancel()
	data, err := zipTimeline(t)
	var store *stream.ObjectStore
	if err == nil {
		store, err = openTimelines(ctx, e.c.rt.bus)
	}
	if err == nil {
		err = store.Put(ctx, timelineName(e.c.to.Namespace, e.c.to.Role), data)
	}
	if err != nil {
		e.c.rt.log.Debug("roles: the timeline of a failure is not stored", "role", e.c.Name(), "error", err)
	}
}

// zipTimeline encodes a timeline, with fewer events if it would be too long.
func zipTimeline(t *timeline.Timeline) ([]byte, error) {
	for most := timelineEvents; ; most /= 2 {
		t.Trim(max(most, 1))
		var out bytes.Buffer
		zip := gzip.NewWriter(&out)
		if err := json.NewEncoder(zip).Encode(t); err != nil {
			return nil, err
		}
		if err := zip.Close(); err != nil {
			return nil, err
		}
		if out.Len() <= timelineMost || most <= 1 {
			return out.Bytes(), nil
		}
	}
}

// recordRestart records a restart that this process carries out. The result ends it.
func (m *recovery) recordRestart(r *registry.Restart) (end func(err error)) {
	began := recorder.Now()
	return func(err error) {
		rank := -1
		if len(r.Ranks) == 1 {
			rank = r.Ranks[0]
		}
		recorder.Add(&recorder.Record{
			Kind: recorder.Restart, Rank: -1, ToRank: int32(rank), Begin: began, End: recorder.Now(), Failed: err != nil,
			Namespace: m.c.to.Namespace, Name: r.Why, To: m.c.to.Role,
		})
	}
}
