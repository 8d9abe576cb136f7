package pack

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"troupe/weights/plan"
)

func noise(seed uint64, n int) []byte {
	r := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
	b := make([]byte, n)
	_, _ = r.Read(b)
	return b
}

func pointers(all [][]byte) (out []unsafe.Pointer) {
	for _, b := range all {
		out = append(out, unsafe.Pointer(unsafe.SliceData(b)))
	}
	return out
}

// TestPackAndUnpack: what is packed by one layout and unpacked by another is the same model, whatever the strides; the digests are
// those of the buckets, and nothing of earlier contents is left in them.
func TestPackAndUnpack(t *testing.T) {
	c := &plan.Catalog{}
	var whole, left, right []plan.Shard
	for i, shape := range [][]int64{{700, 513}, {3}, {1000}, {20, 30, 40}} {
		n, err := c.Add(plan.Tensor{Name: fmt.Sprint(i), DType: "bfloat16", ItemSize: 2, Shape: shape})
		require.NoError(t, err)
		start := make([]int64, len(shape))
		whole = append(whole, plan.Shard{Tensor: n, Box: plan.NewBox(start, shape)})
		half := slices.Clone(shape)
		last := len(shape) - 1
		half[last] = shape[last] / 2
		left = append(left, plan.Shard{Tensor: n, Box: plan.NewBox(start, half)})
		start[last], half[last] = half[last], shape[last]-half[last]
		right = append(right, plan.Shard{Tensor: n, Box: plan.NewBox(start, half)})
	}
	layouts := make([]*plan.Layout, 3)
	for i, shards := range [][]plan.Shard{whole, left, right} {
		var err error
		layouts[i], err = c.Layout(shards...)
		require.NoError(t, err)
	}
	p := plan.Make(c, []plan.Source{{Layout: layouts[1]}, {Layout: layouts[2]}}, []plan.Unit{{Layout: layouts[0]}})
	require.Empty(t, p.Refused)
	model, memory := tensors(c, layouts[0], false)
	for i, b := range model {
		copy(b, noise(uint64(i), len(b)))
	}
	buckets := make([][]byte, len(p.Buckets))
	for i := range 2 {
		half, strided := tensors(c, layouts[i+1], true)
		fill(c, layouts[0], model, memory, layouts[i+1], half, strided)
		part := p.OfSource(i)
		var own [][]byte
		for _, b := range part.Buckets {
			buckets[b.Number] = bytes.Repeat([]byte{0xAA}, int(b.Bytes))
			own = append(own, buckets[b.Number])
		}
		digests := NewProgram(part.Buckets, part.Copies(c, layouts[i+1], strided)).Pack(pointers(half), own)
		for j := range own {
			require.Equal(t, Digest(own[j]), digests[j])
		}
		for _, q := range part.Pieces {
			end := q.Offset + 2*q.Box.Elements()
			for gap := end; gap%64 != 0 && gap < int64(len(own[q.Bucket])); gap++ {
				require.Zero(t, own[q.Bucket][gap], "between pieces")
			}
		}
	}
	got, _ := tensors(c, layouts[0], false)
	part := p.OfUnit(0)
	var own [][]byte
	for _, b := range part.Buckets {
		own = append(own, buckets[b.Number])
	}
	NewProgram(part.Buckets, part.Copies(c, layouts[0], memory)).Unpack(pointers(got), own)
	for i := range model {
		require.True(t, bytes.Equal(model[i], got[i]), "tensor %d", i)
	}
}

// tensors makes memory for the shards of a layout, row by row or column by column.
func tensors(c *plan.Catalog, l *plan.Layout, columns bool) (data [][]byte, memory []plan.Memory) {
	for i := range l.Len() {
		sizes := l.Box(i).Sizes()
		strides := make([]int64, len(sizes))
		n := int64(2)
		for k := range strides {
			at := len(strides) - 1 - k
			if columns {
				at = k
			}
			strides[at] = n
			n *= sizes[at]
		}
		data, memory = append(data, make([]byte, n)), append(memory, plan.Memory{Strides: strides})
	}
	return data, memory
}

// fill copies the elements of a whole model to the shards of a part of it, one by one.
func fill(c *plan.Catalog, whole *plan.Layout, model [][]byte, memory []plan.Memory, l *plan.Layout, shards [][]byte, strided []plan.Memory) {
	for i := range l.Len() {
		box := l.Box(i)
		d := len(box) / 2
		at := make([]int64, d)
		for range box.Elements() {
			from, to := int64(0), int64(0)
			for k := range d {
				from += (box[k] + at[k]) * memory[i].Strides[k]
				to += at[k] * strided[i].Strides[k]
			}
			copy(shards[i][to:to+2], model[i][from:from+2])
			for k := d - 1; k >= 0; k-- {
				if at[k]++; at[k] < box[d+k] {
					break
				}
				at[k] = 0
			}
		}
	}
}

// TestDigestFindsWhatChanged: a bit, two exchanged words, two exchanged ranges, a length.
func TestDigestFindsWhatChanged(t *testing.T) {
	data := noise(1, 1<<20+5)
	want := Digest(data)
	require.Equal(t, want, Digest(slices.Clone(data)))
	for range 2000 {
		at, bit := rand.IntN(len(data)), byte(1)<<rand.IntN(8)
		data[at] ^= bit
		require.NotEqual(t, want, Digest(data))
		data[at] ^= bit
	}
	for _, n := range []int{8, 64, 4096, 300_000} {
		other := slices.Clone(data)
		copy(other[:n], data[n:2*n])
		copy(other[n:2*n], data[:n])
		require.NotEqual(t, want, Digest(other))
	}
	require.NotEqual(t, want, Digest(append(slices.Clone(data), 0)))
	require.NotEqual(t, Digest(make([]byte, 8)), Digest(make([]byte, 16)))
}

// TestDeltas: a delta leads from one version to the next, bit for bit, and to its digest; whatever changed.
func TestDeltas(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		width := rapid.SampledFrom([]int{1, 2}).Draw(t, "width")
		n := rapid.IntRange(0, 3*blockValues).Draw(t, "values") * width
		old := noise(rapid.Uint64().Draw(t, "seed"), n)
		now := slices.Clone(old)
		share := rapid.SampledFrom([]float64{0, 0.00001, 0.003, 0.03, 0.2, 0.45}).Draw(t, "share")
		for range int(share * float64(n)) {
			now[rand.IntN(n)] ^= byte(1 + rand.IntN(255))
		}
		delta := Diff(old, now, width, 1<<40, func(n int) []byte { return make([]byte, n) })
		got := slices.Clone(old)
		digest, err := Apply(got, delta, Digest(old))
		require.NoError(t, err)
		require.True(t, bytes.Equal(now, got))
		require.Equal(t, Digest(now), digest)
	})
}

// TestDeltasAreSmall: the form that is smaller is used, and none if the whole bucket is.
func TestDeltasAreSmall(t *testing.T) {
	const n = 8 << 20
	old := noise(3, n)
	for share, most := range map[float64]float64{0.016: 0.026, 0.03: 0.047, 0.1: 0.163, 0.3: 0.365} {
		now := slices.Clone(old)
		changed := 0
		for i := 0; i < n; i += 2 {
			if rand.Float64() < share {
				now[i] ^= 1
				changed++
			}
		}
		delta := Diff(old, now, 2, n, func(n int) []byte { return make([]byte, n) })
		require.NotNil(t, delta)
		require.Less(t, float64(len(delta))/n, most, "%v of the values changed", share)
		form := binary.LittleEndian.Uint32(delta[4:])
		require.Equal(t, share > 0.125, form == formBitmap)
	}
	require.Nil(t, Diff(old, noise(4, n), 2, n/2, func(n int) []byte { return make([]byte, n) }))
}

// TestHostileDeltas: a delta that was changed on its way changes nothing outside of its bucket, and is refused, or has another digest.
func TestHostileDeltas(t *testing.T) {
	old := noise(5, 5000)
	now := slices.Clone(old)
	for i := 0; i < 5000; i += 97 {
		now[i]++
	}
	delta := Diff(old, now, 2, 1<<40, func(n int) []byte { return make([]byte, n) })
	refused := 0
	for i := range delta {
		for _, b := range []byte{0, 1, 2, 0x7f, 0xff} {
			if delta[i] == b {
				continue
			}
			changed := slices.Clone(delta)
			changed[i] = b
			room := append(slices.Clone(old), 1, 2, 3)
			digest, err := Apply(room[:5000:5000], changed, Digest(old))
			require.Equal(t, []byte{1, 2, 3}, room[5000:])
			if err != nil {
				refused++
				continue
			}
			require.NotEqual(t, Digest(now), digest)
		}
	}
	require.Positive(t, refused)
	for i := range delta {
		_, err := Apply(slices.Clone(old), delta[:i], Digest(old))
		require.Error(t, err)
	}
}

func BenchmarkDigest(b *testing.B) {
	data := noise(1, 64<<20)
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		Digest(data)
	}
}

func BenchmarkDelta(b *testing.B) {
	old := noise(1, 64<<20)
	now := slices.Clone(old)
	for i := 0; i < len(now); i += 2 {
		if rand.Float64() < 0.03 {
			now[i] ^= 1
		}
	}
	room := make([]byte, len(now))
	delta := Diff(old, now, 2, 1<<40, func(n int) []byte { return make([]byte, n) })
	b.Run("Diff", func(b *testing.B) {
		b.SetBytes(int64(len(old)))
		for b.Loop() {
			Diff(old, now, 2, 1<<40, func(n int) []byte { return room[:n] })
		}
	})
	b.Run("Apply", func(b *testing.B) {
		b.SetBytes(int64(len(old)))
		for b.Loop() {
			if _, err := Apply(old, delta, 0); err != nil {
				b.Fatal(err)
			}
		}
	})
}
