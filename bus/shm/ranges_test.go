package shm

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWholePages(t *testing.T) {
	page := pageSize
	for name, c := range map[string]struct {
		ranges, want []Range
	}{
		"none":                   {nil, nil},
		"a byte":                 {[]Range{{page + 5, 1}}, []Range{{page, page}}},
		"across a border":        {[]Range{{page - 1, 2}}, []Range{{0, 2 * page}}},
		"neighbours, unsorted":   {[]Range{{2 * page, page}, {page, page}}, []Range{{page, 2 * page}}},
		"two on one page":        {[]Range{{0, 10}, {20, 10}}, []Range{{0, page}}},
		"one inside another":     {[]Range{{0, 3 * page}, {page, 1}}, []Range{{0, 3 * page}}},
		"apart":                  {[]Range{{0, 1}, {3 * page, 1}}, []Range{{0, page}, {3 * page, page}}},
		"past the end":           {[]Range{{7 * page, 10 * page}}, []Range{{7 * page, page}}},
		"outside":                {[]Range{{9 * page, page}, {-page, 1}}, nil},
		"begins before the body": {[]Range{{-5, 10}}, []Range{{0, page}}},
	} {
		require.Equal(t, c.want, wholePages(c.ranges, 8*page), name)
	}
}
