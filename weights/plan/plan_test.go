package plan

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// process is a source or a receiver with memory: each shard is an array of element numbers of its tensor.
type process struct {
	layout *Layout
	shards [][]int32
	memory []Memory
}

// eachElement calls do with the index of each element of a box in the whole tensor, row by row, and its position in the box.
func eachElement(shape []int64, b Box, do func(whole, position int64)) {
	at := slices.Clone(b[:b.dims()])
	for position := range b.Elements() {
		whole := int64(0)
		for i, n := range shape {
			whole = whole*n + at[i]
		}
		do(whole, position)
		for i := b.dims() - 1; i >= 0; i-- {
			if at[i]++; at[i] < b.end(i) {
				break
			}
			at[i] = b.start(i)
		}
	}
}

// newProcess makes a process whose shards are contiguous, or transposed in memory.
func newProcess(c *Catalog, l *Layout, transposed, filled bool) process {
	p := process{layout: l}
	for i := range l.Len() {
		box := l.Box(i)
		strides := make([]int64, box.dims())
		n := int64(4)
		for k := range strides {
			if d := len(strides) - 1 - k; !transposed {
				strides[d] = n
				n *= box.size(d)
			} else {
				strides[k] = n
				n *= box.size(k)
			}
		}
		data := make([]int32, box.Elements())
		p.shards, p.memory = append(p.shards, data), append(p.memory, Memory{strides})
		if !filled {
			continue
		}
		tensor := l.Tensor(i)
		eachElement(c.Tensors[tensor].Shape, box, func(whole, position int64) {
			data[p.at(i, position)] = int32(tensor)<<20 | int32(whole)
		})
	}
	return p
}

// at is the index in memory of the element at a position of a shard.
func (p process) at(shard int, position int64) int64 {
	box, at := p.layout.Box(shard), int64(0)
	for i := box.dims() - 1; i >= 0; i-- {
		at += position % box.size(i) * p.memory[shard].Strides[i] / 4
		position /= box.size(i)
	}
	return at
}

// copyAll carries out copies between buckets and shards, element by element.
func (p process) copyAll(copies []Copy, buckets [][]int32, pack bool) {
	for _, c := range copies {
		linear := c.Offset / 4
		for j := range c.N[1] {
			for i := range c.N[0] {
				for k := range c.Run / 4 {
					memory := (c.At + j*c.Stride[1] + i*c.Stride[0]) / 4
					if pack {
						buckets[c.Bucket][linear] = p.shards[c.Shard][memory+k]
					} else {
						p.shards[c.Shard][memory+k] = buckets[c.Bucket][linear]
					}
					linear++
				}
			}
		}
	}
}

// move packs, moves and takes what a plan says, and returns the bytes that units take.
func move(t require.TestingT, c *Catalog, p *Plan, sources, units []process) {
	buckets := make([][]int32, len(p.Buckets))
	for i, b := range p.Buckets {
		buckets[i] = make([]int32, b.Bytes/4)
	}
	of := func(part Part) (own [][]int32) {
		for _, b := range part.Buckets {
			own = append(own, buckets[b.Number])
		}
		return own
	}
	for i, s := range sources {
		part := decoded(t, c, s.layout, p.OfSource(i))
		s.copyAll(part.Copies(c, s.layout, s.memory), of(part), true)
	}
	for i, u := range units {
		if p.Refused[i] == nil {
			part := decoded(t, c, u.layout, p.OfUnit(i))
			u.copyAll(part.Copies(c, u.layout, u.memory), of(part), false)
		}
	}
}

func decoded(t require.TestingT, c *Catalog, l *Layout, part Part) Part {
	out, err := DecodePart(c, l, part.Encode())
	require.NoError(t, err)
	require.Equal(t, len(part.Pieces), len(out.Pieces))
	return out
}

// cuts draws positions at which an axis is cut, with 0 and its size.
func cuts(t *rapid.T, n int64) []int64 {
	at := rapid.SliceOfN(rapid.Int64Range(0, n), 0, 3).Draw(t, "cuts")
	slices.Sort(at)
	return slices.Compact(append(append([]int64{0}, at...), n))
}

// grid draws boxes that tile a shape.
func grid(t *rapid.T, shape []int64) (out []Box) {
	out = []Box{append(make(Box, len(shape)), shape...)}
	for i, n := range shape {
		at := cuts(t, n)
		var next []Box
		for _, b := range out {
			for j := range len(at) - 1 {
				part := slices.Clone(b)
				part[i], part[len(shape)+i] = at[j], at[j+1]-at[j]
				next = append(next, part)
			}
		}
		out = next
	}
	return out
}

// flat draws a cut of the elements in row order, as FSDP cuts a flattened parameter; each range becomes boxes.
func flat(t *rapid.T, shape []int64) (out [][]Box) {
	n := Box(append(make([]int64, len(shape)), shape...)).Elements()
	at := cuts(t, n)
	for i := range len(at) - 1 {
		out = append(out, Range(shape, at[i], at[i+1]-at[i]))
	}
	return out
}

// drawLayouts draws how some processes have the tensors of a model; complete: together they have all of it.
func drawLayouts(t *rapid.T, c *Catalog, count int, complete bool) []*Layout {
	shards := make([][]Shard, count)
	give := func(tensor int, boxes []Box) {
		all := rapid.IntRange(0, 3).Draw(t, "replicas") == 0
		who := rapid.IntRange(0, count-1).Draw(t, "who")
		for i := range count {
			if all || i == who {
				for _, b := range boxes {
					if !slices.ContainsFunc(shards[i], func(s Shard) bool { return s.Tensor == tensor && slices.Equal(s.Box, b) }) {
						shards[i] = append(shards[i], Shard{tensor, b})
					}
				}
			}
		}
	}
	for tensor, whole := range c.Tensors {
		if !complete && rapid.IntRange(0, 5).Draw(t, "absent") == 0 {
			continue
		}
		for range rapid.IntRange(1, 2).Draw(t, "ways") {
			if rapid.Bool().Draw(t, "flat") {
				for _, boxes := range flat(t, whole.Shape) {
					give(tensor, boxes)
				}
			} else {
				for _, b := range grid(t, whole.Shape) {
					give(tensor, []Box{b})
				}
			}
		}
	}
	out := make([]*Layout, count)
	for i := range out {
		var err error
		out[i], err = c.Layout(shards[i]...)
		require.NoError(t, err)
	}
	return out
}

func drawPlace(t *rapid.T) Place {
	p := Place{Host: int32(rapid.IntRange(0, 2).Draw(t, "host"))}
	if p.Host > 0 {
		p.Device = int32(rapid.IntRange(0, 2).Draw(t, "device"))
	}
	return p
}

// TestEveryLayoutToEveryOther: after a plan is carried out every receiver has the right number in every element, nothing is packed
// outside of a source's memory, and what moves is each different wanted box once for each place that has sources of its own.
func TestEveryLayoutToEveryOther(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := &Catalog{}
		for i := range rapid.IntRange(1, 4).Draw(t, "tensors") {
			shape := rapid.SliceOfN(rapid.Int64Range(1, 6), 1, 4).Draw(t, "shape")
			_, err := c.Add(Tensor{fmt.Sprint("t", i), "int32", 4, shape})
			require.NoError(t, err)
		}
		var sources []Source
		var units []Unit
		var from, to []process
		for _, l := range drawLayouts(t, c, rapid.IntRange(1, 5).Draw(t, "sources"), true) {
			sources = append(sources, Source{l, drawPlace(t)})
			from = append(from, newProcess(c, l, rapid.Bool().Draw(t, "transposed"), true))
		}
		for _, l := range drawLayouts(t, c, rapid.IntRange(0, 5).Draw(t, "units")+1, false) {
			units = append(units, Unit{l, drawPlace(t)})
			to = append(to, newProcess(c, l, rapid.Bool().Draw(t, "transposed"), false))
		}
		p := Make(c, sources, units)
		move(t, c, p, from, to)
		for i, u := range to {
			want := newProcess(c, u.layout, false, true)
			if p.Refused[i] != nil {
				require.Zero(t, u.layout.Len(), "%v", p.Refused[i])
			}
			for shard := range u.shards {
				for position := range int64(len(u.shards[shard])) {
					require.Equal(t, want.shards[shard][want.at(shard, position)], u.shards[shard][u.at(shard, position)])
				}
			}
		}
		require.Equal(t, leastBytes(c, p, sources, units), p.Bytes())
		again := Make(c, sources, units)
		require.Equal(t, p.Buckets, again.Buckets, "the plan does not depend on its arguments alone")
	})
}

// leastBytes is the sum of the different boxes that units want, by element: bytes of which a copy is nearer to some units than to
// others count once for each group.
func leastBytes(c *Catalog, p *Plan, sources []Source, units []Unit) int64 {
	type wanted struct {
		tensor int
		box    string
	}
	seen := map[wanted]map[int64]map[Place]bool{}
	for i, u := range units {
		if p.Refused[i] != nil {
			continue
		}
		for shard := range u.Layout.Len() {
			tensor, box := u.Layout.Tensor(shard), u.Layout.Box(shard)
			key := wanted{tensor, fmt.Sprint(box)}
			if seen[key] == nil {
				seen[key] = map[int64]map[Place]bool{}
			}
			eachElement(c.Tensors[tensor].Shape, box, func(whole, _ int64) {
				if seen[key][whole] == nil {
					seen[key][whole] = map[Place]bool{}
				}
				seen[key][whole][nearestWith(c, sources, u.Place, tensor, box, whole)] = true
			})
		}
	}
	var n int64
	for _, elements := range seen {
		for _, places := range elements {
			n += 4 * int64(len(places))
		}
	}
	return n
}

// nearestWith is the place where a unit finds an element: that of the sources whose box, the first in order, gives it.
func nearestWith(c *Catalog, sources []Source, at Place, tensor int, box Box, whole int64) Place {
	var boxes []Box
	holders := map[string][]int{}
	for i, s := range sources {
		for shard := range s.Layout.Len() {
			if s.Layout.Tensor(shard) != tensor {
				continue
			}
			b, has := s.Layout.Box(shard), false
			eachElement(c.Tensors[tensor].Shape, b, func(w, _ int64) { has = has || w == whole })
			if has {
				if holders[fmt.Sprint(b)] == nil {
					boxes = append(boxes, b)
				}
				holders[fmt.Sprint(b)] = append(holders[fmt.Sprint(b)], i)
			}
		}
	}
	first := slices.MinFunc(boxes, func(a, b Box) int { return slices.Compare(a, b) })
	best := Place{}
	all := holders[fmt.Sprint(first)]
	if len(all) == 1 {
		return best // one source packs it once for all
	}
	for _, i := range all {
		if p := sources[i].Place; p.Host != 0 && p.Host == at.Host {
			best.Host = p.Host
		}
	}
	for _, i := range all {
		if p := sources[i].Place; best.Host != 0 && p.Device != 0 && p == at {
			return p
		}
	}
	return best
}

func shard(t *testing.T, c *Catalog, name string, shape []int64, box Box) Shard {
	t.Helper()
	i, err := c.Add(Tensor{name, "float32", 4, shape})
	require.NoError(t, err)
	return Shard{i, box}
}

func layout(t *testing.T, c *Catalog, shards ...Shard) *Layout {
	t.Helper()
	l, err := c.Layout(shards...)
	require.NoError(t, err)
	return l
}

// TestWhatDoesNotFitIsNamed: each mistake is an error that names the tensor, and the other units are planned as without it.
func TestWhatDoesNotFitIsNamed(t *testing.T) {
	c := &Catalog{}
	half := layout(t, c, shard(t, c, "a", []int64{4, 4}, Box{0, 0, 2, 4}))
	whole := layout(t, c, shard(t, c, "a", []int64{4, 4}, Box{0, 0, 4, 4}))
	other := layout(t, c, shard(t, c, "b", []int64{2}, Box{0, 2}))
	p := Make(c, []Source{{Layout: half}}, []Unit{{Layout: half}, {Layout: whole}, {Layout: other}, {Layout: layout(t, c)}})
	require.NoError(t, p.Refused[0])
	for unit, part := range map[int]string{1: `tensor "a"`, 2: `tensor "b": no process that publishes has it`, 3: "nothing would move"} {
		require.ErrorContains(t, p.Refused[unit], part)
	}
	require.Equal(t, int64(32), p.Bytes())

	_, err := c.Add(Tensor{"a", "bfloat16", 2, []int64{4, 4}})
	require.ErrorContains(t, err, `tensor "a": its dtype is bfloat16 here and float32 elsewhere`)
	_, err = c.Add(Tensor{"a", "float32", 4, []int64{4, 5}})
	require.ErrorContains(t, err, `tensor "a": its shape as a whole is [4 5] here and [4 4] elsewhere`)
	_, err = c.Layout(Shard{0, Box{3, 0, 2, 4}})
	require.ErrorContains(t, err, "does not lie in its shape")
	_, err = c.Layout(Shard{0, Box{0, 0, 2, 4}}, Shard{0, Box{0, 0, 2, 4}})
	require.ErrorContains(t, err, "bound twice")
}

// TestReceiversTakeFromTheirOwnHost: of sources with the same bytes those on a receiver's device are used, then those of its host,
// and receivers elsewhere share one source.
func TestReceiversTakeFromTheirOwnHost(t *testing.T) {
	c := &Catalog{}
	l := layout(t, c, shard(t, c, "a", []int64{8}, Box{0, 8}))
	sources := []Source{{l, Place{1, 1}}, {l, Place{1, 2}}, {l, Place{2, 1}}}
	p := Make(c, sources, []Unit{{l, Place{1, 2}}, {l, Place{2, 9}}, {Layout: l}})
	require.Empty(t, p.Refused)
	of := map[int32]int32{}
	for _, b := range p.Buckets {
		for _, u := range b.Units {
			of[u] = b.Source
		}
	}
	require.Equal(t, map[int32]int32{0: 1, 1: 2, 2: 0}, of)
}

// TestReplicasShareTheWork: each of several equal sources packs its share of what all receivers need.
func TestReplicasShareTheWork(t *testing.T) {
	c := &Catalog{}
	var shards []Shard
	for i := range 100 {
		shards = append(shards, shard(t, c, fmt.Sprint(i), []int64{1000}, Box{0, 1000}))
	}
	l := layout(t, c, shards...)
	p := Make(c, []Source{{Layout: l}, {Layout: l}, {Layout: l}, {Layout: l}}, []Unit{{Layout: l}})
	for i := range 4 {
		var n int64
		for _, b := range p.OfSource(i).Buckets {
			n += b.Bytes
		}
		require.InDelta(t, 100_000, n, 5_000)
	}
	require.Equal(t, int64(400_000), p.Bytes())
	none := Make(c, []Source{{Layout: l}, {Layout: l}}, nil)
	require.Len(t, none.OfSource(0).Pieces, 50, "without receivers each byte is kept once")
}

// TestFlatRanges: a range of the elements in row order is few boxes, which have exactly these elements.
func TestFlatRanges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		shape := rapid.SliceOfN(rapid.Int64Range(1, 5), 1, 4).Draw(t, "shape")
		n := Box(append(make([]int64, len(shape)), shape...)).Elements()
		start := rapid.Int64Range(0, n).Draw(t, "start")
		count := rapid.Int64Range(0, n-start).Draw(t, "count")
		var got []int64
		boxes := Range(shape, start, count)
		for _, b := range boxes {
			eachElement(shape, b, func(whole, _ int64) { got = append(got, whole) })
		}
		require.LessOrEqual(t, len(boxes), 2*len(shape)-1)
		for i := range count {
			require.Equal(t, start+i, got[i])
		}
		require.Len(t, got, int(count))
	})
}

// TestHostileParts: a part that was changed on its way is refused, or describes memory of the process alone.
func TestHostileParts(t *testing.T) {
	c := &Catalog{}
	l := layout(t, c, shard(t, c, "a", []int64{4, 4}, Box{2, 0, 2, 4}))
	part := Make(c, []Source{{Layout: l}}, []Unit{{Layout: l}}).OfSource(0)
	data := part.Encode()
	_, err := DecodePart(c, l, data)
	require.NoError(t, err)
	refused := 0
	for i := range data {
		for _, b := range []byte{0, 1, 0x7f, 0x80, 0xff} {
			changed := slices.Clone(data)
			changed[i] = b
			got, err := DecodePart(c, l, changed)
			if err != nil {
				refused++
				continue
			}
			for _, q := range got.Pieces {
				assert.True(t, got.contains(c, l, q))
			}
		}
	}
	require.Positive(t, refused)
	_, err = DecodePart(c, l, data[:len(data)-1])
	require.Error(t, err)
}

// TestLayoutsTravel: a layout is the same after its way into another catalog, and one that was changed on its way is refused or lies
// in its tensors.
func TestLayoutsTravel(t *testing.T) {
	c := &Catalog{}
	l := layout(t, c, shard(t, c, "layers.0.a", []int64{4, 6}, Box{2, 0, 2, 6}), shard(t, c, "layers.0.b", nil, Box{0, 1}),
		shard(t, c, "layers.10.a", []int64{3, 2, 5}, Box{0, 0, 0, 3, 2, 5}))
	data := EncodeLayout(c, l)
	other := &Catalog{}
	shard(t, other, "first", []int64{9}, Box{0, 9})
	got, err := DecodeLayout(other, data)
	require.NoError(t, err)
	require.Equal(t, l.Digest(c), got.Digest(other))
	require.Equal(t, data, EncodeLayout(other, got))
	for i := range data {
		for _, b := range []byte{0, 1, 0x7f, 0x80, 0xff} {
			changed := slices.Clone(data)
			changed[i] = b
			into := &Catalog{}
			if l, err := DecodeLayout(into, changed); err == nil {
				for s := range l.Len() {
					require.True(t, l.Box(s).within(into.Tensors[l.Tensor(s)].Shape))
				}
			}
		}
	}
	_, err = DecodeLayout(&Catalog{}, data[:len(data)-1])
	require.Error(t, err)
}
