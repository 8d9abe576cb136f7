package actors

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"troupe/bus"
	"troupe/bus/wire"
)

// Class is a kind of worker: a name, a table of methods, and a way to make one. Typed classes are made by NewClass;
// a foreign class, whose methods are known only at run time, is filled in by hand, and its bodies stay opaque bytes.
type Class struct {
	Name string
	// Methods is what callers may call, in the order of declaration.
	Methods []MethodInfo
	// Open lets methods through that are not in the table; they run in the serial lane.
	Open bool
	// New makes the object that handles the calls. It runs while the worker is initialising.
	New func(ctx context.Context, s Setup) (Handler, error)
}

// Handler is an object that takes calls. Handle is called from one goroutine at a time for each lane slot, may block,
// and owns neither the body it gets nor, after returning it, the one it gives. A panic is that call's error.
type Handler interface {
	Handle(ctx context.Context, method string, body []byte) ([]byte, error)
}

// Handlers may implement these as well.
type (
	// Starter answers later: Begin is called instead of Handle, must not block, and done is called once, from any
	// goroutine, with what Handle would have returned. The next call of the lane may begin before done returns. The
	// body is the handler's to keep, but other ranks of the process may have the same one.
	Starter interface {
		Begin(ctx context.Context, method string, body []byte, done func(body []byte, err error))
	}
	// Keeper is a Starter with a memory of its own for bodies over bus.MaxInline. It owns the arguments that it is given, and
	// frees them; the results that it gives are freed when nobody needs them any more.
	Keeper interface {
		Memory() bus.Memory
	}
	// Tabled knows its methods only after it was made: they take the place of its class's.
	Tabled interface {
		Table() (methods []MethodInfo, open bool)
	}
	// Closer is told when the worker stops.
	Closer interface {
		Close(ctx context.Context) error
	}
	// Configurer takes the configure verb: a new configuration, as the msgpack value the caller gave.
	Configurer interface {
		Configure(ctx context.Context, config wire.Raw) error
	}
	// EnvSetter takes the set_env verb.
	EnvSetter interface {
		SetEnv(ctx context.Context, env map[string]string) error
	}
)

// MethodInfo is what a caller needs to know of a method. It travels in the role's record.
type MethodInfo struct {
	Name string `msgpack:"name" json:"name"`
	Mode string `msgpack:"mode,omitempty" json:"mode,omitempty"` // the dispatch mode; empty: ONE_TO_ALL
	Lane Lane   `msgpack:"lane" json:"lane"`
	// Replay has the arguments of the last successful call kept, and a worker that is restarted called with them before it
	// counts as ready. Zero: a restarted worker starts from its constructor alone.
	Replay bool `msgpack:"replay,omitempty" json:"replay,omitempty"`
}

// Setup is what a constructor is told about the worker it makes.
type Setup struct {
	Role   bus.Address
	Rank   int
	World  int
	Gen    uint32
	Node   string
	Object string   // the name of the object; empty: the worker's own
	Config wire.Raw // the role's configuration, msgpack; Decode it with DecodeConfig
	Host   *Host    // where the worker lives; its endpoint makes calls of its own
}

// DecodeConfig reads the configuration into v. No configuration leaves v as it is.
func (s Setup) DecodeConfig(v any) error {
	if len(s.Config) == 0 || s.Config.IsNil() {
		return nil
	}
	if err := wire.Unmarshal(s.Config, v); err != nil {
		return bus.Errorf(bus.CodeRefused, "configuration of %s: %w", s.Role.Role, err)
	}
	return nil
}

// ClassOf is a class whose objects are *T.
type ClassOf[T any] struct {
	*Class
	methods map[string]typedMethod[T]
}

// typedMethod appends the encoded result to dst.
type typedMethod[T any] func(obj *T, ctx context.Context, body, dst []byte) ([]byte, error)

// NewClass makes a class from a constructor. Its methods are added with Method before the class is used.
func NewClass[T any](name string, construct func(ctx context.Context, s Setup) (*T, error)) *ClassOf[T] {
	if err := bus.CheckName("class", name); err != nil {
		panic(err)
	}
	c := &ClassOf[T]{Class: &Class{Name: name}, methods: map[string]typedMethod[T]{}}
	c.New = func(ctx context.Context, s Setup) (Handler, error) {
		obj, err := construct(ctx, s)
		if err != nil {
			return nil, err
		}
		return &typedHandler[T]{obj: obj, methods: c.methods}, nil
	}
	return c
}

// Method adds a method of the class, usually a method expression: Method(counter, "add", (*Counter).Add). The argument
// is the call's one positional argument, or its named ones if A is a struct; Args takes them as they come, None means
// there are none. Declaring a method twice, or two limits for one lane, is a programmer's mistake and panics.
func Method[T, A, R any](c *ClassOf[T], name string, f func(*T, context.Context, A) (R, error), opts ...MethodOptions) {
	info := MethodInfo{Name: name, Lane: Serial}
	for _, o := range opts {
		info.Mode, info.Replay = o.Mode, o.Replay
		if o.Lane != (Lane{}) {
			info.Lane = o.Lane
		}
	}
	if err := c.Class.add(info); err != nil {
		panic(err)
	}
	c.methods[name] = func(obj *T, ctx context.Context, body, dst []byte) ([]byte, error) {
		arg, quick := quickArg[A](body)
		if !quick {
			var err error
			if arg, err = slowArg[A](body); err != nil {
				return nil, err
			}
		}
		result, err := f(obj, ctx, arg)
		if err != nil {
			return nil, err
		}
		if out, ok := wire.AppendQuick(dst, &result); ok {
			return out, nil
		}
		return appendSlow(dst, result)
	}
}

// quickArg reads the one plain argument of a short call. It is apart from slowArg, as appendSlow is from AppendQuick, so
// that argument and result stay off the heap.
func quickArg[A any](body []byte) (arg A, ok bool) {
	raw, ok := wire.SingleArg(body)
	ok = ok && wire.ReadQuick(raw, &arg)
	return arg, ok
}

func slowArg[A any](body []byte) (arg A, err error) {
	err = decodeArgs(body, &arg)
	return arg, err
}

func appendSlow(dst []byte, result any) ([]byte, error) { return wire.AppendMarshal(dst, result) }

// MethodOptions are the extras of a method.
type MethodOptions struct {
	Mode string // dispatch mode; empty: ONE_TO_ALL
	Lane Lane   // zero: Serial
	// Replay calls the method again on a worker that was restarted, with the arguments of the last successful call, before
	// it counts as ready. Typically the method that initialises a worker has it.
	Replay bool
}

func (c *Class) add(info MethodInfo) error {
	if err := bus.CheckName("method", info.Name); err != nil {
		return err
	}
	if err := info.Lane.check(); err != nil {
		return err
	}
	for _, m := range c.Methods {
		if m.Name == info.Name {
			return bus.Errorf(bus.CodeInvalid, "class %s declares method %q twice", c.Name, info.Name)
		}
		if m.Lane.Name == info.Lane.Name && m.Lane != info.Lane {
			return bus.Errorf(bus.CodeInvalid, "class %s: lane %q has limit %d for %s and %d for %s", c.Name, m.Lane.Name, m.Lane.Limit, m.Name, info.Lane.Limit, info.Name)
		}
	}
	c.Methods = append(c.Methods, info)
	return nil
}

// check finds the mistakes in a class that was filled in by hand.
func (c *Class) check() error {
	errs := []error{bus.CheckName("class", c.Name)}
	if c.New == nil {
		errs = append(errs, bus.Errorf(bus.CodeInvalid, "class %s: New is not set", c.Name))
	}
	again := Class{Name: c.Name}
	for _, m := range c.Methods {
		errs = append(errs, again.add(m))
	}
	return errors.Join(errs...)
}

// method finds a method of the table, or makes one up if the class is open.
func (c *Class) method(name string) (MethodInfo, error) {
	i := slices.IndexFunc(c.Methods, func(m MethodInfo) bool { return m.Name == name })
	switch {
	case i >= 0:
		return c.Methods[i], nil
	case c.Open && !strings.HasPrefix(name, "@"):
		return MethodInfo{Name: name, Lane: Serial}, nil
	}
	names := make([]string, len(c.Methods))
	for i, m := range c.Methods {
		names[i] = m.Name
	}
	slices.Sort(names)
	return MethodInfo{}, bus.Errorf(bus.CodeNotFound, "class %s has no method %q; it has %v", c.Name, name, names)
}

type typedHandler[T any] struct {
	obj     *T
	methods map[string]typedMethod[T]
}

func (h *typedHandler[T]) Handle(ctx context.Context, method string, body []byte) ([]byte, error) {
	m, ok := h.methods[method]
	if !ok {
		return nil, bus.Errorf(bus.CodeNotFound, "no method %q", method)
	}
	return m(h.obj, ctx, body, nil)
}

// bind finds a method once and for all.
func (h *typedHandler[T]) bind(method string) boundMethod {
	m, ok := h.methods[method]
	if !ok {
		return nil
	}
	return func(ctx context.Context, body, dst []byte) ([]byte, error) { return m(h.obj, ctx, body, dst) }
}

func (h *typedHandler[T]) Close(ctx context.Context) error {
	if c, ok := any(h.obj).(Closer); ok {
		return c.Close(ctx)
	}
	return nil
}

func (h *typedHandler[T]) Configure(ctx context.Context, config wire.Raw) error {
	if c, ok := any(h.obj).(Configurer); ok {
		return c.Configure(ctx, config)
	}
	return bus.Errorf(bus.CodeRefused, "%T takes no configuration after its start; give it a method Configure(ctx, bus.Raw) error", h.obj)
}

func (h *typedHandler[T]) SetEnv(ctx context.Context, env map[string]string) error {
	if c, ok := any(h.obj).(EnvSetter); ok {
		return c.SetEnv(ctx, env)
	}
	return nil
}

// None is the argument of a method that takes none, or the result of one that gives none.
type None struct{}

// Args is a call's arguments as they came, for a method that takes several or decides by itself.
type Args = wire.Args

// decodeArgs reads a call's body, [positional, named], into a method's one argument. An empty body is a call without
// data: the argument stays zero.
func decodeArgs[A any](body []byte, arg *A) error {
	if len(body) == 0 {
		return nil
	}
	_, none := any(arg).(*None)
	if one, ok := wire.SingleArg(body); ok && !none {
		if _, all := any(arg).(*Args); !all {
			return decodeArg(one, arg)
		}
	}
	args, err := wire.ParseArgs(body)
	if err != nil {
		return err
	}
	if all, ok := any(arg).(*Args); ok {
		*all = args
		return nil
	}
	var raw []byte
	switch {
	case none && len(args.Positional)+len(args.Named) > 0:
		return bus.Errorf(bus.CodeRefused, "the method takes no argument; it was given %d positional and %d named", len(args.Positional), len(args.Named))
	case len(args.Positional) == 1 && len(args.Named) == 0:
		raw = args.Positional[0]
	case len(args.Positional) == 0 && len(args.Named) > 0:
		if raw, err = wire.Marshal(args.Named); err != nil {
			return err
		}
	case len(args.Positional) == 0:
		return nil
	default:
		return bus.Errorf(bus.CodeRefused, "the method takes one argument, or named ones; it was given %d positional and %d named", len(args.Positional), len(args.Named))
	}
	return decodeArg(raw, arg)
}

// decodeArg refuses fields the argument does not have: a mistyped name must not pass as a default.
func decodeArg[A any](raw []byte, arg *A) error {
	if err := wire.UnmarshalWith(raw, arg, wire.UnmarshalOptions{Strict: true}); err != nil {
		return bus.Errorf(bus.CodeRefused, "argument: want %s: %w", typeName(*arg), err)
	}
	return nil
}

func typeName(v any) string {
	if v == nil {
		return "any"
	}
	return fmt.Sprintf("%T", v)
}
