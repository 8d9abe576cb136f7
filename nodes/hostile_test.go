package nodes_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/wire"
)

// TestHostileRequests sends an agent requests whose names cannot be part of a subject or a path. Each is answered with an error, and
// the agent serves on.
func TestHostileRequests(t *testing.T) {
	s := startAgent(t)
	for _, bad := range []string{strings.Repeat("x", 5000), "a.b", "../../x", "a b", ">", "a\r\nPUB x 0\r\n"} {
		id := map[string]any{"namespace": "run", "role": bad, "incarnation": "one", "rank": 0, "gen": 0}
		address := map[string]any{"namespace": "run", "role": bad, "incarnation": "one"}
		for _, request := range []map[string]any{
			{"op": "launch", "launch": map[string]any{"node": "host", "workers": []any{map[string]any{"id": id}}}},
			{"op": "launch", "launch": map[string]any{"node": "host", "reservation": bad, "workers": []any{}}},
			{"op": "launch", "launch": map[string]any{"node": "host", "output_to": address, "workers": []any{}}},
			{"op": "stop", "stop": map[string]any{"ids": []any{id}}},
			{"op": "ports", "ports": map[string]any{"holder": id, "n": 1}},
			{"op": "flush", "role": address},
			{"op": "workers", "role": address},
			{"op": "inspect", "role": address, "inspect": map[string]any{"question": "stacks"}},
		} {
			data, err := wire.Marshal(request)
			require.NoError(t, err)
			m, err := s.bus.Request(t.Context(), bus.NodeDo("host"), data)
			require.NoError(t, err)
			var answer struct {
				Err *bus.Error `msgpack:"err"`
			}
			require.NoError(t, wire.Unmarshal(m.Data, &answer))
			require.ErrorIs(t, answer.Err, bus.ErrInvalid, "%v", request["op"])
		}
	}
	_, err := s.client.Workers(t.Context(), "host")
	require.NoError(t, err)
	require.Zero(t, s.bus.Reconnects())
}
