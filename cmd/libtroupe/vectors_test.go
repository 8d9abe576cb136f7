package main

import (
	"cmp"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/nodes"
	"troupe/placement"
	"troupe/roles"
)

type vector struct {
	Name      string        `json:"name"`
	Mode      string        `json:"mode"`
	Mesh      dispatch.Mesh `json:"mesh"`
	World     int           `json:"world"`
	Input     any           `json:"input"`
	Parts     []any         `json:"parts"`
	DataRanks []int         `json:"data_ranks"`
	Result    any           `json:"result"`
	Error     string        `json:"error"`
}

// headFixture is a server with placement and an agent, in this process.
func headFixture(t *testing.T) *roles.Runtime {
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	b := bustest.Open(t, bus.Config{InProcess: srv})
	service, err := placement.NewService(placement.Config{Bus: b, ID: "here"})
	require.NoError(t, err)
	readyCh := make(chan struct{})
	agent, err := nodes.NewAgent(nodes.AgentConfig{
		Bus: b, Nodes: []nodes.Config{{Name: "here"}}, Dir: t.TempDir(), Access: nodes.Access{URLs: []string{srv.URL()}}, ReadyFunc: func() { close(readyCh) },
	})
	require.NoError(t, err)
	run(t, service.Run)
	run(t, agent.Run)
	select {
	case <-readyCh:
	case <-time.After(2 * time.Minute):
		t.Fatal("the agent is not ready")
	}
	rt, err := roles.Open(t.Context(), roles.Config{BusConfig: bus.Config{InProcess: srv}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, rt.Close(t.Context())) })
	return rt
}

// TestVectors: a Go driver calls Python workers that an agent has started.
func TestVectors(t *testing.T) {
	if testing.Short() {
		t.Skip("many processes")
	}
	exe := python(t)
	tests, err := filepath.Abs("../../python/tests")
	require.NoError(t, err)
	text, err := os.ReadFile(filepath.Join(cmp.Or(os.Getenv("TROUPE_VECTORS"), "../../dispatch/testdata/vectors"), "dispatch.json"))
	require.NoError(t, err)
	var vectors []vector
	require.NoError(t, json.Unmarshal(text, &vectors))
	rt := headFixture(t)
	clusters := map[dispatch.Mesh]*roles.Cluster{}
	for _, v := range vectors {
		t.Run(v.Name, func(t *testing.T) {
			mesh, err := v.Mesh.Resolve(v.World)
			require.NoError(t, err)
			if clusters[mesh] == nil {
				clusters[mesh] = createPython(t, rt, exe, tests, mesh)
			}
			v.check(t, clusters[mesh])
		})
	}
}

func createPython(t *testing.T, rt *roles.Runtime, exe, tests string, mesh dispatch.Mesh) *roles.Cluster {
	args, err := wire.Marshal([]any{[]any{"", map[string]any{}}, nil})
	require.NoError(t, err)
	c, err := rt.Create(t.Context(), roles.Spec{
		Name: "vectors-" + bus.NewID()[:8], Class: "Vector", World: mesh.World(), Mesh: mesh,
		Config: map[string]any{"class": map[string]any{"path": "worker_classes.Vector"}, "args": args},
		Process: &roles.Process{
			Command: []string{exe, "-m", "troupe.worker"},
			Env:     map[string]string{"PYTHONPATH": tests + ":" + os.Getenv("PYTHONPATH"), "PYTHONUNBUFFERED": "1"},
		},
	})
	require.NoError(t, err)
	return c
}

func (v vector) check(t *testing.T, c *roles.Cluster) {
	_, err := c.ExecuteAll(t.Context(), "become", v.Mode, v.Mesh)
	require.NoError(t, err)
	f, err := c.Go(t.Context(), dispatch.Call{Method: "step", Args: []any{v.Input}, Mode: dispatch.Mode(v.Mode)})
	if v.Error != "" {
		require.ErrorContains(t, err, v.Error)
		require.ErrorIs(t, err, bus.ErrInvalid)
		return
	}
	require.NoError(t, err)
	result, err := f.Value(t.Context())
	require.NoError(t, err)
	require.Equal(t, v.Result, plain(t, result))
	seen, err := c.ExecuteAll(t.Context(), "calls")
	require.NoError(t, err)
	var data []int
	for rank, calls := range plain(t, seen).([]any) {
		want := any(nil)
		if rank < len(v.Parts) {
			want = v.Parts[rank]
		}
		if v.Mode == string(dispatch.RankZero) && rank > 0 {
			require.Empty(t, calls)
			continue
		}
		require.Len(t, calls, 1)
		call := calls.([]any)[0].([]any)
		require.Equal(t, want, call[0], "rank %d", rank)
		if call[1].(bool) {
			data = append(data, rank)
		}
	}
	if v.DataRanks != nil {
		require.Equal(t, v.DataRanks, data)
	}
}

// plain converts a value to what JSON decodes.
func plain(t *testing.T, v any) any {
	text, err := json.Marshal(v)
	require.NoError(t, err)
	var out any
	require.NoError(t, json.Unmarshal(text, &out))
	return out
}
