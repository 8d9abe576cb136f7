package plan

import (
	"encoding/binary"
	"errors"
	"slices"
)

// Part is what a plan asks of one process: the buckets that it packs or takes, and the pieces of its shards in them.
type Part struct {
	Buckets []PartBucket
	Pieces  []Piece
}

// PartBucket is a bucket of a plan.
type PartBucket struct {
	Number int32 // in the plan
	Bytes  int64
}

// Piece is a box of a shard of the process, as contiguous bytes of a bucket.
type Piece struct {
	Bucket int32 // index in Part.Buckets
	Shard  int32
	Offset int64 // in the bucket
	Box    Box   // in coordinates of the whole tensor
	// From is the shard of the source that the piece is of, in what a unit takes. It does not travel.
	From int32
}

// OfSource is what a source packs, sorted by bucket.
func (p *Plan) OfSource(source int) Part {
	return p.ofSource(func(b *Bucket) bool { return int(b.Source) == source })
}

// WantedOf is OfSource without the buckets that no unit takes.
func (p *Plan) WantedOf(source int) Part {
	return p.ofSource(func(b *Bucket) bool { return int(b.Source) == source && len(b.Units) > 0 })
}

func (p *Plan) ofSource(includes func(*Bucket) bool) (out Part) {
	local := make([]int32, len(p.Buckets))
	for i := range p.Buckets {
		if local[i] = -1; includes(&p.Buckets[i]) {
			local[i] = int32(len(out.Buckets))
			out.Buckets = append(out.Buckets, PartBucket{int32(i), p.Buckets[i].Bytes})
		}
	}
	for _, c := range p.cells {
		if local[c.bucket] >= 0 {
			out.Pieces = append(out.Pieces, Piece{Bucket: local[c.bucket], Shard: c.shard, Offset: c.offset, Box: p.box(c)})
		}
	}
	slices.SortStableFunc(out.Pieces, func(a, b Piece) int { return int(a.Bucket) - int(b.Bucket) })
	return out
}

// OfUnit is what each receiver of a unit takes, sorted by bucket.
func (p *Plan) OfUnit(unit int) Part {
	var out Part
	local := map[int32]int32{}
	for _, q := range p.pulls[unit] {
		number := p.cells[q.cell].bucket
		if _, known := local[number]; !known {
			local[number] = 0
			out.Buckets = append(out.Buckets, PartBucket{number, p.Buckets[number].Bytes})
		}
	}
	slices.SortFunc(out.Buckets, func(a, b PartBucket) int { return int(a.Number) - int(b.Number) })
	for i, b := range out.Buckets {
		local[b.Number] = int32(i)
	}
	for _, q := range p.pulls[unit] {
		c := p.cells[q.cell]
		out.Pieces = append(out.Pieces, Piece{Bucket: local[c.bucket], Shard: q.shard, Offset: c.offset, Box: p.box(c), From: c.shard})
	}
	slices.SortStableFunc(out.Pieces, func(a, b Piece) int { return int(a.Bucket) - int(b.Bucket) })
	return out
}

func (p *Plan) box(c cell) Box {
	n := int32(2 * len(p.tensors[c.tensor].Shape))
	return Box(p.coords[c.at : c.at+n : c.at+n])
}

// Bytes is the sum of what units take, each box once: what moves at least.
func (p *Plan) Bytes() int64 {
	var n int64
	for _, c := range p.cells {
		if len(p.Buckets[c.bucket].Units) > 0 {
			n += p.box(c).Elements() * int64(p.tensors[c.tensor].ItemSize)
		}
	}
	return n
}

// Pieces is the number of pieces that units take, each box once.
func (p *Plan) Pieces() int {
	n := 0
	for _, c := range p.cells {
		if len(p.Buckets[c.bucket].Units) > 0 {
			n++
		}
	}
	return n
}

// Encode writes the part as the wire has it: numbers as varints.
func (p *Part) Encode() []byte {
	b := binary.AppendUvarint(nil, uint64(len(p.Buckets)))
	for _, k := range p.Buckets {
		b = binary.AppendUvarint(b, uint64(k.Number))
		b = binary.AppendUvarint(b, uint64(k.Bytes))
	}
	b = binary.AppendUvarint(b, uint64(len(p.Pieces)))
	for _, q := range p.Pieces {
		b = binary.AppendUvarint(b, uint64(q.Bucket))
		b = binary.AppendUvarint(b, uint64(q.Shard))
		b = binary.AppendUvarint(b, uint64(q.Offset))
		b = binary.AppendUvarint(b, uint64(q.Box.dims()))
		for _, n := range q.Box {
			b = binary.AppendUvarint(b, uint64(n))
		}
	}
	return b
}

var errPart = errors.New("a part of a plan is malformed")

// DecodePart reads what Encode wrote, for a process with a layout. It refuses pieces outside of their buckets and shards.
func DecodePart(c *Catalog, l *Layout, data []byte) (Part, error) {
	var p Part
	r := numbers{data: data}
	for range r.count() {
		p.Buckets = append(p.Buckets, PartBucket{int32(r.next(1 << 31)), r.next(1 << 62)})
	}
	pieces := r.count()
	p.Pieces = make([]Piece, 0, pieces)
	coords := make([]int64, 0, 4*pieces)
	for range pieces {
		q := Piece{Bucket: int32(r.next(1 << 31)), Shard: int32(r.next(1 << 31)), Offset: r.next(1 << 62)}
		dims := int(r.next(64))
		at := len(coords)
		for range 2 * dims {
			coords = append(coords, r.next(1<<62))
		}
		q.Box = Box(coords[at:len(coords):len(coords)])
		if r.bad || !p.contains(c, l, q) {
			return Part{}, errPart
		}
		p.Pieces = append(p.Pieces, q)
	}
	if r.bad || len(r.data) > 0 {
		return Part{}, errPart
	}
	return p, nil
}

// contains reports whether a piece lies in its bucket and its shard.
func (p *Part) contains(c *Catalog, l *Layout, q Piece) bool {
	if int(q.Bucket) >= len(p.Buckets) || int(q.Shard) >= l.Len() {
		return false
	}
	shard := l.Box(int(q.Shard))
	if len(shard) != len(q.Box) {
		return false
	}
	n := int64(c.Tensors[l.Tensor(int(q.Shard))].ItemSize)
	for i := range shard.dims() {
		if q.Box.start(i) < shard.start(i) || q.Box.end(i) > shard.end(i) {
			return false
		}
		n *= q.Box.size(i)
	}
	return q.Offset+n <= p.Buckets[q.Bucket].Bytes
}

// numbers reads varints.
type numbers struct {
	data []byte
	bad  bool
}

// next is the next number, which is below a limit.
func (r *numbers) next(limit uint64) int64 {
	n, size := binary.Uvarint(r.data)
	if size <= 0 || n >= limit {
		r.bad, r.data = true, nil
		return 0
	}
	r.data = r.data[size:]
	return int64(n)
}

// count is the number of records that follow, each of which has at least a byte.
func (r *numbers) count() int {
	n := r.next(1 << 31)
	if n > int64(len(r.data)) {
		r.bad, r.data = true, nil
		return 0
	}
	return int(n)
}
