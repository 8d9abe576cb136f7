package planner

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseMapping(t *testing.T) {
	for text, want := range map[string][]int{
		"list(range(0,8))":                     {0, 1, 2, 3, 4, 5, 6, 7},
		"list(range(0,2))+list(range(4,6))":    {0, 1, 4, 5},
		" list( range( 0 , 2 ) )\n+ [ 7 , 5 ]": {0, 1, 7, 5},
		"list([3,1])":                          {3, 1},
		"[0,1,2]":                              {0, 1, 2},
		"[4,]":                                 {4},
		"list(range(3))":                       {0, 1, 2},
		"list(range(0,8,3))":                   {0, 3, 6},
		"[]+[1]":                               {1},
		"list(range(5,2))+[1]":                 {1},
	} {
		got, err := ParseMapping(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
}

func TestParseMappingRefuses(t *testing.T) {
	for text, says := range map[string]string{
		"":                         "the end",
		"[]":                       "no device",
		"list(range(4,4))":         "no device",
		"__import__('os')":         "__import__",
		"list(map(int,'01'))":      "map",
		"list(range(0,8)":          "the end",
		"list(range(0,8)))":        ")",
		"list(range(0,8,0))":       "step 0",
		"list(range(0,8,1,1))":     ",1",
		"range(0,8)":               "range",
		"[0 1]":                    "1]",
		"[-1]":                     "-1",
		"[1.5]":                    ".5",
		"[0]+":                     "the end",
		"[99999999999999999999]":   "99999999999999999999",
		"list(range(0,900000000))": "too long",
		"[[0]]":                    "[0]",
		strings.Repeat("[", 1<<21): "too long",
	} {
		_, err := ParseMapping(text)
		require.ErrorIs(t, err, ErrBadMapping, text)
		require.ErrorIs(t, err, ErrInvalid, text)
		require.ErrorContains(t, err, says, text)
		require.Less(t, len(err.Error()), 400)
	}
}

// For any text the parser ends, allocates within its bounds, and its result parses to the same when written as a list.
func FuzzParseMapping(f *testing.F) {
	for _, seed := range []string{"list(range(0,8))", "list(range(0,2)) + list([3]) + [4,5,]", "[0", "list(", "__import__('os')", "list(range(1,900000,7))"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		ids, err := ParseMapping(text)
		if err != nil {
			require.ErrorIs(t, err, ErrBadMapping)
			return
		}
		require.NotEmpty(t, ids)
		require.LessOrEqual(t, len(ids), maxMappingIDs)
		require.GreaterOrEqual(t, slices.Min(ids), 0)
		if written := strings.Join(strings.Fields(fmt.Sprint(ids)), ","); len(written) <= maxMappingText {
			again, err := ParseMapping(written)
			require.NoError(t, err)
			require.Equal(t, ids, again)
		}
	})
}
