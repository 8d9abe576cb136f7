package wire_test

import (
	"maps"
	"slices"
	"testing"

	"troupe/bus/wire"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestRankSetIsASet(t *testing.T) {
	rank := rapid.IntRange(0, 300)
	rapid.Check(t, func(t *rapid.T) {
		var s wire.RankSet
		model := map[int]bool{}
		t.Repeat(map[string]func(*rapid.T){
			"add":    func(t *rapid.T) { r := rank.Draw(t, "r"); s.Add(r); model[r] = true },
			"remove": func(t *rapid.T) { r := rapid.IntRange(-5, 10_000).Draw(t, "r"); s.Remove(r); delete(model, r) },
			"clone": func(t *rapid.T) {
				c := s.Clone()
				c.Add(301)
				require.False(t, s.Has(301))
			},
			"": func(t *rapid.T) {
				require.Equal(t, slices.Sorted(maps.Keys(model)), append([]int(nil), s.List()...))
				require.Equal(t, len(model), s.Len())
				r := rapid.IntRange(-5, 10_000).Draw(t, "probe")
				require.Equal(t, model[r], s.Has(r))
			},
		})
	})
}
