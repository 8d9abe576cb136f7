package plan

import (
	"fmt"
	"slices"
)

const (
	bucketBytes = 256 << 20 // of a bucket, unless one piece is larger: transfers of several buckets overlap
	pieceAlign  = 64        // of a piece in its bucket
)

// Place is where a process runs, as numbers that the caller gives: bytes between processes of one device, or of one host, need not
// leave it. The zero Place is nowhere.
type Place struct{ Host, Device int32 }

// Source is a process that publishes.
type Source struct {
	Layout *Layout
	Place  Place
}

// Unit is receivers with one layout, at one place. Place is zero for receivers that share neither host nor device with a source.
type Unit struct {
	Layout *Layout
	Place  Place
}

// Bucket is contiguous bytes that one source packs for some units. No units: the source keeps it for receivers that come later.
type Bucket struct {
	Source int32
	Units  []int32
	Bytes  int64
}

// cell is a box of a tensor in a bucket, and in a shard of its source.
type cell struct {
	bucket, shard, tensor int32
	at                    int32 // of the box in coords
	offset                int64
}

// pull is a cell that a unit needs, and its shard there.
type pull struct{ cell, shard int32 }

// Plan says who packs which bytes, and who takes them. Every byte that units need is packed once for each different box that needs
// it, and every byte of the sources at least once.
type Plan struct {
	Buckets []Bucket
	// Refused are the units that get nothing, with the reason.
	Refused map[int]error

	tensors []Tensor
	sources []Source
	units   []Unit
	cells   []cell
	pulls   [][]pull // by unit
	coords  []int64
}

// Make plans the way of all bytes from sources to units. The result depends on the arguments alone.
func Make(c *Catalog, sources []Source, units []Unit) *Plan {
	refused := map[int]error{}
	for {
		m := newMaker(c, sources, units, refused)
		for t := range c.Tensors {
			m.tensor(int32(t))
		}
		if len(m.refused) == 0 {
			return m.finish(refused)
		}
		for unit, err := range m.refused { // what was planned for them is not needed
			refused[unit] = err
		}
	}
}

// maker is a plan that is being made, and memory that is used again for each tensor.
type maker struct {
	Plan
	refused map[int]error // in this attempt
	bySrc   shardIndex
	byUnit  shardIndex
	load    []int64 // bytes by source

	sets    interner
	open    map[bucketKey]int32
	choices map[[2]int32][]choice

	srcGroups, unitGroups grouper
	left, next, common    []int64
}

// bucketKey is what the pieces of one bucket have in common. single: elements of one byte, of which deltas look at each.
type bucketKey struct {
	source, units int32
	single        bool
}

// choice is some units of a box, and the sources that are nearest to them.
type choice struct {
	sources []int32
	members []int32 // positions in the list of those that need the box
	units   int32   // the set of them
}

func newMaker(c *Catalog, sources []Source, units []Unit, refused map[int]error) *maker {
	m := &maker{refused: map[int]error{}, load: make([]int64, len(sources)), open: map[bucketKey]int32{}, choices: map[[2]int32][]choice{}}
	m.tensors, m.sources, m.units, m.pulls = c.Tensors, sources, units, make([][]pull, len(units))
	m.bySrc.build(len(c.Tensors), len(sources), func(i int) *Layout { return sources[i].Layout })
	m.byUnit.build(len(c.Tensors), len(units), func(i int) *Layout {
		if refused[i] != nil {
			return &Layout{}
		}
		return units[i].Layout
	})
	for i := range units {
		if refused[i] == nil {
			m.pulls[i] = make([]pull, 0, units[i].Layout.Len())
		}
	}
	return m
}

// tensor plans one tensor.
func (m *maker) tensor(t int32) {
	from, to := m.bySrc.of(t), m.byUnit.of(t)
	if len(from) == 0 {
		for _, e := range to {
			m.refuse(e.who, t, "no process that publishes has it; bind it there under this name, or leave it out here")
		}
		return
	}
	sources := m.srcGroups.group(from, func(e holder) Box { return m.sources[e.who].Layout.Box(int(e.shard)) })
	wanted := m.unitGroups.group(to, func(e holder) Box { return m.units[e.who].Layout.Box(int(e.shard)) })
	for i := range wanted.list {
		m.fill(t, sources, &wanted.list[i])
	}
	for i := range sources.list {
		m.keep(t, sources, i, wanted)
	}
}

func (m *maker) refuse(unit, t int32, format string, args ...any) {
	if m.refused[int(unit)] == nil {
		m.refused[int(unit)] = &Error{m.tensors[t].Name, fmt.Sprintf(format, args...)}
	}
}

// fill plans the pieces of one wanted box: from each source what no earlier one has given.
func (m *maker) fill(t int32, sources *groups, want *group) {
	m.left = append(m.left[:0], want.box...)
	m.common = slices.Grow(m.common[:0], len(want.box))[:len(want.box)]
	first, last := sources.window(want.box)
	for i := first; i < last && len(m.left) > 0; i++ {
		m.take(&sources.list[i], func(piece Box) { m.emit(t, &sources.list[i], want, piece) })
	}
	if len(m.left) > 0 && want.box.Elements() > 0 {
		d := len(want.box)
		for _, e := range want.members {
			m.refuse(e.who, t, "no process that publishes has the part of shape %v at %v", m.left[d/2:d], m.left[:d/2])
		}
	}
}

// take removes the box of a group from what is left, and calls do for each part of it that was left.
func (m *maker) take(from *group, do func(Box)) {
	d := len(from.box)
	m.next = m.next[:0]
	for at := 0; at < len(m.left); at += d {
		part := Box(m.left[at : at+d])
		if !intersect(m.common, part, from.box) {
			m.next = append(m.next, part...)
			continue
		}
		do(m.common)
		m.next = subtract(m.next, part, m.common)
	}
	m.left, m.next = m.next, m.left
}

// keep plans the parts of a source's box that no unit needs and no source before it has, so that receivers with other layouts can
// take them later.
func (m *maker) keep(t int32, sources *groups, i int, wanted *groups) {
	g := &sources.list[i]
	m.left = append(m.left[:0], g.box...)
	m.common = slices.Grow(m.common[:0], len(g.box))[:len(g.box)]
	skip := func(Box) {}
	first, last := wanted.window(g.box)
	for j := first; j < last && len(m.left) > 0; j++ {
		m.take(&wanted.list[j], skip)
	}
	first, last = sources.window(g.box)
	for j := first; j < min(last, i) && len(m.left) > 0; j++ {
		m.take(&sources.list[j], skip)
	}
	d := len(g.box)
	for at := 0; at < len(m.left); at += d {
		if part := Box(m.left[at : at+d]); part.Elements() > 0 {
			source := m.lightest(g.members, nil)
			m.add(t, source, m.sets.empty(), part)
		}
	}
}

// emit adds a piece of a wanted box, once for each group of units with other nearest sources.
func (m *maker) emit(t int32, from, want *group, piece Box) {
	if len(from.members) == 1 {
		n := m.add(t, from.members[0], m.setOf(want.members), piece)
		for _, e := range want.members {
			m.pulls[e.who] = append(m.pulls[e.who], pull{n, e.shard})
		}
		return
	}
	for _, c := range m.choose(from.members, want.members) {
		n := m.add(t, m.lightest(from.members, c.sources), c.units, piece)
		for _, i := range c.members {
			e := want.members[i]
			m.pulls[e.who] = append(m.pulls[e.who], pull{n, e.shard})
		}
	}
}

// lightest is the holder with the fewest bytes so far, of those at some positions; nil: of all.
func (m *maker) lightest(all []holder, positions []int32) holder {
	best := all[0]
	if positions != nil {
		best = all[positions[0]]
		for _, i := range positions[1:] {
			if m.load[all[i].who] < m.load[best.who] {
				best = all[i]
			}
		}
		return best
	}
	for _, e := range all[1:] {
		if m.load[e.who] < m.load[best.who] {
			best = e
		}
	}
	return best
}

// choose groups those that need a box by the nearest of the sources that have it.
func (m *maker) choose(from, to []holder) []choice {
	key := [2]int32{m.setOf(from), m.setOf(to)}
	if known, ok := m.choices[key]; ok {
		return known
	}
	var out []choice
	byPlace := map[Place]int{}
	for i, e := range to {
		place, sources := m.nearest(m.units[e.who].Place, from)
		at, known := byPlace[place]
		if !known {
			at = len(out)
			byPlace[place] = at
			out = append(out, choice{sources: sources})
		}
		out[at].members = append(out[at].members, int32(i))
	}
	for i := range out {
		members := make([]holder, len(out[i].members))
		for j, at := range out[i].members {
			members[j] = to[at]
		}
		out[i].units = m.setOf(members)
	}
	m.choices[key] = out
	return out
}

// nearest is the sources on the device of a place, otherwise those on its host, otherwise all; and the place that they have in
// common.
func (m *maker) nearest(at Place, from []holder) (Place, []int32) {
	var device, host, all []int32
	for i, e := range from {
		p := m.sources[e.who].Place
		all = append(all, int32(i))
		if p.Host == 0 || p.Host != at.Host {
			continue
		}
		host = append(host, int32(i))
		if p.Device != 0 && p.Device == at.Device {
			device = append(device, int32(i))
		}
	}
	switch {
	case device != nil:
		return at, device
	case host != nil:
		return Place{Host: at.Host}, host
	}
	return Place{}, all
}

func (m *maker) setOf(list []holder) int32 { return m.sets.of(list) }

// add adds a piece to the open bucket of a source for a set of units, and returns its number.
func (m *maker) add(t int32, from holder, units int32, piece Box) int32 {
	n := piece.Elements() * int64(m.tensors[t].ItemSize)
	key := bucketKey{from.who, units, m.tensors[t].ItemSize == 1}
	number, known := m.open[key]
	if !known || m.Buckets[number].Bytes+n > bucketBytes {
		number = int32(len(m.Buckets))
		m.Buckets = append(m.Buckets, Bucket{Source: from.who, Units: m.sets.list(units)})
		m.open[key] = number
	}
	b := &m.Buckets[number]
	at := (b.Bytes + pieceAlign - 1) / pieceAlign * pieceAlign
	b.Bytes = at + n
	m.load[from.who] += n
	m.cells = append(m.cells, cell{bucket: number, shard: from.shard, tensor: t, at: int32(len(m.coords)), offset: at})
	m.coords = append(m.coords, piece...)
	return int32(len(m.cells) - 1)
}

// finish refuses units to which nothing moves.
func (m *maker) finish(refused map[int]error) *Plan {
	for i := range m.units {
		if refused[i] == nil && len(m.pulls[i]) == 0 {
			refused[i] = &Error{Why: "nothing would move: no tensor with elements was bound"}
		}
	}
	m.Refused = refused
	return &m.Plan
}
