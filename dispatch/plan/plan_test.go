package plan

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"troupe/bus/wire"
)

var anyMesh = rapid.Custom(func(t *rapid.T) Mesh {
	size := rapid.IntRange(1, 4)
	return Mesh{DP: size.Draw(t, "dp"), TP: size.Draw(t, "tp"), PP: size.Draw(t, "pp"), CP: size.Draw(t, "cp")}
})

var anyMode = rapid.SampledFrom(Modes())

// TestPlanPublishesEveryShardOnce: every called rank is in one part, and every shard is in one.
func TestPlanPublishesEveryShardOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		mesh, mode := anyMesh.Draw(t, "mesh"), anyMode.Draw(t, "mode")
		p, err := NewPlan(mode, mesh)
		require.NoError(t, err)

		parts := make([]int, mesh.World())
		shards := make([]int, p.Shards)
		bare := 0
		for _, part := range p.Parts {
			for _, rank := range part.Ranks {
				parts[rank]++
			}
			if part.Shard == NoData {
				bare++
			} else {
				shards[part.Shard]++
			}
			checkTarget(t, mesh, part)
		}
		want := slices.Repeat([]int{1}, mesh.World())
		if mode == RankZero {
			want = append([]int{1}, make([]int, mesh.World()-1)...)
		}
		require.Equal(t, want, parts)
		require.Equal(t, slices.Repeat([]int{1}, p.Shards), shards)
		require.LessOrEqual(t, bare, 1)
		require.Len(t, p.Unsplit().Parts, 1)
		require.Equal(t, p.Collect, p.Unsplit().Collect)
	})
}

// checkTarget compares a target with the ranks that its subject reaches.
func checkTarget(t *rapid.T, mesh Mesh, part Part) {
	var reached []int
	for rank := range mesh.World() {
		heard := map[TargetKind]bool{
			ToRole: true, ToRank: rank == part.Target.N, ToSlice: mesh.Coord(rank).DP == part.Target.N,
		}
		if heard[part.Target.Kind] {
			reached = append(reached, rank)
		}
	}
	if part.Target.Partial {
		require.Subset(t, reached, part.Ranks)
		require.Less(t, len(part.Ranks), len(reached))
		return
	}
	require.Equal(t, reached, part.Ranks)
}

// TestPlanCollectsRowsInDPOrder: rows are collected from every replica, in dp order.
func TestPlanCollectsRowsInDPOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		mesh := anyMesh.Draw(t, "mesh")
		for _, mode := range []Mode{DPMPCompute, DPMPDispatchFirst} {
			p, err := NewPlan(mode, mesh)
			require.NoError(t, err)
			require.Len(t, p.Collect, mesh.DP)
			for dp, rank := range p.Collect {
				require.Equal(t, Coord{DP: dp, PP: mesh.PP - 1}, mesh.Coord(rank))
			}
		}
	})
}

func TestPlanTargets(t *testing.T) {
	mesh := Mesh{DP: 2, TP: 2, PP: 2, CP: 1}
	for _, c := range []struct {
		mode Mode
		want []Part
	}{
		{RankZero, []Part{{0, []int{0}, Target{Kind: ToRank}}}},
		{OneToAll, []Part{{0, []int{0, 1, 2, 3, 4, 5, 6, 7}, Target{Kind: ToRole}}}},
		{DPMPCompute, []Part{
			{0, []int{0, 1, 4, 5}, Target{Kind: ToSlice}},
			{1, []int{2, 3, 6, 7}, Target{Kind: ToSlice, N: 1}},
		}},
		{DPMPDispatchFirst, []Part{
			{0, []int{0}, Target{Kind: ToRank}},
			{1, []int{2}, Target{Kind: ToRank, N: 2}},
			{NoData, []int{1, 3, 4, 5, 6, 7}, Target{Kind: ToRole, Partial: true}},
		}},
	} {
		p, err := NewPlan(c.mode, mesh)
		require.NoError(t, err)
		assert.Equal(t, c.want, p.Parts, c.mode)
	}
}

func TestPlanRanks(t *testing.T) {
	mesh := Mesh{DP: 2, TP: 2, PP: 1, CP: 1}
	p, err := PlanRanks(mesh, []int{3, 2})
	require.NoError(t, err)
	assert.Equal(t, []Part{{0, []int{2, 3}, Target{Kind: ToSlice, N: 1}}}, p.Parts)
	assert.Equal(t, []int{3, 2}, p.Collect, "answers come in the order in which the ranks were named")

	for receiver, ranks := range map[string][]int{
		"there is no rank 4: the ranks are 0 to 3": {1, 4},
		"rank 1 is named twice":                    {1, 0, 1},
		"one rank at least":                        {},
	} {
		_, err := PlanRanks(mesh, ranks)
		assert.ErrorContains(t, err, receiver)
		assert.ErrorIs(t, err, wire.ErrInvalid)
	}
}

func TestPlanRefuses(t *testing.T) {
	_, err := NewPlan("DP_MP", Mesh{DP: 1, TP: 1, PP: 1, CP: 1})
	assert.ErrorContains(t, err, `there is no dispatch mode "DP_MP": the modes are RANK_ZERO, ONE_TO_ALL, ONE_TO_ALL_ONE, ALL_TO_ALL, DP_MP_COMPUTE`)
	_, err = NewPlan(OneToAll, Mesh{TP: 2})
	assert.ErrorContains(t, err, "mesh tp=2 cp=0 dp=0 pp=0 is not resolved")
}

func TestCustomMode(t *testing.T) {
	mesh := Mesh{DP: 4, TP: 1, PP: 1, CP: 1}
	halves := Custom{
		Name: "HALVES",
		SplitFunc: func(m Mesh, args []any) ([]Piece, error) {
			return []Piece{{Ranks: []int{0, 1}, Args: args[:1]}, {Ranks: []int{2}, Args: args[1:]}}, nil
		},
		CollectFunc: func(Mesh) []int { return []int{2, 0} },
		MergeFunc:   func(_ Mesh, answers []any) (any, error) { return answers[0].(int) - answers[1].(int), nil },
	}
	s, err := halves.Cut(mesh, []any{"a", "b"})
	require.NoError(t, err)
	assert.Equal(t, []any{"a"}, s.Args(s.Plan.Parts[0]))
	assert.Equal(t, []any{"b"}, s.Args(s.Plan.Parts[1]))
	result, err := s.Merge([]any{5, 3})
	require.NoError(t, err)
	assert.Equal(t, 2, result)

	halves.CollectFunc = func(Mesh) []int { return []int{3} }
	_, err = halves.Cut(mesh, []any{"a", "b"})
	assert.ErrorContains(t, err, "HALVES collects the answer of rank 3, which it does not call")
	halves.SplitFunc = func(Mesh, []any) ([]Piece, error) { return []Piece{{Ranks: []int{1}}, {Ranks: []int{1}}}, nil }
	_, err = halves.Cut(mesh, nil)
	assert.ErrorContains(t, err, "HALVES sends rank 1 two parts")
}
