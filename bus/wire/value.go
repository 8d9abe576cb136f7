package wire

import (
	"reflect"
	"slices"
	"strings"
	"sync"
)

const (
	// MaxDepth is the deepest nesting of arrays, maps and structs in a body.
	MaxDepth = 100

	// MaxValues bounds the number of elements, keys and values in all arrays and maps of a body. Bulk data travels as
	// bytes and tensors, which count as one each.
	MaxValues = 1 << 24

	// maxLen is the largest msgpack length.
	maxLen = 1<<32 - 1
)

// Raw is one encoded msgpack value. Marshal copies it into the body unchanged, including ext types that only Python
// knows; Unmarshal fills it with the bytes of the value. An empty Raw is encoded as nil, and nil is decoded as the byte
// 0xc0: see IsNil. Tensors in a Raw keep their padding, which may no longer align them.
type Raw []byte

// IsNil reports whether r is empty or an encoded nil.
func (r Raw) IsNil() bool { return len(r) == 0 || r[0] == codeNil }

// Marshal encodes v as a body, which is one msgpack value:
//
//	Go                                    msgpack              read into any
//	nil, nil pointer, slice or map        nil                  nil
//	bool                                  bool                 bool
//	int…, uint…                           int, shortest form   int64; uint64 above MaxInt64
//	float32, float64                      float of that width  float64
//	string (UTF-8)                        str                  string
//	[]byte, [n]byte                       bin                  []byte
//	slice, array                          array                []any
//	map, keys sorted by their encoding    map                  map[string]any; map[any]any if a key is no string
//	struct, fields in order               map                  map[string]any
//	time.Time                             ext -1, timestamp    time.Time in UTC
//	Tensor                                ext 1                Tensor
//	a type given to RegisterExt           its ext              that type
//	Raw                                   the value it holds   what that is
//
// Fields are named by `msgpack:"name,omitempty"` tags, or by their Go name; "-" omits a field; embedded structs are
// inlined unless their tag names them. A type that has both methods of one of these pairs encodes and decodes itself:
// EncodeMsgpack and DecodeMsgpack (of github.com/vmihailenco/msgpack/v5), MarshalMsgpack and UnmarshalMsgpack, or else
// the Text or the Binary pair of package encoding: as the value it writes, a str or a bin.
//
// All other types are refused with an error of CodeInvalid that names the type and its path in v. Equal values have
// equal encodings.
func Marshal(v any) ([]byte, error) { return AppendMarshal(nil, v) }

// AppendMarshal appends the encoding of v to dst and returns the extended slice, or dst unchanged with an error. The
// bytes of tensors are aligned to 64 from the start of dst.
func AppendMarshal(dst []byte, v any) ([]byte, error) {
	if out, ok := appendScalar(dst, v); ok {
		return out, nil
	}
	out, err := appendValue(dst, v)
	if err != nil {
		return dst, encodeError(v, err)
	}
	return out, nil
}

// Unmarshal decodes the body b into the value that v points to. It copies what it stores, so b may be reused. It
// replaces slices and maps and fills structs and non-nil pointers in place; keys without a field in the struct are
// ignored, so that structs can grow, and the last of two equal keys wins.
//
// No value changes its meaning: a number that does not fit, a float for an int, nil for a type without nil, and bytes
// for a string are refused. Three conversions are allowed: an int for a float that can hold it, a float64 for a float32,
// which rounds it, and a one-dimensional tensor for a slice of its element type.
//
// Errors: CodeMalformed when b is not one valid value (see Check), and then v is unchanged; CodeRefused when the value
// does not fit v; CodeInvalid when v is not a pointer to a type that can be decoded.
func Unmarshal(b []byte, v any) error { return UnmarshalWith(b, v, UnmarshalOptions{}) }

// UnmarshalShared is Unmarshal without copies: every []byte, Raw and Tensor.Data in v is a view of b, which must not
// change as long as they are in use.
func UnmarshalShared(b []byte, v any) error {
	return UnmarshalWith(b, v, UnmarshalOptions{Shared: true})
}

// UnmarshalOptions are the options of UnmarshalWith. The zero value is Unmarshal.
type UnmarshalOptions struct {
	Shared bool // bytes and tensors are views of the body
	Strict bool // a key without a field in the struct is refused by name
}

// UnmarshalWith is Unmarshal with options.
func UnmarshalWith(b []byte, v any, opt UnmarshalOptions) error {
	if !opt.Shared && ReadQuick(b, v) {
		return nil
	}
	if err := check(b, true); err != nil {
		return err
	}
	d := decoders.Get().(*decoder)
	*d = decoder{b: b, UnmarshalOptions: opt}
	err := d.into(v)
	*d = decoder{}
	decoders.Put(d)
	return err
}

var decoders = sync.Pool{New: func() any { return new(decoder) }}

// appendValue encodes a value that is not a scalar: directly into dst if it is one run of bytes, else with an encoder.
func appendValue(dst []byte, v any) ([]byte, error) {
	switch v := v.(type) {
	case []byte:
		if v == nil {
			return append(dst, codeNil), nil
		}
		if uint64(len(v)) > maxLen {
			return nil, tooLong(len(v))
		}
		return appendBytes(slices.Grow(dst, len(v)+maxHead), v), nil
	case Raw:
		_, err := checkRaw(v, 0)
		return append(dst, v.orNil()...), err
	case Tensor:
		out, err := appendTensorHead(slices.Grow(dst, len(v.Data)+tensorSlack), len(dst), v)
		return append(out, v.Data...), err
	}
	e := encoders.Get().(*encoder)
	defer e.release()
	e.base = len(dst)
	if err := e.any(v); err != nil {
		return nil, err
	}
	return e.appendTo(dst), nil
}

// valueError is an error inside a value. Each container prepends its step to the path; the top turns it into an *Error.
type valueError struct {
	code  Code
	path  string // "", ".Field", "[3].Field", `["key"]`
	msg   string
	cause error
}

func (e *valueError) Error() string { return e.msg }

func refuse(code Code, format string, args ...any) *valueError {
	err := Errorf(code, format, args...)
	return &valueError{code: code, msg: err.Message, cause: err.cause}
}

// under prepends a field, element or key to the path of err.
func under(step string, err error) error {
	if e, ok := err.(*valueError); ok {
		e.path = step + e.path
	}
	return err
}

func encodeError(v any, err error) error {
	return withPath("encode", reflect.TypeOf(v), err)
}

func decodeError(v any, err error) error {
	return withPath("decode into", reflect.TypeOf(v).Elem(), err)
}

func withPath(doing string, t reflect.Type, err error) error {
	e, ok := err.(*valueError)
	if !ok {
		return err
	}
	return Errorf(e.code, "%s %s%s: %s", doing, t, shortPath(e.path), e.msg).WithCause(e.cause)
}

// shortPath bounds the length of a path through a cycle.
func shortPath(path string) string {
	if len(path) <= 200 {
		return path
	}
	return strings.ToValidUTF8(path[:100], "") + "…" + strings.ToValidUTF8(path[len(path)-80:], "")
}
