package nodes

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	mergeFor  = 5 * time.Second // how long a repeated line is counted rather than shown
	mergeMost = 1024            // texts that are remembered
)

// LineMerger merges equal lines of many workers for display: a text that several ranks print, or one prints repeatedly, is
// shown once and then counted. It has no clock: its methods take the time.
type LineMerger struct {
	texts map[string]*mergedLine
	order []string // oldest first
}

type mergedLine struct {
	first  Line
	times  int // repetitions
	ranks  map[int]bool
	expiry time.Time
}

// Add adds a line and returns the lines to display now.
func (f *LineMerger) Add(l Line, now time.Time) []string {
	out := f.Tick(now)
	key := l.ID.Role + "\x00" + l.Text
	if old := f.texts[key]; old != nil {
		old.times++
		old.ranks[l.ID.Rank] = true
		return out
	}
	if f.texts == nil {
		f.texts = map[string]*mergedLine{}
	}
	for len(f.order) >= mergeMost {
		out = append(out, f.pop()...)
	}
	f.texts[key] = &mergedLine{first: l, ranks: map[int]bool{l.ID.Rank: true}, expiry: now.Add(mergeFor)}
	f.order = append(f.order, key)
	return append(out, fmt.Sprintf("%s/%d: %s", l.ID.Role, l.ID.Rank, l.Text))
}

// Tick returns the counts of the lines whose time is over.
func (f *LineMerger) Tick(now time.Time) (out []string) {
	for len(f.order) > 0 && !f.texts[f.order[0]].expiry.After(now) {
		out = append(out, f.pop()...)
	}
	return out
}

// Flush returns the counts of all lines.
func (f *LineMerger) Flush() (out []string) {
	for len(f.order) > 0 {
		out = append(out, f.pop()...)
	}
	return out
}

func (f *LineMerger) pop() []string {
	key := f.order[0]
	old := f.texts[key]
	f.order = f.order[1:]
	delete(f.texts, key)
	if old.times == 0 {
		return nil
	}
	return []string{fmt.Sprintf("%s/%s: %s [%d times more]", old.first.ID.Role, ranges(old.ranks), old.first.Text, old.times)}
}

// ranges formats a set of ranks: "0-3,7".
func ranges(set map[int]bool) string {
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
