package wire

import (
	"bytes"
	"encoding/binary"

	"troupe/internal/ab"
)

var quickValues = ab.On(ab.QuickValues)

// The bodies of the shortest calls are one value of a plain type. They are written and read here without reflection,
// and p, a pointer to the value, stays on its owner's stack. What is not so plain is left to the codec.

// AppendQuick encodes what p points to after dst, if it is of a plain type.
func AppendQuick(dst []byte, p any) ([]byte, bool) {
	if !quickValues {
		return dst, false
	}
	switch p := p.(type) {
	case *[]byte:
		if *p == nil || uint64(len(*p)) > maxLen {
			return dst, false
		}
		return packBin(dst, *p), true
	case *bool:
		return appendBool(dst, *p), true
	case *int:
		return appendInt(dst, int64(*p)), true
	case *int64:
		return appendInt(dst, *p), true
	case *float64:
		return appendFloat64(dst, *p), true
	}
	return dst, false
}

// ReadQuick decodes b into what p points to, if it is of a plain type and b is one such value. What it stores is its
// own.
func ReadQuick(b []byte, p any) bool {
	if !quickValues {
		return false
	}
	switch p := p.(type) {
	case *[]byte:
		v, ok := wholeBin(b)
		if ok = ok && p != nil; ok {
			*p = bytes.Clone(v)
		}
		return ok
	case *bool:
		ok := p != nil && len(b) == 1 && (b[0] == 0xc2 || b[0] == 0xc3)
		if ok {
			*p = b[0] == 0xc3
		}
		return ok
	}
	return false
}

// wholeBin is the content of b, if b is one binary value and nothing else.
func wholeBin(b []byte) ([]byte, bool) {
	switch {
	case len(b) >= 2 && b[0] == 0xc4:
		return b[2:], int(b[1]) == len(b)-2
	case len(b) >= 3 && b[0] == 0xc5:
		return b[3:], int(binary.BigEndian.Uint16(b[1:])) == len(b)-3
	case len(b) >= 5 && b[0] == 0xc6:
		return b[5:], int64(binary.BigEndian.Uint32(b[1:])) == int64(len(b)-5)
	}
	return nil, false
}
