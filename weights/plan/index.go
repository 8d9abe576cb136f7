package plan

import (
	"slices"
	"sort"
)

// holder is a shard of a source or a unit.
type holder struct{ who, shard int32 }

// shardIndex lists the holders of each tensor.
type shardIndex struct {
	first   []int32 // by tensor; one more at the end
	holders []holder
}

func (x *shardIndex) build(tensors, n int, layout func(int) *Layout) {
	x.first = make([]int32, tensors+1)
	total := 0
	for i := range n {
		for _, t := range layout(i).tensors {
			x.first[t+1]++
			total++
		}
	}
	for t := range tensors {
		x.first[t+1] += x.first[t]
	}
	x.holders = make([]holder, total)
	at := slices.Clone(x.first)
	for i := range n {
		for shard, t := range layout(i).tensors {
			x.holders[at[t]] = holder{int32(i), int32(shard)}
			at[t]++
		}
	}
}

func (x *shardIndex) of(t int32) []holder { return x.holders[x.first[t]:x.first[t+1]] }

// group is the holders of one box.
type group struct {
	box     Box
	members []holder
}

// groups is the different boxes of one tensor, sorted by their coordinates.
type groups struct {
	list []group
	ends []int64 // the largest end in the first dimension up to each
}

// window is the range of groups that may have elements in common with a box.
func (g *groups) window(b Box) (first, last int) {
	from, to := b.start(0), b.end(0)
	if len(g.list) <= 4 {
		return 0, len(g.list)
	}
	first = sort.Search(len(g.ends), func(i int) bool { return g.ends[i] > from })
	last = sort.Search(len(g.list), func(i int) bool { return g.list[i].box.start(0) >= to })
	return first, max(first, last)
}

// grouper makes groups; its memory is used again each time.
type grouper struct {
	groups
	table   []int32 // by hash: group and 1; 0: free
	of      []int32 // by holder
	counts  []int32
	members []holder
}

// group groups holders by their boxes.
func (g *grouper) group(all []holder, box func(holder) Box) *groups {
	g.list, g.ends, g.of, g.counts = g.list[:0], g.ends[:0], g.of[:0], g.counts[:0]
	size := 4
	for size < 2*len(all) {
		size *= 2
	}
	g.table = slices.Grow(g.table[:0], size)[:size]
	clear(g.table)
	for _, e := range all {
		b := box(e)
		slot := hash(b) & uint64(size-1)
		for g.table[slot] != 0 && !slices.Equal(g.list[g.table[slot]-1].box, b) {
			slot = (slot + 1) & uint64(size-1)
		}
		if g.table[slot] == 0 {
			g.list = append(g.list, group{box: b})
			g.counts = append(g.counts, 0)
			g.table[slot] = int32(len(g.list))
		}
		n := g.table[slot] - 1
		g.of = append(g.of, n)
		g.counts[n]++
	}
	g.collect(all)
	slices.SortFunc(g.list, func(a, b group) int { return slices.Compare(a.box, b.box) })
	end := int64(-1)
	for i := range g.list {
		end = max(end, g.list[i].box.end(0))
		g.ends = append(g.ends, end)
	}
	return &g.groups
}

// collect gives each group its members, in the order of all.
func (g *grouper) collect(all []holder) {
	g.members = slices.Grow(g.members[:0], len(all))[:len(all)]
	at := 0
	for i := range g.list {
		n := int(g.counts[i])
		g.list[i].members = g.members[at : at : at+n]
		at += n
	}
	for i, e := range all {
		n := g.of[i]
		g.list[n].members = append(g.list[n].members, e)
	}
}

// hash mixes the numbers of a box.
func hash(b Box) uint64 {
	h := uint64(1469598103934665603)
	for _, n := range b {
		h = (h ^ uint64(n)) * 0x9E3779B97F4A7C15
		h ^= h >> 29
	}
	return h
}

// interner numbers sets of processes.
type interner struct {
	sets   [][]int32
	byHash map[uint64][]int32
	single map[int32]int32
	buffer []int32
}

// of is the number of the set of those that hold something.
func (x *interner) of(list []holder) int32 {
	if len(list) == 1 {
		if n, known := x.single[list[0].who]; known {
			return n
		}
	}
	x.buffer = x.buffer[:0]
	h := uint64(len(list))
	for i, e := range list { // in ascending order: the index was built so
		if i > 0 && e.who == list[i-1].who {
			continue
		}
		x.buffer = append(x.buffer, e.who)
		h = (h ^ uint64(e.who)) * 0x9E3779B97F4A7C15
		h ^= h >> 31
	}
	for _, n := range x.byHash[h] {
		if slices.Equal(x.sets[n], x.buffer) {
			return n
		}
	}
	if x.byHash == nil {
		x.byHash, x.single = map[uint64][]int32{}, map[int32]int32{}
	}
	n := int32(len(x.sets))
	x.sets = append(x.sets, slices.Clone(x.buffer))
	x.byHash[h] = append(x.byHash[h], n)
	if len(x.buffer) == 1 {
		x.single[x.buffer[0]] = n
	}
	return n
}

// empty is the number of the empty set.
func (x *interner) empty() int32 { return x.of(nil) }

func (x *interner) list(n int32) []int32 { return x.sets[n] }
