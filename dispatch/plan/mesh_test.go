package plan

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"troupe/bus/wire"
)

func TestMeshResolve(t *testing.T) {
	for _, c := range []struct {
		mesh     Mesh
		world    int
		want     Mesh
		receiver string
	}{
		{Mesh{}, 4, Mesh{DP: 4, TP: 1, PP: 1, CP: 1}, ""},
		{Mesh{TP: 2, PP: 2}, 8, Mesh{DP: 2, TP: 2, PP: 2, CP: 1}, ""},
		{Mesh{DP: 2, TP: 2, PP: 1, CP: 2}, 8, Mesh{DP: 2, TP: 2, PP: 1, CP: 2}, ""},
		{Mesh{DP: 2, TP: 2, PP: 2}, 6, Mesh{}, "mesh tp 2 × cp 1 × dp 2 × pp 2 = 8 does not multiply to the world of 6 ranks"},
		{Mesh{DP: 2, TP: 2}, 8, Mesh{}, "mesh tp 2 × cp 1 × dp 2 × pp 1 = 4 does not multiply to the world of 8 ranks"},
		{Mesh{TP: 3}, 8, Mesh{}, "tp 3 × cp 1 × pp 1 = 3 does not divide the world of 8 ranks"},
		{Mesh{TP: 1 << 32, PP: 1 << 32}, 8, Mesh{}, "does not divide the world of 8 ranks"},
		{Mesh{CP: -1}, 8, Mesh{}, "cp is -1, it must be at least 1"},
		{Mesh{}, 0, Mesh{}, "a world of 0 ranks"},
	} {
		got, err := c.mesh.Resolve(c.world)
		if c.receiver != "" {
			assert.ErrorContains(t, err, c.receiver)
			assert.ErrorIs(t, err, wire.ErrInvalid)
			continue
		}
		require.NoError(t, err)
		assert.Equal(t, c.want, got)
	}
}

func TestMeshCoordAndRankAreInverse(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		mesh := anyMesh.Draw(t, "mesh")
		for rank := range mesh.World() {
			require.Equal(t, rank, mesh.Rank(mesh.Coord(rank)))
		}
	})
}

func TestMeshInfo(t *testing.T) {
	mesh := Mesh{DP: 2, TP: 2, PP: 2, CP: 1}
	info, err := mesh.Info(6)
	require.NoError(t, err)
	assert.Equal(t, RankInfo{Rank: 6, WorldSize: 8, DPRank: 1, DPSize: 2, TPSize: 2, PPRank: 1, PPSize: 2, CPSize: 1}, info)
	_, err = mesh.Info(8)
	assert.ErrorContains(t, err, "there is no rank 8: the ranks are 0 to 7")
}

func TestSelector(t *testing.T) {
	mesh := Mesh{DP: 2, TP: 2, PP: 2, CP: 1}
	for text, want := range map[string][]int{
		"":               {0, 1, 2, 3, 4, 5, 6, 7},
		"tp=0":           {0, 2, 4, 6},
		"tp=0,dp=1":      {2, 6},
		" PP = 1 , tp=1": {5, 7},
	} {
		s, err := ParseSelector(text)
		require.NoError(t, err)
		ranks, err := mesh.Select(s)
		require.NoError(t, err)
		assert.Equal(t, want, ranks, text)
	}
	ranks, err := mesh.Select(Where(TP, 0).And(DP, 1))
	require.NoError(t, err)
	assert.Equal(t, []int{2, 6}, ranks)
}

func TestSelectorRefuses(t *testing.T) {
	mesh := Mesh{DP: 2, TP: 2, PP: 2, CP: 1}
	for text, receiver := range map[string]string{
		"xp=0":      `there is no axis "xp", only tp, cp, dp and pp`,
		"tp":        `"tp" is not of the form axis=coordinate`,
		"tp=0,":     `"" is not of the form axis=coordinate`,
		"tp=a":      `"a" is not a coordinate`,
		"tp=-1":     "coordinates start at 0",
		"tp=0,tp=1": "tp is given twice",
		"dp=1,tp=2": `selector "dp=1,tp=2": there is no tp=2, the mesh has tp 0 to 1`,
	} {
		s, err := ParseSelector(text)
		if err == nil {
			_, err = mesh.Select(s)
		}
		assert.ErrorContains(t, err, receiver)
		assert.ErrorIs(t, err, wire.ErrInvalid)
	}
}
