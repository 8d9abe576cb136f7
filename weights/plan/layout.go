package plan

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
)

// Error is a tensor that cannot be moved, with the reason.
type Error struct {
	Tensor string
	Why    string
}

func (e *Error) Error() string {
	if e.Tensor == "" {
		return e.Why
	}
	return fmt.Sprintf("tensor %q: %s", e.Tensor, e.Why)
}

// Tensor is one parameter of the model as a whole.
type Tensor struct {
	Name     string
	DType    string
	ItemSize int
	Shape    []int64
}

// Catalog is the tensors of a model. Indexes never change. The zero Catalog is empty.
type Catalog struct {
	Tensors []Tensor
	index   map[string]int
}

// Add returns the index of a tensor, which it adds if its name is new. It refuses another shape or dtype under a known name.
func (c *Catalog) Add(t Tensor) (int, error) {
	if len(t.Shape) == 0 {
		t.Shape = []int64{1}
	}
	if i, known := c.index[t.Name]; known {
		old := &c.Tensors[i]
		switch {
		case old.DType != t.DType:
			return 0, &Error{t.Name, fmt.Sprintf("its dtype is %s here and %s elsewhere; bind it with one dtype everywhere", t.DType, old.DType)}
		case !slices.Equal(old.Shape, t.Shape):
			return 0, &Error{t.Name, fmt.Sprintf("its shape as a whole is %v here and %v elsewhere; a part of a tensor is bound as a Box with the shape of the whole", t.Shape, old.Shape)}
		}
		return i, nil
	}
	if t.Name == "" || t.ItemSize <= 0 || slices.ContainsFunc(t.Shape, func(n int64) bool { return n < 0 }) {
		return 0, &Error{t.Name, fmt.Sprintf("a tensor has a name, a dtype and a shape, not %q, %q and %v", t.Name, t.DType, t.Shape)}
	}
	if c.index == nil {
		c.index = map[string]int{}
	}
	c.index[t.Name] = len(c.Tensors)
	c.Tensors = append(c.Tensors, t)
	return len(c.Tensors) - 1, nil
}

// Shard is a part of a tensor that one process has.
type Shard struct {
	Tensor int // index in the catalog
	Box    Box
}

// Layout is the parts of tensors that one process has, in the order of their numbers. It does not change.
type Layout struct {
	tensors []int32
	ends    []int32 // of the boxes in coords
	coords  []int64
}

// Layout makes a layout of tensors of the catalog.
func (c *Catalog) Layout(shards ...Shard) (*Layout, error) {
	l := newLayout(len(shards))
	known := shardSet{}
	for _, s := range shards {
		if err := c.check(s); err != nil {
			return nil, err
		}
		if known.has(l, s) {
			return nil, &Error{c.Tensors[s.Tensor].Name, "the same part is bound twice"}
		}
		known.add(l, s)
	}
	return l, nil
}

// Packed is what a process with a layout has packed, as a layout of its own, and the piece of each of its shards. A box that was packed
// several times, for receivers at several places, is one shard.
func (c *Catalog) Packed(l *Layout, part Part) (*Layout, []int32) {
	out, known := newLayout(len(part.Pieces)), shardSet{}
	var pieces []int32
	for i, q := range part.Pieces {
		if s := (Shard{l.Tensor(int(q.Shard)), q.Box}); !known.has(out, s) {
			known.add(out, s)
			pieces = append(pieces, int32(i))
		}
	}
	return out, pieces
}

func newLayout(n int) *Layout {
	return &Layout{tensors: make([]int32, 0, n), ends: make([]int32, 0, n)}
}

// shardSet finds the shards of a layout that is being made.
type shardSet map[uint64]int

func (x shardSet) key(s Shard) uint64 { return hash(s.Box) ^ uint64(s.Tensor)*0xC2B2AE3D27D4EB4F }

func (x shardSet) has(l *Layout, s Shard) bool {
	i, seen := x[x.key(s)]
	return seen && l.Tensor(i) == s.Tensor && slices.Equal(l.Box(i), s.Box)
}

func (x shardSet) add(l *Layout, s Shard) {
	x[x.key(s)] = l.Len()
	l.append(s)
}

func (l *Layout) append(s Shard) {
	l.tensors = append(l.tensors, int32(s.Tensor))
	l.coords = append(l.coords, s.Box...)
	l.ends = append(l.ends, int32(len(l.coords)))
}

// check refuses a box that does not lie in its tensor.
func (c *Catalog) check(s Shard) error {
	t := &c.Tensors[s.Tensor]
	if !s.Box.within(t.Shape) {
		half := len(s.Box) / 2
		return &Error{t.Name, fmt.Sprintf("the part of shape %v at %v does not lie in its shape %v", []int64(s.Box[half:]), []int64(s.Box[:half]), t.Shape)}
	}
	return nil
}

// Len is the number of shards.
func (l *Layout) Len() int { return len(l.tensors) }

// Tensor is the tensor of a shard.
func (l *Layout) Tensor(shard int) int { return int(l.tensors[shard]) }

// Box is the part that a shard is. It must not be changed.
func (l *Layout) Box(shard int) Box {
	from := int32(0)
	if shard > 0 {
		from = l.ends[shard-1]
	}
	return Box(l.coords[from:l.ends[shard]])
}

// Digest identifies the content of a layout: equal layouts of one model have the same.
func (l *Layout) Digest(c *Catalog) [sha256.Size]byte {
	h := sha256.New()
	var b []byte
	for i := range l.Len() {
		t := &c.Tensors[l.Tensor(i)]
		b = binary.AppendUvarint(b[:0], uint64(len(t.Name)))
		b = append(b, t.Name...)
		b = append(b, t.DType...)
		for _, n := range t.Shape {
			b = binary.AppendVarint(b, n)
		}
		b = append(b, '|')
		for _, n := range l.Box(i) {
			b = binary.AppendVarint(b, n)
		}
		_, _ = h.Write(b) // a hash takes everything
	}
	return [sha256.Size]byte(h.Sum(nil))
}
