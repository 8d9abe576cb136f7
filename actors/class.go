package actors

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
)

// Class is a kind of worker: a name, a table of methods and a constructor. NewClass makes a typed class. A Class that
// is filled in by hand gets bodies as encoded bytes, for methods that are known only at run time.
type Class struct {
	Name string
	// Methods are the methods that callers may call, in order of declaration.
	Methods []MethodInfo
	// Open accepts calls of methods that are not in the table; they run in the serial lane.
	Open bool
	// DeviceTensors: arguments may be tensors that stay on their device (wire.ExtDevice); otherwise callers copy them to memory.
	DeviceTensors bool
	// New makes the object that handles the calls, while the worker is initialising.
	New func(ctx context.Context, s Setup) (Handler, error)
}

// Handler is an object that handles calls. Each slot of a lane calls Handle from one goroutine at a time. Handle may
// block; it must not keep the body, nor use its result after returning it. A panic becomes the call's error.
type Handler interface {
	Handle(ctx context.Context, method string, body []byte) ([]byte, error)
}

// Table is what callers know of an object; the fields are those of Class.
type Table struct {
	Methods       []MethodInfo
	Open          bool
	DeviceTensors bool
}

// Optional interfaces of a Handler.
type (
	// AsyncHandler answers later: Begin is called instead of Handle and must not block; it has done called once, from
	// any goroutine, with what Handle would return. The next call of the lane may begin before done returns. The
	// handler may keep the body, which other ranks of the process may share.
	AsyncHandler interface {
		Begin(ctx context.Context, method string, body []byte, done func(body []byte, err error))
	}
	// MemoryProvider is an AsyncHandler with its own memory for bodies over values.MaxInline. It owns and frees its
	// arguments; its results are freed when they are no longer read.
	MemoryProvider interface {
		Memory() values.Memory
	}
	// ArgumentTaker is an AsyncHandler that takes the values of arguments that were references itself (TakeArguments). For other
	// handlers they are put into the body.
	ArgumentTaker interface {
		TakesArguments() bool
	}
	// MethodProvider is an object that knows its methods only once it exists: its table replaces that of its class.
	MethodProvider interface {
		Table() Table
	}
	// Closer is closed when the worker stops.
	Closer interface {
		Close(ctx context.Context) error
	}
	// Configurer handles the configure verb: a new configuration, as the caller's msgpack value.
	Configurer interface {
		Configure(ctx context.Context, config wire.Raw) error
	}
	// EnvSetter handles the set_env verb.
	EnvSetter interface {
		SetEnv(ctx context.Context, env map[string]string) error
	}
)

// MethodInfo describes a method to callers. The role's record contains it.
type MethodInfo struct {
	Name string `msgpack:"name" json:"name"`
	Mode string `msgpack:"mode,omitempty" json:"mode,omitempty"` // dispatch mode; empty: ONE_TO_ALL
	Lane Lane   `msgpack:"lane" json:"lane"`
	// Replay keeps the arguments of the last successful call; a restarted worker is called with them before it is
	// ready. Zero: a restarted worker has only its constructor run.
	Replay bool `msgpack:"replay,omitempty" json:"replay,omitempty"`
}

// Setup describes the new worker to its constructor.
type Setup struct {
	Role   bus.Address
	Rank   int
	World  int
	Gen    uint32
	Node   string
	Object string   // name of the object; empty: the worker's main object
	Config wire.Raw // the role's configuration, msgpack; see DecodeConfig
	Host   *Host    // the worker's host, whose endpoint makes calls
}

// DecodeConfig decodes the configuration into v. Without a configuration v stays as it is.
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

// NewClass makes a class from a constructor. Method adds its methods, before the class is used.
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

// Method adds a method to the class, usually a method expression: Method(counter, "add", (*Counter).Add). The argument
// is the call's one positional argument, or its named arguments if A is a struct; Args receives all arguments
// undecoded, None accepts no argument. Method panics if the method is declared twice or a lane has two limits.
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

// quickArg decodes a single plain argument. slowArg and appendSlow are separate functions so that argument and result
// stay off the heap on the quick path.
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

// MethodOptions are the optional properties of a method.
type MethodOptions struct {
	Mode string // dispatch mode; empty: ONE_TO_ALL
	Lane Lane   // zero: Serial
	// Replay calls the method again on a restarted worker, with the arguments of the last successful call, before the
	// worker is ready. It is meant for methods that initialise a worker.
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

// check reports every mistake in a class that was filled in by hand.
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

// method finds a method in the table; an open class has every method.
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

// bind implements binder.
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
	return bus.Errorf(bus.CodeRefused, "%T cannot be configured after its start; it needs a method Configure(ctx, wire.Raw) error", h.obj)
}

func (h *typedHandler[T]) SetEnv(ctx context.Context, env map[string]string) error {
	if c, ok := any(h.obj).(EnvSetter); ok {
		return c.SetEnv(ctx, env)
	}
	return nil
}

// None is the argument of a method without arguments, or the result of a method without a result.
type None struct{}

// Args is a call's undecoded arguments, for a method with several arguments.
type Args = wire.Args

// decodeArgs decodes a call's body, [positional, named], into a method's argument. An empty body belongs to a call
// without data: the argument stays zero.
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
		return bus.Errorf(bus.CodeRefused, "the method takes no argument, not %d positional and %d named", len(args.Positional), len(args.Named))
	case len(args.Positional) == 1 && len(args.Named) == 0:
		raw = args.Positional[0]
	case len(args.Positional) == 0 && len(args.Named) > 0:
		if raw, err = wire.Marshal(args.Named); err != nil {
			return err
		}
	case len(args.Positional) == 0:
		return nil
	default:
		return bus.Errorf(bus.CodeRefused, "the method takes one positional argument or named ones, not %d positional and %d named", len(args.Positional), len(args.Named))
	}
	return decodeArg(raw, arg)
}

// decodeArg refuses fields that the argument does not have, so that a mistyped name is an error.
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
