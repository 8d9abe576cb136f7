package dispatch

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/dispatch/plan"
)

// Group is the address and the mesh of a running role. It is safe for concurrent use; its fields are set once.
type Group struct {
	Endpoint *calls.Endpoint
	To       bus.Address
	Mesh     Mesh
	MeshName string // the mesh whose slices the workers subscribe to
	Ordered  bool   // the role has a sequencer
	// GensFunc returns the generations of replaced ranks. Nil: no rank was replaced.
	GensFunc func() map[int]uint32
	// Gate delays calls to restarting ranks. Nil: calls are never delayed.
	Gate *Gate
	// Listed names the ranks in messages to the whole role, because other workers may subscribe too: those that are being added, and
	// those that finish their calls before they leave.
	Listed bool

	sending sync.RWMutex // held while a call is sent; guards what follows
	retired bool

	plans sync.Map // Mode → *plan.Plan
}

// Call is one call. Most calls set only the first fields.
type Call struct {
	Method string
	Args   []any
	Named  map[string]any // named arguments, cut like the others

	Mode   Mode    // zero: OneToAll
	Custom *Custom // a mode of the caller, instead of Mode
	Ranks  []int   // these ranks with the same arguments, instead of a mode

	Object  string        // name of an object in the workers; empty: the main one
	Control bool          // the call uses the control lane
	Timeout time.Duration // zero: the context's deadline alone
	Options Options       // padding and metadata

	// NoCollect lets every rank answer with an acknowledgement instead of a result.
	NoCollect bool
	// CollectAll waits for every rank and returns the errors by rank. Zero: the first failure cancels the other ranks
	// and is the error.
	CollectAll bool
	// Need ends the call after this many successful answers; the others are cancelled, and the result is made of the
	// answers that came. The mode must collect all ranks that it calls, or none. Zero: all ranks must succeed.
	Need int
	// NoWait fails the call at once, with ErrWorkerLost, when one of its ranks is being restarted. Zero: the call is
	// sent when the rank is back, within Timeout and the context's deadline. Calls on the control lane never wait.
	NoWait bool
	// Trace is a W3C traceparent that is sent with the call.
	Trace string
	// Meta is a msgpack value that is sent with the call for the worker's host (actors.CallInfo.Meta).
	Meta []byte
	// AskAfter is the time after which silent ranks are first asked for the call's status. Zero: the default of bus.
	AskAfter time.Duration

	// Encoded has the cut and encoded arguments, instead of Args, Named, Mode and Ranks.
	Encoded *Encoded
	// PreparedFunc is called with the call before it is sent, and may refuse it. It may be nil.
	PreparedFunc func(*calls.Call) error
	// ArrivedFunc, EndingFunc and OverFunc report the progress of the call; see calls.Call.
	ArrivedFunc func(*calls.Gather)
	EndingFunc  func(*calls.Gather)
	OverFunc    func(*calls.Gather)
	// Memory holds large answers; see calls.Call.
	Memory values.Memory
	// Keep, Counted, Arguments and OnDevice are about references; see calls.Call.
	Keep      bool
	Counted   bool
	Arguments []wire.Reference
	OnDevice  bool
	// Inside are the references inside arguments. The caller keeps them until OverFunc has returned.
	Inside []wire.Reference
}

// Encoded is arguments that the caller has cut for a plan and encoded: one body for each part. The bodies must not
// change until the call is over or DoneFunc is called.
type Encoded struct {
	Plan   *plan.Plan
	World  int // size of the role that the plan is for; zero: any that has its ranks
	Bodies [][]byte
	// DoneFunc is called when the body of a part is no longer read; see calls.Part. It may be nil.
	DoneFunc func(part int)
}

// Resolver is an argument that is not available yet, such as a Future. Its value is awaited before the call is sent.
type Resolver interface {
	Value(ctx context.Context) (any, error)
}

// ErrResized is the error of a call that was planned for another size of the role. It was not sent: plan it again.
var ErrResized = errors.New("the role has been resized since the call was planned")

// Retire refuses calls from now on, with ErrResized: another Group has taken its place. When it returns, every call of this Group has
// been sent, or will not be.
func (g *Group) Retire() {
	g.sending.Lock()
	defer g.sending.Unlock()
	g.retired = true
}

// Go sends the call and returns at once; only arguments that are futures are awaited, under ctx. A mistake in the call
// is ErrInvalid, and nothing is sent then. The end of ctx cancels the call.
func (g *Group) Go(ctx context.Context, c Call) (*Future, error) {
	if e := c.Encoded; e != nil && e.World != 0 && e.World != g.Mesh.World() {
		return nil, ErrResized
	}
	var named []wire.Reference // arguments that are references; retained for the call
	shards, call, err := g.prepare(ctx, c, &named)
	if err != nil {
		if len(named) > 0 {
			g.Endpoint.References().Release(named...)
		}
		return nil, g.describeError(c, err)
	}
	release := func() {}
	if len(named) > 0 {
		release = sync.OnceFunc(func() { g.Endpoint.References().Release(named...) })
		call.Arguments = append(call.Arguments, named...)
		over := call.OverFunc
		call.OverFunc = func(gather *calls.Gather) {
			if over != nil {
				over(gather)
			}
			release()
		}
	}
	if c.PreparedFunc != nil {
		err = c.PreparedFunc(&call)
	}
	var gather *calls.Gather
	if err == nil {
		gather, err = g.scatter(ctx, c, call)
	}
	if err != nil {
		release()
		if errors.Is(err, ErrResized) {
			return nil, err
		}
		return nil, g.describeError(c, err)
	}
	f := &Future{gather: gather, shards: shards, call: c, role: g.To.Role, doneCh: ctx.Done()}
	if c.Encoded == nil {
		f.newAnswers(g.Endpoint.References())
	}
	return f, nil
}

// scatter sends the call, or lets it wait for restarting ranks.
func (g *Group) scatter(ctx context.Context, c Call, call calls.Call) (*calls.Gather, error) {
	g.sending.RLock()
	defer g.sending.RUnlock()
	if g.retired {
		return nil, ErrResized
	}
	if g.Gate == nil || c.Control {
		return g.Endpoint.Scatter(ctx, call)
	}
	return g.Gate.scatter(ctx, g, call, c.NoWait)
}

// gens returns the generations of replaced ranks.
func (g *Group) gens() map[int]uint32 {
	if g.GensFunc == nil {
		return nil
	}
	return g.GensFunc()
}

// prepare makes the bus call, with every check that needs no message.
func (g *Group) prepare(ctx context.Context, c Call, named *[]wire.Reference) (*plan.Shards, calls.Call, error) {
	if err := c.check(); err != nil {
		return nil, calls.Call{}, err
	}
	shards, parts, err := g.parts(ctx, c, named)
	if err != nil {
		return nil, calls.Call{}, err
	}
	call := calls.Call{
		To: g.To, Method: c.Method, Object: c.Object, Control: c.Control, Ordered: g.Ordered && !c.Control,
		World: g.Mesh.World(), Parts: parts, Trace: c.Trace, Meta: c.Meta, AskAfter: c.AskAfter, Timeout: c.Timeout,
		FailFast: !c.CollectAll && c.Need == 0, Need: c.Need, ArrivedFunc: c.ArrivedFunc, EndingFunc: c.EndingFunc, OverFunc: c.OverFunc, Memory: c.Memory,
		Keep: c.Keep, Counted: c.Counted, Arguments: c.Arguments, OnDevice: c.OnDevice,
	}
	call.Gens = g.gens()
	called := 0
	for _, p := range parts {
		called += len(p.Ranks)
	}
	if c.NoCollect {
		call.CollectSome = true
	} else if len(shards.Plan.Collect) < called {
		call.CollectSome, call.Collect = true, wire.Ranks(shards.Plan.Collect...)
	}
	return shards, call, c.checkNeed(shards.Plan, called)
}

// parts cuts and encodes the arguments, unless the caller has done so.
func (g *Group) parts(ctx context.Context, c Call, named *[]wire.Reference) (*plan.Shards, []calls.Part, error) {
	if c.Encoded != nil {
		return &plan.Shards{Plan: c.Encoded.Plan}, g.encoded(c.Encoded), nil
	}
	shards, names, err := g.cut(ctx, c, named)
	if err != nil {
		return nil, nil, err
	}
	parts, err := g.encode(shards, names)
	return shards, parts, err
}

func (g *Group) encoded(e *Encoded) []calls.Part {
	parts := make([]calls.Part, len(e.Plan.Parts))
	for i, p := range e.Plan.Parts {
		parts[i] = calls.Part{Scope: g.scope(p.Target), Ranks: p.Ranks, Some: g.some(p.Target), NoData: p.Shard == plan.NoData, Body: e.Bodies[i]}
		if e.DoneFunc != nil && len(e.Bodies[i]) > values.MaxInline {
			parts[i].DoneFunc = func() { e.DoneFunc(i) }
		}
	}
	return parts
}

// check refuses fields that contradict each other.
func (c Call) check() error {
	switch e := c.Encoded; {
	case e != nil && (e.Plan == nil || len(e.Bodies) != len(e.Plan.Parts)):
		return invalid("Encoded must have one body for each part of its plan")
	case e != nil && (c.Args != nil || c.Named != nil || c.Custom != nil || c.Ranks != nil || c.Mode != ""):
		return invalid("Encoded excludes Args, Named, Mode, Custom and Ranks")
	case c.Custom != nil && (c.Mode != "" || c.Ranks != nil):
		return invalid("Custom excludes Mode and Ranks; choose one")
	case c.Mode != "" && c.Ranks != nil:
		return invalid("Mode %s and Ranks exclude each other; choose one", c.Mode)
	case c.Need != 0 && c.CollectAll:
		return invalid("Need and CollectAll exclude each other; choose one")
	case c.Need < 0:
		return invalid("Need %d must not be negative", c.Need)
	case c.Timeout < 0:
		return invalid("Timeout %v must not be negative", c.Timeout)
	}
	return nil
}

// checkNeed refuses a Need that cannot be reached, or that ranks without a result could reach.
func (c Call) checkNeed(p *plan.Plan, called int) error {
	switch collected := len(p.Collect); {
	case c.Need > called:
		return invalid("Need %d: the call goes to %d ranks", c.Need, called)
	case c.Need > 0 && !c.NoCollect && collected < called:
		return invalid("Need %d: %s calls %d ranks and collects only %d; a mode with Need must collect every rank it calls", c.Need, p.Mode, called, collected)
	}
	return nil
}

// describeError adds role and method to an error, and keeps the rank if it is one of the role.
func (g *Group) describeError(c Call, err error) error {
	e := bus.AsError(err)
	if e.Role != g.To.Role {
		e.Rank = -1
	}
	e.Role, e.Method = g.To.Role, c.Method
	return e
}

// cut awaits arguments that are futures and cuts all arguments for the call's plan. Named ones come last, by name.
func (g *Group) cut(ctx context.Context, c Call, named *[]wire.Reference) (*plan.Shards, []string, error) {
	var names []string
	if len(c.Named) > 0 {
		names = slices.Sorted(maps.Keys(c.Named))
	}
	values := slices.Clone(c.Args)
	for _, n := range names {
		values = append(values, c.Named[n])
	}
	for i, v := range values {
		v, err := g.byReference(v, named)
		if err != nil {
			return nil, nil, err
		}
		if values[i], err = resolve(ctx, v); err != nil {
			return nil, nil, bus.Errorf(bus.CodeOf(err), "%s is a future that failed: %w", plan.ArgName(i, len(values), names), err)
		}
	}
	if c.Custom != nil {
		s, err := c.Custom.Cut(g.Mesh, values[:len(c.Args)])
		if err == nil {
			err = s.AddNamed(values[len(c.Args):], names)
		}
		return s, names, err
	}
	p, err := g.planOf(c)
	if err != nil {
		return nil, nil, err
	}
	s, err := p.CutNamed(values, names, c.Options)
	return s, names, err
}

// resolve awaits an argument that is a Resolver. Its mark stays.
func resolve(ctx context.Context, v any) (any, error) {
	return plan.MapArg(v, func(v any) (any, error) {
		if r, ok := v.(Resolver); ok {
			return r.Value(ctx)
		}
		return v, nil
	})
}

func (g *Group) planOf(c Call) (*plan.Plan, error) {
	if c.Ranks != nil {
		return plan.PlanRanks(g.Mesh, c.Ranks)
	}
	mode := c.Mode
	if mode == "" {
		mode = OneToAll
	}
	if p, ok := g.plans.Load(mode); ok {
		return p.(*plan.Plan), nil
	}
	p, err := plan.NewPlan(mode, g.Mesh)
	if err == nil {
		g.plans.Store(mode, p)
	}
	return p, err
}

// encode makes the body of each part. An argument that all parts share is encoded once.
func (g *Group) encode(s *plan.Shards, names []string) ([]calls.Part, error) {
	e := argEncoder{shards: s, names: names}
	parts := make([]calls.Part, len(s.Plan.Parts))
	for i, p := range s.Plan.Parts {
		body, err := e.body(p)
		if err != nil {
			return nil, err
		}
		parts[i] = calls.Part{Scope: g.scope(p.Target), Ranks: p.Ranks, Some: g.some(p.Target), NoData: p.Shard == plan.NoData, Body: body}
	}
	return parts, nil
}

const shortBody = 96 // room for the arguments of a short call

// argEncoder encodes the arguments of one call.
type argEncoder struct {
	shards *plan.Shards
	names  []string
	shared map[int][]byte // encoded arguments that all parts share, by position
}

// body encodes the arguments of a part in place, so that tensors are aligned.
func (e *argEncoder) body(p plan.Part) ([]byte, error) {
	values := e.shards.Args(p)
	positional := len(values) - len(e.names)
	b := wire.AppendArgsHead(make([]byte, 0, shortBody), positional)
	var err error
	for i, v := range values {
		if i == positional {
			b = wire.AppendNamedHead(b, len(e.names))
		}
		if i >= positional {
			b = wire.AppendName(b, e.names[i-positional])
		}
		if b, err = e.value(b, i, v); err != nil {
			return nil, invalid("%s: %w", plan.ArgName(i, len(values), e.names), err)
		}
	}
	if len(e.names) == 0 {
		b = wire.AppendNamedHead(b, 0)
	}
	return b, nil
}

func (e *argEncoder) value(b []byte, i int, v any) ([]byte, error) {
	if enc, ok := e.shared[i]; ok {
		return append(b, enc...), nil
	}
	start := len(b)
	b, err := wire.AppendMarshal(b, v)
	if err == nil && e.shards.Shared(i) && len(e.shards.Plan.Parts) > 1 {
		if e.shared == nil {
			e.shared = map[int][]byte{}
		}
		e.shared[i] = b[start:len(b):len(b)]
	}
	return b, err
}

// some reports whether a message names its ranks, of those that receive it.
func (g *Group) some(t plan.Target) bool {
	return t.Partial || g.Listed && t.Kind == plan.ToRole
}

func (g *Group) scope(t plan.Target) calls.Scope {
	switch t.Kind {
	case plan.ToRank:
		return calls.OneRank(t.N)
	case plan.ToSlice:
		return calls.DPSlice(g.MeshName, t.N)
	}
	return calls.Everyone()
}
