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

// The built-in verbs. They are called like methods, on the control subjects; their names begin with @, which method
// names cannot. Verbs that change an object run in the serial lane.
const (
	VerbHealth    = "@health"    // nil → Health
	VerbInfo      = "@info"      // nil → Info
	VerbTimeline  = "@timeline"  // calls.TimelineRequest → recorder.Snapshot: what the flight recorder has of the worker
	VerbProbe     = "@probe"     // nil → nil: proves that the worker listens on the subject
	VerbConfigure = "@configure" // any value → nil
	VerbSetEnv    = "@set_env"   // map of strings → nil
	VerbCreate    = "@create"    // CreateRequest → nil
	VerbJoin      = "@join"      // Slice → nil: subscribe to one more slice
	VerbStop      = "@stop"      // StopRequest → nil: end the worker
)

type verb struct {
	lane Lane
	do   func(w *Worker, ctx context.Context, body []byte) ([]byte, error)
}

// verbs is set in init to avoid an initialisation cycle.
var verbs map[string]verb

func init() {
	verbs = map[string]verb{
		VerbHealth:    {Control, verbOf((*Worker).health)},
		VerbInfo:      {Control, verbOf((*Worker).info)},
		VerbTimeline:  {Control, verbOf((*Worker).timeline)},
		VerbProbe:     {Control, verbOf(func(*Worker, context.Context, None) (None, error) { return None{}, nil })},
		VerbJoin:      {Control, verbOf((*Worker).join)},
		VerbStop:      {Control, verbOf((*Worker).stopVerb)},
		VerbConfigure: {Serial, verbOf((*Worker).configure)},
		VerbSetEnv:    {Serial, verbOf((*Worker).setEnv)},
		VerbCreate:    {Serial, verbOf((*Worker).createObject)},
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

func verbInfo(name string) (MethodInfo, bool) {
	v, ok := verbs[name]
	return MethodInfo{Name: name, Lane: v.lane}, ok
}

// Health is the answer to the health verb.
type Health struct {
	State State         `msgpack:"state" json:"state"`
	Since time.Duration `msgpack:"since" json:"since"` // time since the last change of state
	Busy  time.Duration `msgpack:"busy" json:"busy"`   // running time of the oldest call; 0: idle
	Error string        `msgpack:"error,omitempty" json:"error,omitempty"`
}

const maxListedCalls = 100 // queued calls of one lane that Info lists

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
	Runtime string      `msgpack:"runtime" json:"runtime"` // version of the worker's language runtime
	State   State       `msgpack:"state" json:"state"`
	Objects []string    `msgpack:"objects" json:"objects"`
	Lanes   []LaneInfo  `msgpack:"lanes" json:"lanes"`
	Calls   []CallState `msgpack:"calls" json:"calls"` // running and queued, oldest first; of each lane, and of those that arrived early, at most 100 queued ones
	Done    uint64      `msgpack:"done" json:"done"`   // calls that have ended, without those of the runtime
	// Methods are those of the class; Open says that others are accepted too.
	Methods []MethodInfo `msgpack:"methods" json:"methods"`
	Open    bool         `msgpack:"open,omitempty" json:"open,omitempty"`
	// DeviceTensors: arguments may be tensors that stay on their device.
	DeviceTensors bool `msgpack:"device_tensors,omitempty" json:"device_tensors,omitempty"`
}

// LaneInfo is the load of a lane.
type LaneInfo struct {
	Lane
	Queued  int `msgpack:"queued" json:"queued"`
	Running int `msgpack:"running" json:"running"`
}

// CallState is a running or queued call.
type CallState struct {
	Method    string        `msgpack:"method" json:"method"`
	Caller    string        `msgpack:"caller" json:"caller"`
	Running   bool          `msgpack:"running" json:"running"`
	For       time.Duration `msgpack:"for" json:"for"`             // time since it started, or arrived if it is queued
	Cancelled bool          `msgpack:"cancelled" json:"cancelled"` // cancelled or past its deadline, and still running
}

// CreateRequest creates another object in the worker.
type CreateRequest struct {
	Name   string   `msgpack:"name"`
	Class  string   `msgpack:"class"`
	Config wire.Raw `msgpack:"config"`
}

// StopRequest stops a worker. Running calls may finish within Grace.
type StopRequest struct {
	Grace time.Duration `msgpack:"grace"`
}

func (w *Worker) health(context.Context, None) (Health, error) {
	b := w.heartbeat()
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
		Objects: slices.Sorted(maps.Keys(w.objects)), Lanes: []LaneInfo{}, Calls: []CallState{}, Done: w.stats.done,
		Methods: w.class.Methods, Open: w.class.Open, DeviceTensors: w.class.DeviceTensors,
	}
	calls := slices.Clone(w.active)
	for _, q := range w.queues {
		info.Lanes = append(info.Lanes, LaneInfo{Lane: q.lane, Queued: q.waiting.len(), Running: q.running})
		calls = append(calls, q.waiting.all()[:min(q.waiting.len(), maxListedCalls)]...)
	}
	slices.SortFunc(info.Lanes, func(a, b LaneInfo) int { return cmp.Or(cmp.Compare(a.Name, b.Name), a.Limit-b.Limit) })
	slices.SortFunc(calls, func(a, b *call) int { return cmp.Compare(a.arrived, b.arrived) })
	for _, c := range calls {
		if !c.binding.controlVerb {
			info.Calls = append(info.Calls, c.stateNow())
		}
	}
	for _, order := range w.orders { // they wait for calls that were lost
		for early := range order.Buffered {
			if len(info.Calls) >= maxListedCalls*(len(w.queues)+1) {
				break
			}
			info.Calls = append(info.Calls, CallState{Method: early.header.Method, Caller: strings.ToValidUTF8(early.header.Caller, "\uFFFD"), For: time.Since(early.at)})
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
		return None{}, bus.Errorf(bus.CodeRefused, "class %s cannot be configured after its start", class.Name)
	}
	return None{}, c.Configure(ctx, config)
}

func noObject(name string) error {
	return bus.Errorf(bus.CodeNotFound, "no object %q in this worker; create it with the verb @create", name)
}

func (w *Worker) setEnv(ctx context.Context, env map[string]string) (None, error) {
	for name := range env {
		if name == "" || strings.ContainsAny(name, "=\x00") {
			return None{}, bus.Errorf(bus.CodeRefused, "%q is not a valid name of an environment variable", name)
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

// Env returns a variable that set_env has set for the worker, or else the process's.
func (w *Worker) Env(name string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if v, ok := w.env[name]; ok {
		return v
	}
	return os.Getenv(name)
}

func (w *Worker) createObject(ctx context.Context, r CreateRequest) (None, error) {
	if err := bus.CheckName("object", r.Name); err != nil {
		return None{}, err
	}
	class, err := w.host.class(r.Class)
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

// stopVerb stops the worker in the background: a stopped worker could not answer.
func (w *Worker) stopVerb(_ context.Context, r StopRequest) (None, error) {
	w.beginStop()
	bus.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), r.Grace)
		defer cancel()
		if err := w.Stop(ctx); err != nil {
			w.host.cfg.Logger.Warn("actors: stop worker", "role", w.spec.Address.Role, "rank", w.spec.Rank, "error", err)
		}
	})
	return None{}, nil
}
