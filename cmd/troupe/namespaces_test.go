package main

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/actors"
	"troupe/bus"
	"troupe/roles"
	"troupe/roles/registry"
)

// The number of namespaces is not limited by the size of the store.
func TestManyNamespacesOnOneHead(t *testing.T) {
	t.Parallel()
	u := newShell(t)
	head, _ := u.up("--listen", "127.0.0.1:0", "--gpus", "none")
	b, err := bus.Open(t.Context(), head.access())
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	streams := func() int {
		info, err := b.JetStream().AccountInfo(t.Context())
		require.NoError(t, err)
		return info.Streams
	}
	before := streams()
	for i := range 300 {
		rt, err := roles.Open(t.Context(), roles.Config{Bus: b, Namespace: fmt.Sprintf("run-%d", i), Classes: []*actors.Class{calcClass()}})
		require.NoError(t, err)
		if i%50 == 0 {
			_, err = rt.Create(t.Context(), roles.Spec{Name: "r", Class: "calc", World: 1})
			require.NoError(t, err)
		}
		require.NoError(t, rt.Close(t.Context()))
	}
	require.Equal(t, before, streams(), "a namespace needs no stream of its own")
	require.Equal(t, "no namespace has anything\n", u.output("namespaces"), "one with nothing in it is gone")
}

func TestNamespacesAreListedAndRemoved(t *testing.T) {
	u := newShell(t)
	head, _ := u.up("--listen", "127.0.0.1:0", "--gpus", "sim:1x2", "--name", "host")
	b, err := bus.Open(t.Context(), head.access())
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	rt, err := roles.Open(t.Context(), roles.Config{Bus: b, Namespace: "run", Name: "anna", Classes: []*actors.Class{calcClass()}})
	require.NoError(t, err)
	defer func() { require.NoError(t, rt.Close(t.Context())) }()
	_, err = rt.Create(t.Context(), roles.Spec{Name: "r", Class: "calc", World: 1})
	require.NoError(t, err)
	u.with("TROUPE_NAMESPACE", "other").output("reserve", "--bundles", "1", "--devices", "1", "--id", "mine")

	var all []registry.Namespace
	require.NoError(t, json.Unmarshal([]byte(u.output("namespaces", "--json")), &all))
	require.Len(t, all, 2)
	require.Equal(t, "other", all[0].Name)
	require.Equal(t, []string{"mine"}, all[0].Reservations)
	require.Equal(t, []string{"r"}, all[1].Roles)
	require.Equal(t, []string{"anna"}, all[1].Drivers)
	require.Regexp(t, `run +1 +1 +0 +0 +\d+s ago`, u.output("namespaces"))

	require.Contains(t, u.fails(1, "namespaces", "rm", "run"), "1 drivers use namespace run (anna)")
	require.Contains(t, u.output("namespaces", "rm", "run", "--force"), "1 role, 0 reservations and 0 pipelines are gone")
	require.Contains(t, u.output("namespaces", "rm", "other"), "1 reservation")
	require.Contains(t, u.fails(1, "namespaces", "rm", "other"), "namespace other is empty")
	require.Contains(t, u.fails(2, "namespaces", "rm", "a.b"), "namespace")
}
