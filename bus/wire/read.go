package wire

import (
	"encoding/binary"
	"math"
)

// form is the kind of a msgpack value, as its first byte says. The forms up to formStr can be keys of a map.
type form uint8

const (
	formNone form = iota // 0xc1, which msgpack never uses
	formNil
	formBool
	formInt
	formUint
	formFloat
	formStr
	formBin
	formArray
	formMap
	formExt
)

const (
	codeNil   = 0xc0
	codeFalse = 0xc2
	codeTrue  = 0xc3
	codeBin8  = 0xc4
)

// lead is what the first byte of a value says.
type lead struct {
	form  form
	width uint8 // bytes of number or length that follow
	n     int8  // the number or length itself, when none follow
}

// leads is msgpack's table of first bytes.
var leads = func() (t [256]lead) {
	span := func(from, to int, f form, n int) {
		for c := from; c <= to; c++ {
			t[c] = lead{form: f, n: int8(n + c - from)}
		}
	}
	wide := func(from int, f form, widths ...uint8) {
		for i, w := range widths {
			t[from+i] = lead{form: f, width: w}
		}
	}
	span(0x00, 0x7f, formUint, 0)
	span(0x80, 0x8f, formMap, 0)
	span(0x90, 0x9f, formArray, 0)
	span(0xa0, 0xbf, formStr, 0)
	span(codeNil, codeNil, formNil, 0)
	span(codeFalse, codeTrue, formBool, 0)
	wide(codeBin8, formBin, 1, 2, 4)
	wide(0xc7, formExt, 1, 2, 4)
	wide(0xca, formFloat, 4, 8)
	wide(0xcc, formUint, 1, 2, 4, 8)
	wide(0xd0, formInt, 1, 2, 4, 8)
	for i := range 5 {
		t[0xd4+i] = lead{form: formExt, n: 1 << i}
	}
	wide(0xd9, formStr, 1, 2, 4)
	wide(0xdc, formArray, 2, 4)
	wide(0xde, formMap, 2, 4)
	span(0xe0, 0xff, formInt, -32)
	return t
}()

// head is the start of a value: the whole value for nil, bools and numbers, the length of the rest for the others.
type head struct {
	form form
	ext  Ext
	n    uint64 // bool, uint: itself; int: two's complement; float: float64 bits; else a count of bytes, elements, pairs
}

// readHead reads the head at the start of b and returns its size; 0 when b is too short.
func readHead(b []byte) (h head, size int) {
	if len(b) == 0 {
		return head{}, 0
	}
	l := leads[b[0]]
	size = 1 + int(l.width)
	if l.form == formExt {
		size++
	}
	if size > len(b) {
		return head{}, 0
	}
	h.form = l.form
	switch l.width {
	case 0:
		h.n = uint64(int64(l.n))
	case 1:
		h.n = uint64(b[1])
	case 2:
		h.n = uint64(binary.BigEndian.Uint16(b[1:]))
	case 4:
		h.n = uint64(binary.BigEndian.Uint32(b[1:]))
	case 8:
		h.n = binary.BigEndian.Uint64(b[1:])
	}
	switch l.form {
	case formInt:
		unused := (64 - 8*uint(l.width)) & 63
		h.n = uint64(int64(h.n) << unused >> unused)
	case formFloat:
		if l.width == 4 {
			h.n = math.Float64bits(float64(math.Float32frombits(uint32(h.n))))
		}
	case formExt:
		h.ext = Ext(b[size-1])
	}
	return h, size
}

// sizeOf is the size of the value at the start of b; 0 when b does not hold all of it. It counts nested values and does
// not recurse.
func sizeOf(b []byte) int {
	off := 0
	for left := uint64(1); left > 0; left-- {
		if off >= len(b) {
			return 0
		}
		if l := leads[b[off]]; l.form <= formFloat && l.form > formNone {
			if off += 1 + int(l.width); off > len(b) {
				return 0
			}
			continue
		}
		h, size := readHead(b[off:])
		off += size
		switch h.form {
		case formNone:
			return 0
		case formStr, formBin, formExt:
			if h.n > uint64(len(b)-off) {
				return 0
			}
			off += int(h.n)
		case formArray:
			left += h.n
		case formMap:
			left += 2 * h.n
		}
		if left-1 > uint64(len(b)-off) { // a value takes a byte at least
			return 0
		}
	}
	return off
}

// reader reads values of known forms from the front of b, without allocation: envelopes, arguments of calls, heads of
// tensors. The first value of another form, or one that is cut off, sets bad; later reads return zero.
type reader struct {
	b   []byte
	bad bool
}

func (r *reader) fail() { r.bad, r.b = true, nil }

// next reads the head of a value of that form and returns its number or length.
func (r *reader) next(f form) uint64 {
	h, size := readHead(r.b)
	if h.form != f || size == 0 {
		r.fail()
		return 0
	}
	r.b = r.b[size:]
	return h.n
}

// take is a view of the next n bytes.
func (r *reader) take(n uint64) []byte {
	if n > uint64(len(r.b)) {
		r.fail()
		return nil
	}
	out := r.b[:n]
	r.b = r.b[n:]
	return out
}

func (r *reader) uint() uint64 {
	if len(r.b) > 0 && r.b[0] < 0x80 {
		n := r.b[0]
		r.b = r.b[1:]
		return uint64(n)
	}
	return r.next(formUint)
}

// upTo reads a uint that must not be larger than limit.
func (r *reader) upTo(limit uint64) uint64 {
	v := r.uint()
	if v > limit {
		r.fail()
		return 0
	}
	return v
}

func (r *reader) arrayLen() uint64 { return r.next(formArray) }
func (r *reader) mapLen() uint64   { return r.next(formMap) }
func (r *reader) str() string      { return string(r.text()) }

// text is a view of a string, bin a view of bytes.
func (r *reader) text() []byte {
	if len(r.b) > 0 && r.b[0]&0xe0 == 0xa0 {
		n := uint64(r.b[0] & 0x1f)
		r.b = r.b[1:]
		return r.take(n)
	}
	return r.take(r.next(formStr))
}

func (r *reader) bin() []byte { return r.take(r.next(formBin)) }

// raw is a view of the next value, of any form.
func (r *reader) raw() Raw {
	n := sizeOf(r.b)
	if n == 0 {
		r.fail()
		return nil
	}
	return Raw(r.take(uint64(n)))
}
