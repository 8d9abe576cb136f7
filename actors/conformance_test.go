package actors_test

import (
	"context"
	"fmt"
	"runtime/debug"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/actors/actorstest"
	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// TestConformance runs the suite against goroutine workers: on one connection, on one connection each, with an untyped
// class, and with an asynchronous one.
func TestConformance(t *testing.T) {
	for name, spawn := range map[string]actorstest.Spawn{
		"shared":  spawnShared(actorstest.Classes),
		"own":     spawnOwn,
		"foreign": spawnShared(bytesClasses),
		"later":   spawnShared(asyncClasses),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			actorstest.Exercise(t, spawn)
		})
	}
}

func spawnShared(classes func() []*actors.Class) actorstest.Spawn {
	return func(t *testing.T, b *bus.Bus, role actorstest.Role) {
		h := newHost(t, b, role, classes())
		for rank := range role.World {
			_, err := h.Start(t.Context(), role.Spec(rank))
			require.NoError(t, err)
		}
		require.NoError(t, b.Flush(t.Context()))
	}
}

func spawnOwn(t *testing.T, b *bus.Bus, role actorstest.Role) {
	for rank := range role.World {
		own, err := b.Dial(t.Context(), fmt.Sprint("rank-", rank))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, own.Close()) })
		_, err = newHost(t, own, role, actorstest.Classes()).Start(t.Context(), role.Spec(rank))
		require.NoError(t, err)
		require.NoError(t, own.Flush(t.Context()))
	}
}

// newHost makes a host that is closed at the end of the test, with running calls cancelled.
func newHost(t testing.TB, b *bus.Bus, role actorstest.Role, classes []*actors.Class) *actors.Host {
	ep, err := calls.Open(b, role.Address.Namespace)
	require.NoError(t, err)
	h, err := actors.NewHost(ep, actors.HostConfig{Classes: classes, HeartbeatEvery: role.HeartbeatEvery})
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		defer cancel()
		require.NoError(t, h.Close(ctx))
		ep.Close()
	})
	return h
}

// bytesClasses are the suite's classes as an embedder of another language provides them: a table and a handler of
// encoded bodies.
func bytesClasses() []*actors.Class {
	var out []*actors.Class
	for _, c := range actorstest.Classes() {
		out = append(out, &actors.Class{Name: c.Name, Methods: c.Methods, New: func(ctx context.Context, s actors.Setup) (actors.Handler, error) {
			inner, err := c.New(ctx, s)
			return bytesHandler{inner}, err
		}})
	}
	return out
}

// bytesHandler hides the optional interfaces of the object, and gives it copies of the bodies.
type bytesHandler struct{ inner actors.Handler }

func (f bytesHandler) Handle(ctx context.Context, method string, body []byte) ([]byte, error) {
	return f.inner.Handle(ctx, method, append([]byte(nil), body...))
}

func (f bytesHandler) Configure(ctx context.Context, config wire.Raw) error {
	if c, ok := f.inner.(actors.Configurer); ok {
		return c.Configure(ctx, config)
	}
	return nil
}

func (f bytesHandler) SetEnv(ctx context.Context, env map[string]string) error {
	return f.inner.(actors.EnvSetter).SetEnv(ctx, env)
}

// asyncClasses are untyped classes whose objects provide their methods themselves and answer from their own goroutines.
func asyncClasses() []*actors.Class {
	var out []*actors.Class
	for _, c := range actorstest.Classes() {
		out = append(out, &actors.Class{Name: c.Name, Open: true, New: func(ctx context.Context, s actors.Setup) (actors.Handler, error) {
			inner, err := c.New(ctx, s)
			return asyncHandler{bytesHandler{inner}, c.Methods}, err
		}})
	}
	return out
}

type asyncHandler struct {
	bytesHandler
	methods []actors.MethodInfo
}

func (l asyncHandler) Table() actors.Table { return actors.Table{Methods: l.methods} }

// Begin answers short calls at once and others later.
func (l asyncHandler) Begin(ctx context.Context, method string, body []byte, done func([]byte, error)) {
	run := func() {
		defer func() {
			if p := recover(); p != nil {
				e := bus.Errorf(bus.CodePanic, "panic: %v", p)
				e.Stack = string(debug.Stack())
				done(nil, e)
			}
		}()
		out, err := l.Handle(ctx, method, body)
		done(out, err)
		done(nil, nil) // only the first answer counts
	}
	if method == "double" || method == "note" {
		run()
		return
	}
	go run()
}
