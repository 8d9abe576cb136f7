package nodes

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// RankRanges formats a set of ranks: "0-3,7".
func RankRanges(set map[int]bool) string {
	var all []int
	for rank := range set {
		all = append(all, rank)
	}
	slices.SortFunc(all, cmp.Compare[int])
	var out []string
	for i := 0; i < len(all); {
		j := i
		for j+1 < len(all) && all[j+1] == all[j]+1 {
			j++
		}
		if i == j {
			out = append(out, strconv.Itoa(all[i]))
		} else {
			out = append(out, fmt.Sprintf("%d-%d", all[i], all[j]))
		}
		i = j + 1
	}
	return strings.Join(out, ",")
}
