package wire

import (
	"encoding/binary"
	"math"
	"unicode/utf8"
)

// maxHead is the longest head that is followed by bytes or values: an ext32's.
const maxHead = 6

// appendScalar encodes v if it is nil, a bool, a number or a string of UTF-8.
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
		return packStr(dst, v), true
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
		return packUint(dst, uint64(v)), true
	case uint8:
		return packUint(dst, uint64(v)), true
	case uint16:
		return packUint(dst, uint64(v)), true
	case uint32:
		return packUint(dst, uint64(v)), true
	case uint64:
		return packUint(dst, v), true
	case float32:
		return appendFloat32(dst, v), true
	case float64:
		return appendFloat64(dst, v), true
	}
	return dst, false
}

func appendBool(dst []byte, v bool) []byte {
	if v {
		return append(dst, 0xc3)
	}
	return append(dst, 0xc2)
}

func appendInt(dst []byte, v int64) []byte {
	switch {
	case v >= 0:
		return packUint(dst, uint64(v))
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

func appendFloat32(dst []byte, v float32) []byte {
	return binary.BigEndian.AppendUint32(append(dst, 0xca), math.Float32bits(v))
}

func appendFloat64(dst []byte, v float64) []byte {
	return binary.BigEndian.AppendUint64(append(dst, 0xcb), math.Float64bits(v))
}

func appendBinHead(dst []byte, n int) ([]byte, error) {
	switch {
	case uint64(n) > maxLen:
		return dst, tooLong(n)
	case n <= math.MaxUint8:
		return append(dst, 0xc4, byte(n)), nil
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(dst, 0xc5), uint16(n)), nil
	}
	return binary.BigEndian.AppendUint32(append(dst, 0xc6), uint32(n)), nil
}

// appendContainerHead starts an array or map of n, which is at most MaxValues.
func appendContainerHead(dst []byte, f form, n int) []byte {
	short, long := byte(0x90), byte(0xdc)
	if f == formMap {
		short, long = 0x80, 0xde
	}
	switch {
	case n < 16:
		return append(dst, short|byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(dst, long), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(dst, long+1), uint32(n))
}
