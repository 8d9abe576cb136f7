package wire

import (
	"encoding/binary"
	"math"
	"unicode/utf8"
)

// The msgpack forms as they are written: each function appends one value, or the head of one, in its shortest form.

// maxHead is the size of the longest head: that of an ext32.
const maxHead = 6

// appendScalar appends v if it is nil, a bool, a number or a UTF-8 string.
func appendScalar(dst []byte, v any) ([]byte, bool) {
	switch v := v.(type) {
	case nil:
		return append(dst, codeNil), true
	case bool:
		return appendBool(dst, v), true
	case string:
		if !utf8.ValidString(v) || uint64(len(v)) > maxLen {
			return dst, false
		}
		return appendString(dst, v), true
	case int:
		return appendInt(dst, int64(v)), true
	case int8:
		return appendInt(dst, int64(v)), true
	case int16:
		return appendInt(dst, int64(v)), true
	case int32:
		return appendInt(dst, int64(v)), true
	case int64:
		return appendInt(dst, v), true
	case uint:
		return appendUint(dst, uint64(v)), true
	case uint8:
		return appendUint(dst, uint64(v)), true
	case uint16:
		return appendUint(dst, uint64(v)), true
	case uint32:
		return appendUint(dst, uint64(v)), true
	case uint64:
		return appendUint(dst, v), true
	case float32:
		return appendFloat32(dst, v), true
	case float64:
		return appendFloat64(dst, v), true
	}
	return dst, false
}

func appendBool(dst []byte, v bool) []byte {
	if v {
		return append(dst, codeTrue)
	}
	return append(dst, codeFalse)
}

func appendInt(dst []byte, v int64) []byte {
	switch {
	case v >= 0:
		return appendUint(dst, uint64(v))
	case v >= -32:
		return append(dst, byte(v))
	case v >= math.MinInt8:
		return append(dst, 0xd0, byte(v))
	case v >= math.MinInt16:
		return binary.BigEndian.AppendUint16(append(dst, 0xd1), uint16(v))
	case v >= math.MinInt32:
		return binary.BigEndian.AppendUint32(append(dst, 0xd2), uint32(v))
	}
	return binary.BigEndian.AppendUint64(append(dst, 0xd3), uint64(v))
}

func appendUint(dst []byte, v uint64) []byte {
	switch {
	case v < 0x80:
		return append(dst, byte(v))
	case v <= math.MaxUint8:
		return append(dst, 0xcc, byte(v))
	case v <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(dst, 0xcd), uint16(v))
	case v <= math.MaxUint32:
		return binary.BigEndian.AppendUint32(append(dst, 0xce), uint32(v))
	}
	return binary.BigEndian.AppendUint64(append(dst, 0xcf), v)
}

func appendFloat32(dst []byte, v float32) []byte {
	return binary.BigEndian.AppendUint32(append(dst, 0xca), math.Float32bits(v))
}

func appendFloat64(dst []byte, v float64) []byte {
	return binary.BigEndian.AppendUint64(append(dst, 0xcb), math.Float64bits(v))
}

func appendString(dst []byte, s string) []byte {
	if n := len(s); n < 32 {
		dst = append(dst, 0xa0|byte(n))
	} else {
		dst = appendLen(dst, 0xd9, n)
	}
	return append(dst, s...)
}

func appendBytes(dst, b []byte) []byte { return append(appendLen(dst, codeBin8, len(b)), b...) }

// appendLen appends the first of three consecutive codes that has room for n, and n in one, two or four bytes.
func appendLen(dst []byte, code byte, n int) []byte {
	switch {
	case n <= math.MaxUint8:
		return append(dst, code, byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(dst, code+1), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(dst, code+2), uint32(n))
}

func appendArrayHead(dst []byte, n int) []byte { return appendContainerHead(dst, 0x90, 0xdc, n) }
func appendMapHead(dst []byte, n int) []byte   { return appendContainerHead(dst, 0x80, 0xde, n) }

func appendContainerHead(dst []byte, short, long byte, n int) []byte {
	switch {
	case n < 16:
		return append(dst, short|byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(dst, long), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(dst, long+1), uint32(n))
}

func appendExt32Head(dst []byte, id Ext, n int) []byte {
	return append(binary.BigEndian.AppendUint32(append(dst, 0xc9), uint32(n)), byte(id))
}
