package actors

import (
	"cmp"
	"context"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
)

// The built-in verbs. They are called like methods, on the control subjects; their names begin with @, which no method
// of a class may. Those that change the object are serial, like the work they must not run beside.
const (
	VerbHealth    = "@health"    // nil → Health
	VerbInfo      = "@info"      // nil → Info
	VerbProbe     = "@probe"     // nil → nil: this subject is heard
	VerbConfigure = "@configure" // any value → nil
	VerbSetEnv    = "@set_env"   // map of strings → nil
	VerbCreate    = "@create"    // CreateRequest → nil
	VerbJoin      = "@join"      // Slice → nil: listen to one more slice
	VerbStop      = "@stop"      // StopRequest → nil: end the worker
)

type verb struct {
	lane Lane
	do   func(w *Worker, ctx context.Context, body []byte) ([]byte, error)
}

// verbs is filled in init, because the verbs refer to the workers that look them up.
var verbs map[string]verb

func init() {
	verbs = map[string]verb{
		VerbHealth:    {Control, verbOf((*Worker).health)},
		VerbInfo:      {Control, verbOf((*Worker).info)},
		VerbProbe:     {Control, verbOf(func(*Worker, context.Context, None) (None, error) { return None{}, nil })},
		VerbJoin:      {Control, verbOf((*Worker).join)},
		VerbStop:      {Control, verbOf((*Worker).stopVerb)},
		VerbConfigure: {Serial, verbOf((*Worker).configure)},
		VerbSetEnv:    {Serial, verbOf((*Worker).setEnv)},
		VerbCreate:    {Serial, verbOf((*Worker).createVerb)},
	}
}

func verbOf[A, R any](f func(*Worker, context.Context, A) (R, error)) func(*Worker, context.Context, []byte) ([]byte, error) {
	return func(w *Worker, ctx context.Context, body []byte) ([]byte, error) {
		var arg A
		if err := decodeArgs(body, &arg); err != nil {
			return nil, err
		}
		result, err := f(w, ctx, arg)
		if err != nil {
			return nil, err
		}
		return wire.Marshal(result)
	}
}

// isQuiet tells the verbs that only ask from what keeps a worker busy.
func isQuiet(method string) bool {
	v, ok := verbs[method]
	return ok && v.lane == Control
}

func verbInfo(name string) (MethodInfo, bool) {
	v, ok := verbs[name]
	return MethodInfo{Name: name, Lane: v.lane}, ok
}

// Health is the answer to the health verb.
type Health struct {
	State State         `msgpack:"state" json:"state"`
	Since time.Duration `msgpack:"since" json:"since"` // how long it has been in that state
	Busy  time.Duration `msgpack:"busy" json:"busy"`   // how long its oldest call has been running; 0: idle
	Error string        `msgpack:"error,omitempty" json:"error,omitempty"`
}

const maxListed = 100 // calls that wait in one lane and are listed one by one

// Info is the answer to the info verb.
type Info struct {
	Role    string      `msgpack:"role" json:"role"`
	Class   string      `msgpack:"class" json:"class"`
	Rank    int         `msgpack:"rank" json:"rank"`
	World   int         `msgpack:"world" json:"world"`
	Gen     uint32      `msgpack:"gen" json:"gen"`
	Node    string      `msgpack:"node" json:"node"`
	PID     int         `msgpack:"pid" json:"pid"`
	Wire    int         `msgpack:"wire" json:"wire"`       // major version of the wire
	Runtime string      `msgpack:"runtime" json:"runtime"` // of the language the worker is written in
	State   State       `msgpack:"state" json:"state"`
	Objects []string    `msgpack:"objects" json:"objects"`
	Lanes   []LaneInfo  `msgpack:"lanes" json:"lanes"`
	Calls   []CallState `msgpack:"calls" json:"calls"` // in flight, oldest first; of those that wait the first 100 of each lane
	// Methods are the class's own, and Open says that there may be more: what a driver needs that does not know the class.
	Methods []MethodInfo `msgpack:"methods" json:"methods"`
	Open    bool         `msgpack:"open,omitempty" json:"open,omitempty"`
}

// LaneInfo is how full a lane is.
type LaneInfo struct {
	Lane
	Queued  int `msgpack:"queued" json:"queued"`
	Running int `msgpack:"running" json:"running"`
}

// CallState is one call in flight.
type CallState struct {
	Method    string        `msgpack:"method" json:"method"`
	Caller    string        `msgpack:"caller" json:"caller"`
	Running   bool          `msgpack:"running" json:"running"`
	For       time.Duration `msgpack:"for" json:"for"`             // how long it has been running, or waiting
	Cancelled bool          `msgpack:"cancelled" json:"cancelled"` // it was told to end, or its time is up, and it has not noticed
}

// CreateRequest asks for another object in the worker.
type CreateRequest struct {
	Name   string   `msgpack:"name"`
	Class  string   `msgpack:"class"`
	Config wire.Raw `msgpack:"config"`
}

// StopRequest ends a worker. What runs may finish within Grace.
type StopRequest struct {
	Grace time.Duration `msgpack:"grace"`
}

func (w *Worker) health(context.Context, None) (Health, error) {
	b := w.beatNow()
	w.mu.Lock()
	defer w.mu.Unlock()
	out := Health{State: b.State, Since: time.Since(w.since), Busy: b.Busy}
	if w.err != nil {
		out.Error = w.err.Error()
	}
	return out, nil
}

func (w *Worker) info(context.Context, None) (Info, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	info := Info{
		Role: w.spec.Address.Role, Class: w.class.Name, Rank: w.spec.Rank, World: w.spec.World, Gen: w.spec.Gen,
		Node: w.host.cfg.Node, PID: os.Getpid(), Wire: wire.Major, Runtime: runtime.Version(), State: w.state,
		Objects: slices.Sorted(maps.Keys(w.objects)), Lanes: []LaneInfo{}, Calls: []CallState{},
		Methods: w.class.Methods, Open: w.class.Open,
	}
	calls := slices.Clone(w.active)
	for _, q := range w.queues {
		info.Lanes = append(info.Lanes, LaneInfo{Lane: q.lane, Queued: q.waiting.len(), Running: q.running})
		calls = append(calls, q.waiting.all()[:min(q.waiting.len(), maxListed)]...)
	}
	slices.SortFunc(info.Lanes, func(a, b LaneInfo) int { return cmp.Or(cmp.Compare(a.Name, b.Name), a.Limit-b.Limit) })
	slices.SortFunc(calls, func(a, b *call) int { return cmp.Compare(a.arrived, b.arrived) })
	for _, c := range calls {
		if !isQuiet(c.header.Method) {
			info.Calls = append(info.Calls, c.stateNow())
		}
	}
	return info, nil
}

func (c *call) stateNow() CallState {
	since := c.arrived
	if c.phase == running {
		since = c.started
	}
	return CallState{Method: c.header.Method, Caller: strings.ToValidUTF8(c.header.Caller, "\uFFFD"), Running: c.phase == running, For: time.Since(since.time()), Cancelled: c.ctx != nil && c.ctx.Err() != nil}
}

func (w *Worker) configure(ctx context.Context, config wire.Raw) (None, error) {
	name := ctx.Value(callKey{}).(*callContext).call.header.Object
	w.mu.Lock()
	obj, class := w.objects[name], w.classes[name]
	w.mu.Unlock()
	if class == nil {
		return None{}, noObject(name)
	}
	c, ok := obj.(Configurer)
	if !ok {
		return None{}, bus.Errorf(bus.CodeRefused, "class %s takes no configuration after its start", class.Name)
	}
	return None{}, c.Configure(ctx, config)
}

func noObject(name string) error {
	return bus.Errorf(bus.CodeNotFound, "no object %q in this worker; make it with the create verb", name)
}

func (w *Worker) setEnv(ctx context.Context, env map[string]string) (None, error) {
	for name := range env {
		if name == "" || strings.ContainsAny(name, "=\x00") {
			return None{}, bus.Errorf(bus.CodeRefused, "%q is no name of a variable", name)
		}
	}
	w.mu.Lock()
	maps.Copy(w.env, env)
	obj := w.objects[""]
	w.mu.Unlock()
	if w.host.cfg.OwnProcess {
		for k, v := range env {
			if err := os.Setenv(k, v); err != nil {
				return None{}, bus.Errorf(bus.CodeRefused, "set %s: %w", k, err)
			}
		}
	}
	if s, ok := obj.(EnvSetter); ok {
		return None{}, s.SetEnv(ctx, env)
	}
	return None{}, nil
}

// Env is a variable that the set_env verb gave the worker, or the process's own.
func (w *Worker) Env(name string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if v, ok := w.env[name]; ok {
		return v
	}
	return os.Getenv(name)
}

func (w *Worker) createVerb(ctx context.Context, r CreateRequest) (None, error) {
	if err := bus.CheckName("object", r.Name); err != nil {
		return None{}, err
	}
	class, err := w.host.Class(r.Class)
	if err != nil {
		return None{}, err
	}
	return None{}, w.create(ctx, r.Name, class, r.Config)
}

func (w *Worker) join(_ context.Context, s Slice) (None, error) {
	if err := s.check(); err != nil {
		return None{}, err
	}
	return None{}, w.host.subscribe(w.spec.Address.Slice(s.Mesh, s.N), w.host.workCh, w)
}

// stopVerb answers when no new call is taken, and then stops: a stopped worker has nobody left to answer.
func (w *Worker) stopVerb(_ context.Context, r StopRequest) (None, error) {
	w.beginStop()
	bus.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), r.Grace)
		defer cancel()
		if err := w.Stop(ctx); err != nil {
			w.host.cfg.Logger.Warn("actors: a worker did not stop in order", "role", w.spec.Address.Role, "rank", w.spec.Rank, "error", err)
		}
	})
	return None{}, nil
}
