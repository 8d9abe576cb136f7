package dispatch

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"troupe/actors"
)

// TestEachShardIsPublishedOnce: 32 ranks need each shard, and the driver's connection carries it once.
func TestEachShardIsPublishedOnce(t *testing.T) {
	mesh := Mesh{DP: 2, TP: 4, PP: 4, CP: 2}
	class := methods{"len": func(_ context.Context, _ int, args actors.Args) (any, error) {
		return []int{len(args.Positional[0])}, nil
	}}.class(actors.Serial)
	for _, c := range []struct {
		name  string
		start func(*busFixture) *Group
		row   int     // bytes; a shard is two rows
		most  float64 // limit of the bytes sent, in multiples of the data; on a busy machine a receiver may ask again
	}{
		{"small shards, a connection each", func(s *busFixture) *Group { return s.startRoleApart(mesh, class) }, 24 << 10, 1.02},
		{"small shards, one connection", func(s *busFixture) *Group { return s.startRole(mesh, class) }, 24 << 10, 1.02},
		{"large shards, a connection each", func(s *busFixture) *Group { return s.startRoleApart(mesh, class) }, 128 << 10, 4},
		{"large shards, one connection", func(s *busFixture) *Group { return s.startRole(mesh, class) }, 2 << 20, 1.5},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := c.start(newBusFixture(t))
			rows := [][]byte{make([]byte, c.row), make([]byte, c.row), make([]byte, c.row), make([]byte, c.row)}
			data := uint64(4 * c.row)
			sent := bytesSent(t, g, rows)
			for try := 1; sent > data+data/50 && try < 5; try++ {
				t.Logf("%d bytes: a receiver asked again", sent)
				sent = min(sent, bytesSent(t, g, rows))
			}
			t.Logf("%d ranks need %d bytes each; the driver published %d bytes for %d of data (%.3f times)", mesh.World(), 2*c.row, sent, data, float64(sent)/float64(data))
			require.GreaterOrEqual(t, sent, data)
			require.Less(t, float64(sent), c.most*float64(data))
		})
	}
}

// bytesSent counts the bytes that the driver's connection sends during one call.
func bytesSent(t *testing.T, g *Group, rows [][]byte) uint64 {
	conn := g.Endpoint.Bus().Conn()
	before := conn.Stats().OutBytes
	f, err := g.Go(patient(t), Call{Method: "len", Mode: DPMPCompute, Args: []any{rows}})
	require.NoError(t, err)
	sizes, err := Await[[]int](patient(t), f)
	require.NoError(t, err)
	for _, n := range sizes {
		require.Greater(t, n, 2*len(rows[0]))
	}
	return conn.Stats().OutBytes - before
}
