package plan

import (
	"encoding/binary"
	"errors"
)

// A layout travels with the tensors that it has parts of: uvarint tensors, by tensor: uvarint bytes that its name has in common with the
// name before, the others, its dtype, uvarint bytes of an element, uvarint dimensions, the sizes, uvarint boxes, their numbers.
// Texts follow their uvarint length. Shards are numbered in this order.

// EncodeLayout writes a layout whose shards are sorted by tensor.
func EncodeLayout(c *Catalog, l *Layout) []byte {
	n := 0
	for i := range l.Len() {
		if i == 0 || l.tensors[i] != l.tensors[i-1] {
			n++
		}
	}
	b := binary.AppendUvarint(nil, uint64(n))
	before := ""
	for i := 0; i < l.Len(); {
		t := &c.Tensors[l.tensors[i]]
		same := 0
		for same < min(len(before), len(t.Name)) && before[same] == t.Name[same] {
			same++
		}
		before = t.Name
		b = binary.AppendUvarint(b, uint64(same))
		b = appendText(b, t.Name[same:])
		b = appendText(b, t.DType)
		b = binary.AppendUvarint(b, uint64(t.ItemSize))
		b = appendNumbers(binary.AppendUvarint(b, uint64(len(t.Shape))), t.Shape)
		end := i
		for end < l.Len() && l.tensors[end] == l.tensors[i] {
			end++
		}
		b = binary.AppendUvarint(b, uint64(end-i))
		for ; i < end; i++ {
			b = appendNumbers(b, l.Box(i))
		}
	}
	return b
}

func appendText(b []byte, text string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(text))), text...)
}

func appendNumbers(b []byte, all []int64) []byte {
	for _, n := range all {
		b = binary.AppendUvarint(b, uint64(n))
	}
	return b
}

var errLayout = errors.New("a layout is malformed")

const maxDims = 32

// DecodeLayout reads what EncodeLayout wrote, and adds its tensors to a catalog.
func DecodeLayout(c *Catalog, data []byte) (*Layout, error) {
	r := numbers{data: data}
	var shards []Shard
	name := ""
	for range r.count() {
		same := int(r.next(1 << 31))
		if same > len(name) {
			return nil, errLayout
		}
		name = name[:same] + r.text()
		t := Tensor{Name: name, DType: r.text(), ItemSize: int(r.next(1 << 16))}
		t.Shape = r.list(int(r.next(maxDims)))
		boxes := r.count()
		if r.bad || len(t.Shape) == 0 || !representable(t) {
			return nil, errLayout
		}
		i, err := c.Add(t)
		if err != nil {
			return nil, err
		}
		for range boxes {
			shards = append(shards, Shard{i, Box(r.list(2 * len(t.Shape)))})
		}
		if r.bad {
			return nil, errLayout
		}
	}
	if len(r.data) > 0 {
		return nil, errLayout
	}
	return c.Layout(shards...)
}

// representable reports whether the bytes of a tensor can be counted.
func representable(t Tensor) bool {
	n := int64(t.ItemSize)
	for _, size := range t.Shape {
		if size > 0 && n > (1<<56)/size {
			return false
		}
		n *= max(size, 1)
	}
	return true
}

func (r *numbers) text() string {
	n := r.next(1 << 31)
	if n > int64(len(r.data)) {
		r.bad, r.data = true, nil
		return ""
	}
	text := string(r.data[:n])
	r.data = r.data[n:]
	return text
}

func (r *numbers) list(n int) []int64 {
	if n > len(r.data) {
		r.bad, r.data = true, nil
		return nil
	}
	out := make([]int64, n)
	for i := range out {
		out[i] = r.next(1 << 56)
	}
	return out
}
