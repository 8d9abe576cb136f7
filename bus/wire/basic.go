package wire

import "bytes"

// AppendQuick appends the value that p points to, if it is []byte, bool, int, int64 or float64: the bodies of the
// shortest calls. It uses no reflection, and the value stays on the caller's stack.
func AppendQuick(dst []byte, p any) ([]byte, bool) {
	switch p := p.(type) {
	case *[]byte:
		if *p == nil || uint64(len(*p)) > maxLen {
			return dst, false
		}
		return appendBytes(dst, *p), true
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

// ReadQuick decodes b into the value that p points to, if that is []byte or bool and b is one value of that type. It
// copies what it stores.
func ReadQuick(b []byte, p any) bool {
	switch p := p.(type) {
	case *[]byte:
		v, ok := wholeBin(b)
		if ok = ok && p != nil; ok {
			*p = bytes.Clone(v)
		}
		return ok
	case *bool:
		ok := p != nil && len(b) == 1 && (b[0] == codeFalse || b[0] == codeTrue)
		if ok {
			*p = b[0] == codeTrue
		}
		return ok
	}
	return false
}

// wholeBin is the content of b, if b is one binary value and nothing else.
func wholeBin(b []byte) ([]byte, bool) {
	r := reader{b: b}
	v := r.bin()
	return v, !r.bad && len(r.b) == 0
}
