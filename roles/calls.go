package roles

import (
	"context"
	"errors"

	"troupe/actors"
	"troupe/bus/values"
	"troupe/bus/wire"
	"troupe/dispatch"
)

// Go sends a call and returns at once. A call without a mode uses the method's own; a method of a named object has
// none, and uses OneToAll.
func (c *Cluster) Go(ctx context.Context, call dispatch.Call) (*dispatch.Future, error) {
	if err := c.callable(call.Method); err != nil {
		return nil, err
	}
	if call.Object == "" {
		info, err := c.Record().Method(call.Method)
		if err != nil && c.starter.isStarting() { // the worker knows its methods, this process does not yet
			info, err = actors.MethodInfo{Name: call.Method, Lane: actors.Serial}, nil
		}
		if err != nil {
			return nil, err
		}
		if call.Mode == "" && call.Ranks == nil && call.Custom == nil && call.Encoded == nil {
			call.Mode = dispatch.Mode(info.Mode)
		}
		call.Control = call.Control || info.Lane.Name == actors.Control.Name
		if info.Replay && c.Record().Process {
			c.replayer.recordReplay(&call)
		}
	}
	f, err := c.send(ctx, call)
	if err == nil {
		c.performer.failPending()
	}
	return f, err
}

// send sends a call. Losses that became known while it was sent are reported to it too.
func (c *Cluster) send(ctx context.Context, call dispatch.Call) (*dispatch.Future, error) {
	for {
		f, err := c.shape.Load().Go(ctx, call)
		if errors.Is(err, dispatch.ErrResized) && (call.Encoded == nil || call.Encoded.World == 0) {
			continue // the role got another size while the call was planned
		}
		if err == nil {
			c.life.repeat()
		}
		return f, err
	}
}

// Err is why the role takes no calls any more: it has failed, was destroyed, or this handle is closed. Nil: it takes calls.
func (c *Cluster) Err() error { return c.callable("") }

// callable is the error of calls to a role that has ended, or nil.
func (c *Cluster) callable(method string) error {
	ended := c.life.err()
	if ended == nil {
		return nil
	}
	e := *ended
	e.Role, e.Rank, e.Method = c.Name(), -1, method
	return &e
}

// References are the values of the process that holds this cluster.
func (c *Cluster) References() *values.References { return c.rt.ep.References() }

// Call calls a method in its own mode and returns the result of that mode.
func (c *Cluster) Call(ctx context.Context, method string, args ...any) (any, error) {
	return wait(ctx)(c.Go(ctx, dispatch.Call{Method: method, Args: args}))
}

// ExecuteRankZero calls rank 0 only.
func (c *Cluster) ExecuteRankZero(ctx context.Context, method string, args ...any) (any, error) {
	return wait(ctx)(c.ExecuteRankZeroAsync(ctx, method, args...))
}

// ExecuteRankZeroAsync calls rank 0 only and returns at once.
func (c *Cluster) ExecuteRankZeroAsync(ctx context.Context, method string, args ...any) (*dispatch.Future, error) {
	return c.Go(ctx, dispatch.Call{Method: method, Args: args, Mode: dispatch.RankZero})
}

// ExecuteAll calls every rank with the same arguments and returns one answer per rank.
func (c *Cluster) ExecuteAll(ctx context.Context, method string, args ...any) ([]any, error) {
	f, err := c.ExecuteAllAsync(ctx, method, args...)
	if err != nil {
		return nil, err
	}
	return dispatch.AwaitEach[any](ctx, f)
}

// ExecuteAllAsync calls every rank with the same arguments and returns at once.
func (c *Cluster) ExecuteAllAsync(ctx context.Context, method string, args ...any) (*dispatch.Future, error) {
	return c.Go(ctx, dispatch.Call{Method: method, Args: args, Mode: dispatch.OneToAll})
}

// Call calls a method in its own mode and returns a typed result: the one answer, or the joined rows.
func Call[R any](ctx context.Context, c *Cluster, method string, args ...any) (R, error) {
	f, err := c.Go(ctx, dispatch.Call{Method: method, Args: args})
	if err != nil {
		var zero R
		return zero, err
	}
	return dispatch.Await[R](ctx, f)
}

// CallEach calls a method in its own mode and returns one typed answer per rank.
func CallEach[R any](ctx context.Context, c *Cluster, method string, args ...any) ([]R, error) {
	f, err := c.Go(ctx, dispatch.Call{Method: method, Args: args})
	if err != nil {
		return nil, err
	}
	return dispatch.AwaitEach[R](ctx, f)
}

func wait(ctx context.Context) func(*dispatch.Future, error) (any, error) {
	return func(f *dispatch.Future, err error) (any, error) {
		if err != nil {
			return nil, err
		}
		return f.Value(ctx)
	}
}

// CreateObject makes another object of a class in every worker; dispatch.Call.Object selects it.
func (c *Cluster) CreateObject(ctx context.Context, name, class string, config any) error {
	raw, err := encodeConfig(Spec{Name: c.Name(), Config: config})
	if err != nil {
		return err
	}
	if raw == nil {
		raw = wire.Raw{0xc0}
	}
	f, err := c.Go(ctx, dispatch.Call{Method: actors.VerbCreate, Args: []any{actors.CreateRequest{Name: name, Class: class, Config: raw}}})
	if err != nil {
		return err
	}
	return f.Wait(ctx)
}

// Info returns every worker's description of itself. Busy workers answer too.
func (c *Cluster) Info(ctx context.Context) ([]actors.Info, error) {
	f, err := c.Go(ctx, dispatch.Call{Method: actors.VerbInfo, Mode: dispatch.OneToAll, Control: true})
	if err != nil {
		return nil, err
	}
	return dispatch.AwaitEach[actors.Info](ctx, f)
}
