package plan

// Memory is how a shard lies in memory: the bytes from one element to the next in each dimension.
type Memory struct{ Strides []int64 }

// Copy is bytes between a shard and a bucket: N[1] times N[0] runs of Run bytes, which follow each other in the bucket, and are
// Stride apart in the shard.
type Copy struct {
	Shard  int32
	Bucket int32 // index in Part.Buckets
	Offset int64 // of the first run in the bucket
	At     int64 // of the first run from the first element of the shard, in bytes
	Run    int64
	N      [2]int64
	Stride [2]int64
}

// Copies are the copies between the shards of a process and its buckets; memory is by shard.
func (p *Part) Copies(c *Catalog, l *Layout, memory []Memory) []Copy {
	out := make([]Copy, 0, len(p.Pieces))
	for _, q := range p.Pieces {
		item := int64(c.Tensors[l.Tensor(int(q.Shard))].ItemSize)
		out = appendCopies(out, q, l.Box(int(q.Shard)), memory[q.Shard].Strides, item)
	}
	return out
}

// axis is a dimension of a piece in memory.
type axis struct{ n, stride int64 }

// appendCopies appends the copies of one piece.
func appendCopies(out []Copy, q Piece, shard Box, strides []int64, item int64) []Copy {
	var at int64
	for i, stride := range strides {
		at += (q.Box.start(i) - shard.start(i)) * stride
	}
	run, axes := item, make([]axis, 0, len(strides)) // from the innermost
	for i := len(strides) - 1; i >= 0; i-- {
		n, stride := q.Box.size(i), strides[i]
		last := len(axes) - 1
		switch {
		case n == 1:
		case last < 0 && stride == run:
			run *= n
		case last >= 0 && stride == axes[last].n*axes[last].stride:
			axes[last].n *= n
		default:
			axes = append(axes, axis{n, stride})
		}
	}
	first := Copy{Shard: q.Shard, Bucket: q.Bucket, Offset: q.Offset, At: at, Run: run, N: [2]int64{1, 1}}
	for i := range min(2, len(axes)) {
		first.N[i], first.Stride[i] = axes[i].n, axes[i].stride
	}
	return appendOuter(out, first, axes[min(2, len(axes)):])
}

// appendOuter appends a copy once for each position in the further axes, the innermost first.
func appendOuter(out []Copy, first Copy, outer []axis) []Copy {
	if len(outer) == 0 {
		return append(out, first)
	}
	inner := first.Bytes()
	for _, a := range outer[:len(outer)-1] {
		inner *= a.n
	}
	last := outer[len(outer)-1]
	for i := range last.n {
		next := first
		next.At += i * last.stride
		next.Offset += i * inner
		out = appendOuter(out, next, outer[:len(outer)-1])
	}
	return out
}

// Bytes is the number of bytes of the copy.
func (c *Copy) Bytes() int64 { return c.Run * c.N[0] * c.N[1] }

// AsMemory is what a process has packed as shards, one for each piece, with the memory of each from the start of the piece: for packing
// it once more by another plan.
func (c *Catalog) AsMemory(l *Layout, part Part) (*Layout, []Memory) {
	out, memory := newLayout(len(part.Pieces)), make([]Memory, len(part.Pieces))
	for i, q := range part.Pieces {
		t := l.Tensor(int(q.Shard))
		out.append(Shard{t, q.Box})
		strides := make([]int64, q.Box.dims())
		n := int64(c.Tensors[t].ItemSize)
		for k := len(strides) - 1; k >= 0; k-- {
			strides[k] = n
			n *= q.Box.size(k)
		}
		memory[i] = Memory{strides}
	}
	return out, memory
}
