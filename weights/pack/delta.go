package pack

import (
	"encoding/binary"
	"errors"
	"math/bits"
	"sync/atomic"
)

// A delta is the values of a bucket that differ from an earlier version of it:
//
//	0   uint32  bytes of a value: 1 or 2
//	4   uint32  form of the marks
//	8   uint64  bytes of the bucket
//	16  uint64  bytes of all marks
//	24  by block of 262,144 values: uint32 end of its marks in all marks, uint32 number of its values and those of the blocks before
//	…   marks; gaps: the number of equal values before each one that changed, 255 for 255 equal ones, from the start of the block;
//	    or a bitmap: a bit for each value of the bucket, the lowest first
//	…   the values that changed
//
// Numbers are little-endian.
const (
	blockValues = 256 << 10
	deltaHead   = 24
	formGaps    = 1
	formBitmap  = 2
	skipGap     = 255
)

// ErrDelta is the error of a delta that is malformed, or of another bucket.
var ErrDelta = errors.New("a delta does not fit its bucket")

// changes is what changed in one block.
type changes struct{ gaps, values []byte }

// Diff returns the delta from old to new, which have the same length, with values of 1 or 2 bytes; nil if it would have most bytes or
// more. alloc returns memory for it.
func Diff(old, new []byte, width int, most int64, alloc func(n int) []byte) []byte {
	block := int64(blockValues * width)
	blocks := (int64(len(new)) + block - 1) / block
	all := make([]changes, blocks)
	bitmap := (int64(len(new))/int64(width) + 7) / 8
	var gaps, values atomic.Int64
	each(blocks, func(i int64) {
		if values.Load()+min(gaps.Load(), bitmap) >= most {
			return
		}
		end := min((i+1)*block, int64(len(new)))
		all[i] = diffBlock(old[i*block:end], new[i*block:end], width)
		gaps.Add(int64(len(all[i].gaps)))
		values.Add(int64(len(all[i].values)))
	})
	form, marks := uint32(formGaps), gaps.Load()
	if bitmap < marks {
		form, marks = formBitmap, bitmap
	}
	size := deltaHead + 8*blocks + marks + values.Load()
	if size >= most {
		return nil
	}
	out := alloc(int(size))
	if out == nil {
		return nil
	}
	writeDelta(out, all, form, width, int64(len(new)), marks)
	return out
}

// diffBlock finds the values of a block that changed.
func diffBlock(old, new []byte, width int) (c changes) {
	last := 0 // the first value that has no mark
	mark := func(i int) {
		for ; i-last >= skipGap; last += skipGap {
			c.gaps = append(c.gaps, skipGap)
		}
		c.gaps = append(c.gaps, byte(i-last))
		c.values = append(c.values, new[i*width:(i+1)*width]...)
		last = i + 1
	}
	at := 0
	for ; at+8 <= len(new); at += 8 {
		x := binary.LittleEndian.Uint64(old[at:]) ^ binary.LittleEndian.Uint64(new[at:])
		for x != 0 {
			lane := bits.TrailingZeros64(x) / 8 / width
			mark(at/width + lane)
			x &^= (1<<(8*width) - 1) << (8 * width * lane)
		}
	}
	for ; at+width <= len(new); at += width {
		if string(old[at:at+width]) != string(new[at:at+width]) {
			mark(at / width)
		}
	}
	return c
}

func writeDelta(out []byte, all []changes, form uint32, width int, n, marks int64) {
	le := binary.LittleEndian
	le.PutUint32(out, uint32(width))
	le.PutUint32(out[4:], form)
	le.PutUint64(out[8:], uint64(n))
	le.PutUint64(out[16:], uint64(marks))
	markAt, valueAt := make([]int64, len(all)+1), make([]int64, len(all)+1)
	for i, c := range all {
		if markAt[i+1] = markAt[i] + int64(len(c.gaps)); form == formBitmap {
			markAt[i+1] = min(int64(i+1)*blockValues/8, marks)
		}
		valueAt[i+1] = valueAt[i] + int64(len(c.values))
		le.PutUint32(out[deltaHead+8*i:], uint32(markAt[i+1]))
		le.PutUint32(out[deltaHead+8*i+4:], uint32(valueAt[i+1]/int64(width)))
	}
	body := out[deltaHead+8*len(all):]
	each(int64(len(all)), func(i int64) {
		copy(body[marks+valueAt[i]:], all[i].values)
		if room := body[markAt[i]:markAt[i+1]]; form == formGaps {
			copy(room, all[i].gaps)
		} else {
			setBits(room, all[i].gaps)
		}
	})
}

// setBits writes gaps as a bitmap.
func setBits(room, gaps []byte) {
	clear(room)
	at := 0
	for _, g := range gaps {
		if at += int(g); g != skipGap {
			room[at/8] |= 1 << (at % 8)
			at++
		}
	}
}

// Apply changes a bucket to the version that a delta leads to, and returns its digest, given the one that it had.
func Apply(bucket, delta []byte, digest uint64) (uint64, error) {
	d, err := readDelta(delta, int64(len(bucket)))
	if err != nil {
		return 0, err
	}
	var change adder
	var failed atomic.Bool
	each(d.blocks, func(i int64) {
		n, ok := d.apply(bucket, i)
		if !ok {
			failed.Store(true)
		}
		change.add(n)
	})
	if failed.Load() {
		return 0, ErrDelta
	}
	return digest + change.value(), nil
}

// delta is a delta that was read.
type delta struct {
	width, blocks       int64
	form                uint32
	table, marks, value []byte
}

func readDelta(data []byte, n int64) (delta, error) {
	le := binary.LittleEndian
	if len(data) < deltaHead {
		return delta{}, ErrDelta
	}
	d := delta{width: int64(le.Uint32(data)), form: le.Uint32(data[4:])}
	marks := le.Uint64(data[16:])
	if d.width != 1 && d.width != 2 || d.form != formGaps && d.form != formBitmap || le.Uint64(data[8:]) != uint64(n) {
		return delta{}, ErrDelta
	}
	d.blocks = (n + blockValues*d.width - 1) / (blockValues * d.width)
	rest := data[deltaHead:]
	if uint64(len(rest)) < uint64(8*d.blocks)+marks || marks > uint64(len(rest)) {
		return delta{}, ErrDelta
	}
	d.table, d.marks, d.value = rest[:8*d.blocks], rest[8*d.blocks:8*d.blocks+int64(marks)], rest[8*d.blocks+int64(marks):]
	return d, nil
}

// block is the marks and the values of a block.
func (d *delta) block(i int64) (marks, values []byte, ok bool) {
	end := func(i int64) (mark, value int64) {
		if i < 0 {
			return 0, 0
		}
		return int64(binary.LittleEndian.Uint32(d.table[8*i:])), int64(binary.LittleEndian.Uint32(d.table[8*i+4:])) * d.width
	}
	mark, value := end(i - 1)
	markEnd, valueEnd := end(i)
	if mark > markEnd || markEnd > int64(len(d.marks)) || value > valueEnd || valueEnd > int64(len(d.value)) {
		return nil, nil, false
	}
	return d.marks[mark:markEnd], d.value[value:valueEnd], true
}

// apply writes the values of a block, and returns the change of the digest.
func (d *delta) apply(bucket []byte, i int64) (change uint64, ok bool) {
	marks, values, ok := d.block(i)
	if !ok {
		return 0, false
	}
	first := i * blockValues * d.width
	block := bucket[first:min(first+blockValues*d.width, int64(len(bucket)))]
	w := writer{block: block, first: first, width: d.width, values: values}
	if d.form == formBitmap {
		w.bitmap(marks)
	} else {
		w.gaps(marks)
	}
	return w.change, !w.bad && len(w.values) == 0
}

// writer writes the values of a block to their places.
type writer struct {
	block  []byte
	first  int64 // offset of the block in the bucket
	width  int64
	values []byte
	change uint64
	bad    bool
}

func (w *writer) gaps(marks []byte) {
	at := int64(0)
	for _, g := range marks {
		if at += int64(g); g == skipGap {
			continue
		}
		if !w.put(at) {
			return
		}
		at++
	}
}

func (w *writer) bitmap(marks []byte) {
	for i, b := range marks {
		for ; b != 0; b &= b - 1 {
			if !w.put(int64(i*8 + bits.TrailingZeros8(b))) {
				return
			}
		}
	}
}

// put writes the next value at a position; false: there is none, or it is outside of the block.
func (w *writer) put(value int64) bool {
	at := value * w.width
	if at+w.width > int64(len(w.block)) || int64(len(w.values)) < w.width {
		w.bad = true
		return false
	}
	position := uint32((w.first + at) / 8)
	if whole := at &^ 7; whole+8 <= int64(len(w.block)) {
		word := w.block[whole : whole+8]
		before := binary.LittleEndian.Uint64(word)
		copy(word[at-whole:], w.values[:w.width])
		w.change += product(binary.LittleEndian.Uint64(word), position) - product(before, position)
	} else {
		var word [8]byte
		copy(word[:], w.block[whole:])
		before := binary.LittleEndian.Uint64(word[:])
		copy(w.block[at:at+w.width], w.values)
		copy(word[:], w.block[whole:])
		w.change += product(binary.LittleEndian.Uint64(word[:]), position) - product(before, position)
	}
	w.values = w.values[w.width:]
	return true
}
