package wire

import (
	"encoding/binary"
	"math"
)

// The envelope is read and written on every message by every rank, so it has a reader and a writer of its own: the
// few msgpack forms it needs, appended to a slice and read from one without allocation. Bodies use codec.go.

func packMapLen(b []byte, n int) []byte {
	switch {
	case n < 16:
		return append(b, 0x80|byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(b, 0xde), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(b, 0xdf), uint32(n))
}

func packArrayLen(b []byte, n int) []byte {
	switch {
	case n < 16:
		return append(b, 0x90|byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(b, 0xdc), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(b, 0xdd), uint32(n))
}

func packUint(b []byte, v uint64) []byte {
	switch {
	case v < 0x80:
		return append(b, byte(v))
	case v <= math.MaxUint8:
		return append(b, 0xcc, byte(v))
	case v <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(b, 0xcd), uint16(v))
	case v <= math.MaxUint32:
		return binary.BigEndian.AppendUint32(append(b, 0xce), uint32(v))
	}
	return binary.BigEndian.AppendUint64(append(b, 0xcf), v)
}

func packStr(b []byte, s string) []byte {
	switch n := len(s); {
	case n < 32:
		b = append(b, 0xa0|byte(n))
	case n <= math.MaxUint8:
		b = append(b, 0xd9, byte(n))
	case n <= math.MaxUint16:
		b = binary.BigEndian.AppendUint16(append(b, 0xda), uint16(n))
	default:
		b = binary.BigEndian.AppendUint32(append(b, 0xdb), uint32(n))
	}
	return append(b, s...)
}

func packBin(b []byte, v []byte) []byte {
	switch n := len(v); {
	case n <= math.MaxUint8:
		b = append(b, 0xc4, byte(n))
	case n <= math.MaxUint16:
		b = binary.BigEndian.AppendUint16(append(b, 0xc5), uint16(n))
	default:
		b = binary.BigEndian.AppendUint32(append(b, 0xc6), uint32(n))
	}
	return append(b, v...)
}

// unpacker reads the same forms. The first thing that is wrong sticks in bad; what is read afterwards is zero.
type unpacker struct {
	b       []byte
	bad     bool
	tooMany bool         // arguments
	reader  *FrameReader // remembers names, to be used again; nil: nobody does
}

func (u *unpacker) fail() { u.bad, u.b = true, nil }

func (u *unpacker) take(n int) []byte {
	if n < 0 || n > len(u.b) {
		u.fail()
		return nil
	}
	out := u.b[:n]
	u.b = u.b[n:]
	return out
}

func (u *unpacker) byte() byte {
	if len(u.b) == 0 {
		u.fail()
		return 0
	}
	c := u.b[0]
	u.b = u.b[1:]
	return c
}

// uintN reads n big-endian bytes.
func (u *unpacker) uintN(n int) uint64 {
	var v uint64
	for _, c := range u.take(n) {
		v = v<<8 | uint64(c)
	}
	return v
}

func (u *unpacker) mapLen() int {
	switch c := u.byte(); {
	case c&0xf0 == 0x80:
		return int(c & 0x0f)
	case c == 0xde || c == 0xdf:
		return int(u.uintN(2 << (c - 0xde)))
	}
	u.fail()
	return 0
}

func (u *unpacker) arrayLen() int {
	switch c := u.byte(); {
	case c&0xf0 == 0x90:
		return int(c & 0x0f)
	case c == 0xdc || c == 0xdd:
		return int(u.uintN(2 << (c - 0xdc)))
	}
	u.fail()
	return 0
}

func (u *unpacker) uint() uint64 {
	switch c := u.byte(); {
	case c < 0x80:
		return uint64(c)
	case c >= 0xcc && c <= 0xcf:
		return u.uintN(1 << (c - 0xcc))
	}
	u.fail()
	return 0
}

// upTo reads a uint that must not be larger than most.
func (u *unpacker) upTo(most uint64) uint64 {
	v := u.uint()
	if v > most {
		u.fail()
		return 0
	}
	return v
}

// int reads a rank, uint32 a generation or a size.
func (u *unpacker) int() int       { return int(u.upTo(math.MaxInt32)) }
func (u *unpacker) uint32() uint32 { return uint32(u.upTo(math.MaxUint32)) }

func (u *unpacker) str() string { return string(u.text()) }

// text is a view of a string.
func (u *unpacker) text() []byte {
	switch c := u.byte(); {
	case c&0xe0 == 0xa0:
		return u.take(int(c & 0x1f))
	case c >= 0xd9 && c <= 0xdb:
		return u.take(int(u.uintN(1 << (c - 0xd9))))
	}
	u.fail()
	return nil
}

// name is a string that the reader has probably seen before, in the same field.
func (u *unpacker) name(field int) string {
	b := u.text()
	if u.reader == nil || len(b) > 2*MaxName {
		return string(b)
	}
	last := &u.reader.last[field]
	if *last == string(b) {
		return *last
	}
	s, seen := u.reader.names[string(b)]
	if !seen {
		s = string(b)
		u.reader.names[s] = s
	}
	*last = s
	return s
}

// bin returns a view of the bytes, not a copy.
func (u *unpacker) bin() []byte {
	if c := u.byte(); c >= 0xc4 && c <= 0xc6 {
		return u.take(int(u.uintN(1 << (c - 0xc4))))
	}
	u.fail()
	return nil
}

// skip passes over one value of any kind: a field that a newer minor version added. Nested values are counted rather
// than recursed into.
func (u *unpacker) skip() {
	for left := 1; left > 0 && !u.bad; left-- {
		left += u.skipOne()
	}
}

// skipOne passes over one value's head and its own bytes, and returns how many values are nested in it.
func (u *unpacker) skipOne() int {
	c := u.byte()
	switch {
	case c < 0x80 || c >= 0xe0 || c == 0xc0 || c == 0xc2 || c == 0xc3:
	case c&0xf0 == 0x80:
		return 2 * int(c&0x0f)
	case c&0xf0 == 0x90:
		return int(c & 0x0f)
	case c&0xe0 == 0xa0:
		u.take(int(c & 0x1f))
	case c >= 0xc4 && c <= 0xc6:
		u.take(int(u.uintN(1 << (c - 0xc4))))
	case c >= 0xd9 && c <= 0xdb:
		u.take(int(u.uintN(1 << (c - 0xd9))))
	case c >= 0xc7 && c <= 0xc9:
		u.take(int(u.uintN(1<<(c-0xc7))) + 1)
	case c == 0xca || c == 0xce || c == 0xd2:
		u.take(4)
	case c == 0xcb || c == 0xcf || c == 0xd3:
		u.take(8)
	case c == 0xcc || c == 0xd0:
		u.take(1)
	case c == 0xcd || c == 0xd1:
		u.take(2)
	case c >= 0xd4 && c <= 0xd8:
		u.take(1<<(c-0xd4) + 1)
	case c == 0xdc || c == 0xdd:
		return u.nested(1, int(u.uintN(2<<(c-0xdc))))
	case c == 0xde || c == 0xdf:
		return u.nested(2, int(u.uintN(2<<(c-0xde))))
	default:
		u.fail()
	}
	return 0
}

// nested refuses a count that the remaining bytes could not hold.
func (u *unpacker) nested(per, n int) int {
	if n > len(u.b) {
		u.fail()
		return 0
	}
	return per * n
}
