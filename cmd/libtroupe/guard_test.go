package main

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// panickingLogger panics on every record.
type panickingLogger struct{ slog.Handler }

func (panickingLogger) Enabled(context.Context, slog.Level) bool  { return true }
func (panickingLogger) Handle(context.Context, slog.Record) error { panic("the logger has a bug") }
func (b panickingLogger) WithAttrs([]slog.Attr) slog.Handler      { return b }
func (b panickingLogger) WithGroup(string) slog.Handler           { return b }

func mustAnswer(t *testing.T, c *core, op string, request any) []byte {
	t.Helper()
	raw, err := wire.Marshal(request)
	require.NoError(t, err)
	value, err := c.answer(t.Context(), op, raw)
	require.NoError(t, err)
	body, err := wire.Marshal(value)
	require.NoError(t, err)
	return body
}

// TestPanicInAGoroutineOfAPackageBelow: the loop that follows a role's heartbeats panics in its logger.
func TestPanicInAGoroutineOfAPackageBelow(t *testing.T) {
	b := bustest.Open(t, bus.Config{Server: bus.ServerConfig{Listen: "127.0.0.1:0"}})
	c, err := newCore()
	require.NoError(t, err)
	t.Cleanup(func() { bus.OnPanic(nil) })
	c.log = slog.New(panickingLogger{}) // nothing is logged without an error
	var s runtimeInfo
	opened := mustAnswer(t, c, "open", map[string]any{"bus": map[string]any{"urls": []string{b.URL()}}, "namespace": "test", "name": "test"})
	require.NoError(t, wire.Unmarshal(opened, &s))
	rt, err := c.runtime(s.Runtime)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, rt.Close(context.Background())) })

	var cl clusterInfo
	methods := []actors.MethodInfo{{Name: "hold", Lane: actors.Serial}}
	served := mustAnswer(t, c, "serve", map[string]any{
		"runtime": s.Runtime, "class_name": "Holder", "object": "served-1", "table": map[string]any{"methods": methods},
	})
	require.NoError(t, wire.Unmarshal(served, &cl))
	plan, err := c.plan(cl.Cluster, []byte(`{"ranks": [0]}`))
	require.NoError(t, err)
	var p planAnswer
	require.NoError(t, json.Unmarshal(plan, &p))
	require.NoError(t, c.call(77, cl.Cluster, blob(uint32(p.ID), "hold")))
	require.Eventually(t, func() bool { return has(c, kindCall, 1) }, 2*time.Minute, time.Millisecond, "it is being served, by nobody")

	ep, err := calls.Open(b, "test")
	require.NoError(t, err)
	defer ep.Close()
	role, err := c.cluster(cl.Cluster)
	require.NoError(t, err)
	require.NoError(t, ep.Send(role.Record().Address().Life(), &wire.Frame{Kind: wire.KindBeat, Body: []byte{0xc1}}))
	require.Eventually(t, func() bool { return c.checkUsable() != nil }, 2*time.Minute, time.Millisecond)
	require.True(t, has(c, kindOver, 77), "what was under way has failed")
	err = c.checkUsable()
	assert.Equal(t, bus.CodeInternal, bus.CodeOf(err))
	var why *bus.Error
	require.True(t, errors.As(err, &why))
	assert.Contains(t, why.Stack, "roles.(*liveness)", "where it happened")

	_, err = c.answer(t.Context(), "roles", nil)
	assert.ErrorContains(t, err, "the logger has a bug", "and whatever is asked for is refused")
	c.incoming.answer(1, 0, []byte{0xc0}) // the role does not wait for it
}

// has reports whether the queue has such a completion.
func has(c *core, k kind, token uint64) bool {
	c.queue.mu.Lock()
	defer c.queue.mu.Unlock()
	for _, e := range c.queue.entries {
		if e.kind == k && e.token == token {
			return true
		}
	}
	return false
}

// blob is a call with an empty body for one part.
func blob(plan uint32, method string) []byte {
	b := append(appendRecord(nil, callHead{Parts: 1, Plan: plan, Method: uint32(len(method))}), method...)
	return appendRecord(b, callPart{})
}
