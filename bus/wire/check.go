package wire

import (
	"encoding/binary"
	"math"
	"unicode/utf8"
)

// form is what a msgpack value is, as its first byte says. The forms up to formStr can be keys of a map.
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

const codeNil = 0xc0

// lead is what is known from the first byte alone.
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
	span(0xc2, 0xc3, formBool, 0)
	wide(0xc4, formBin, 1, 2, 4)
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

// head is the start of a value: all of it for nil, bools and numbers; for the others what follows.
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

// Check reports whether b is one whole msgpack value, sound throughout, that decodes into an any: every length is
// covered by bytes that are there, nothing follows it, strings are UTF-8, keys are nil, bools, numbers or strings, the
// nesting and the number of values keep to MaxDepth and MaxValues, tensors have as many bytes as dtype and shape say,
// and there is no ext type that this program does not know. It allocates nothing, and bytes and tensors cost it the
// same whatever their length.
//
// A hostile body that passes can still be larger in memory than on the wire. Decoding it into an any takes at most
// 200 bytes for each of its own (the worst is a chain of maps of one entry: 2 bytes against a Go map; an array of
// small numbers takes 16 to 24), and because of MaxValues never more than 3 GiB beside its bytes and strings. Decoded
// into a program's own types, an element that takes one byte in the body takes the size of its Go type.
func Check(b []byte) error { return check(b, false) }

// check is Check; with foreign set, ext types unknown to this program are passed over as opaque bytes, because they may
// be in the place of a Raw.
func check(b []byte, foreign bool) error {
	c := checker{b: b, foreign: foreign}
	return c.whole(0)
}

// checkRaw checks a value that will be nested below others, and returns how many values are in it.
func checkRaw(b Raw, depth int) (values uint64, err error) {
	c := checker{b: b.orNil(), foreign: true}
	if err := c.whole(depth); err != nil {
		return 0, refuse(CodeInvalid, "the Raw is not a sound value: %w", err)
	}
	return c.values, nil
}

// orNil is what stands for r in a body.
func (r Raw) orNil() Raw {
	if len(r) == 0 {
		return rawNil
	}
	return r
}

var rawNil = Raw{codeNil}

type checker struct {
	b       []byte
	foreign bool
	values  uint64
}

func (c *checker) whole(depth int) error {
	if len(c.b) == 0 {
		return Errorf(CodeMalformed, "the body is empty; nil is the byte 0xc0")
	}
	end, err := c.value(0, len(c.b), depth)
	if err != nil {
		return err
	}
	if end != len(c.b) {
		return c.bad(end, "%d bytes follow the value", len(c.b)-end)
	}
	return nil
}

func (c *checker) bad(off int, format string, args ...any) error {
	return Errorf(CodeMalformed, "body, byte %d: "+format, append([]any{off}, args...)...)
}

// value checks the value at off, which must end at or before end, and returns where it ends. depth counts the
// containers around it; it bounds the recursion.
func (c *checker) value(off, end, depth int) (int, error) {
	if off == end {
		return 0, c.bad(off, "the value is cut off")
	}
	switch l, next := leads[c.b[off]], off+1; {
	case l.form <= formFloat && l.form > formNone && next+int(l.width) <= end:
		return next + int(l.width), nil
	case l.form == formStr && l.width == 0 && next+int(l.n) <= end && utf8.Valid(c.b[next:next+int(l.n)]):
		return next + int(l.n), nil
	}
	return c.compound(off, end, depth)
}

// compound is value for all but numbers and short strings, and for those when something is wrong with them.
func (c *checker) compound(start, end, depth int) (int, error) {
	h, size := readHead(c.b[start:end])
	if size == 0 {
		return 0, c.bad(start, "the value is cut off")
	}
	off := start + size
	switch h.form {
	case formStr, formBin, formExt:
		if h.n > uint64(end-off) {
			return 0, c.bad(start, "%s is longer than the %d bytes that are left", h, end-off)
		}
		return off + int(h.n), c.run(h, start, off, depth)
	case formArray:
		return c.elements(h, start, off, end, depth+1)
	case formMap:
		return c.pairs(h, start, off, end, depth+1)
	}
	return 0, c.bad(start, "0xc1 is not msgpack")
}

// run checks the bytes of a str, bin or ext.
func (c *checker) run(h head, start, off, depth int) error {
	end := off + int(h.n)
	switch h.form {
	case formStr:
		if !utf8.Valid(c.b[off:end]) {
			return c.bad(start, "%s is not UTF-8", h)
		}
	case formExt:
		return c.extension(h, start, off, end, depth)
	}
	return nil
}

func (c *checker) elements(h head, start, off, end, depth int) (int, error) {
	if err := c.admit(h, h.n, start, end-off, depth); err != nil {
		return 0, err
	}
	var err error
	for i := uint64(0); i < h.n; i++ {
		if off, err = c.value(off, end, depth); err != nil {
			return 0, err
		}
	}
	return off, nil
}

func (c *checker) pairs(h head, start, off, end, depth int) (int, error) {
	if err := c.admit(h, 2*h.n, start, end-off, depth); err != nil {
		return 0, err
	}
	var err error
	for i := uint64(0); i < h.n; i++ {
		if off < end && leads[c.b[off]].form > formStr {
			return 0, c.bad(off, "a key of a map must be nil, a bool, a number or a string")
		}
		if off, err = c.value(off, end, depth); err != nil {
			return 0, err
		}
		if off, err = c.value(off, end, depth); err != nil {
			return 0, err
		}
	}
	return off, nil
}

// admit refuses a container that its body cannot hold or that is too much for ours. Every value takes a byte at least.
func (c *checker) admit(h head, values uint64, start, left, depth int) error {
	c.values += values
	switch {
	case values > uint64(left):
		return c.bad(start, "%s does not fit in the %d bytes that are left", h, left)
	case depth > MaxDepth:
		return c.bad(start, "arrays and maps are nested deeper than %d", MaxDepth)
	case c.values > MaxValues:
		return c.bad(start, "more than %d values; send bulk data as bytes or tensors", MaxValues)
	}
	return nil
}

func (c *checker) extension(h head, start, off, end, depth int) error {
	x := extByID(h.ext)
	switch {
	case x == nil && c.foreign:
		return nil
	case x == nil:
		return Errorf(CodeRefused, "body, byte %d: %s", start, h.ext.refusal())
	case x.check != nil:
		if err := x.check(c.b[off:end]); err != nil {
			return c.bad(start, "%w", err)
		}
		return nil
	}
	return c.nested(h, start, off, end, depth+1)
}

// nested checks an ext type whose payload is a value of its own.
func (c *checker) nested(h head, start, off, end, depth int) error {
	if err := c.admit(h, 1, start, end-off, depth); err != nil {
		return err
	}
	next, err := c.value(off, end, depth)
	if err == nil && next != end {
		err = c.bad(next, "%d bytes follow the value in %s", end-next, h)
	}
	return err
}

// skip returns where the value at off ends. It is for bodies that have been checked.
func skip(b []byte, off int) int {
	for left := uint64(1); left > 0; left-- {
		h, size := readHead(b[off:])
		off += size
		switch h.form {
		case formStr, formBin, formExt:
			off += int(h.n)
		case formArray:
			left += h.n
		case formMap:
			left += 2 * h.n
		}
	}
	return off
}
