package wire

import (
	"reflect"
	"slices"
	"strings"
	"sync"
)

// Why a codec of our own: the msgpack libraries to be had allocate what a hostile length claims (five bytes end the
// process), follow a cycle until the stack ends, wrap a number that does not fit its field, and leave the order of most
// maps to chance. What is written here is what a body needs beyond that, and the tests read and write it with
// github.com/vmihailenco/msgpack as the peer.

const (
	// MaxDepth is how deep arrays, maps and structs may nest in a body.
	MaxDepth = 100

	// MaxValues is how many elements, keys and values the arrays and maps of a body may hold in all. Bulk data
	// travels as bytes and tensors, which count as one each.
	MaxValues = 1 << 24

	// maxLen is what a msgpack length can say.
	maxLen = 1<<32 - 1
)

// Raw is one msgpack value, already encoded. Marshal copies it into the body untouched, ext types that only Python
// knows included; Unmarshal fills it with the bytes found in its place. An empty Raw is written as nil, and nil is read
// as the byte 0xc0: see IsNil. Tensors in a Raw keep the padding they had, which may no longer align them.
type Raw []byte

// IsNil reports whether r holds nothing: it is empty, or an encoded nil.
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
// Fields are named by `msgpack:"name,omitempty"` tags, or by their Go name; "-" leaves one out; embedded structs are
// inlined unless their tag names them. A type that can both write and read itself, with MarshalMsgpack and
// UnmarshalMsgpack, or else the Text or the Binary pair of package encoding, does so: as that value, a str or a bin.
//
// Everything else is refused with an error of CodeInvalid that names the type and its place in v. The same value gives
// the same bytes each time.
func Marshal(v any) ([]byte, error) { return AppendMarshal(nil, v) }

// AppendMarshal appends the encoding of v to dst and returns the extended slice; on an error, dst as it was. The bytes
// of tensors are aligned to 64 from the start of dst.
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

// Unmarshal decodes the body b into what v, a pointer, points to. What it stores is its own: b may be used again. It
// replaces slices and maps and fills structs and non-nil pointers in place; keys that a struct has no field for are
// passed over, so that records can grow, and of a key that is there twice the last counts.
//
// Nothing changes its meaning on the way: a number that does not fit, a float for an int, nil for what has no nil, bytes
// for a string are refused. Three things are allowed: an int for a float that can hold it, a wide float for a float32,
// which rounds it, and a one-dimensional tensor for a slice of its numbers.
//
// Errors: CodeMalformed when b is not one sound value (see Check), and then v is untouched; CodeRefused when it is
// one that v cannot take; CodeInvalid when v is not a pointer to something that can be decoded.
func Unmarshal(b []byte, v any) error { return UnmarshalWith(b, v, UnmarshalOptions{}) }

// UnmarshalShared is Unmarshal without copies: every []byte, Raw and Tensor.Data in v is a view of b, which must not
// change as long as they are in use.
func UnmarshalShared(b []byte, v any) error {
	return UnmarshalWith(b, v, UnmarshalOptions{Shared: true})
}

// UnmarshalOptions are the choices of UnmarshalWith. The zero value is what Unmarshal does.
type UnmarshalOptions struct {
	Shared bool // bytes and tensors are views of the body
	Strict bool // a key that a struct has no field for is refused by name
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

// appendValue encodes what is more than a scalar: straight into dst where it is one run of bytes, else by an encoder.
func appendValue(dst []byte, v any) ([]byte, error) {
	switch v := v.(type) {
	case []byte:
		if v == nil {
			return append(dst, codeNil), nil
		}
		out, err := appendBinHead(slices.Grow(dst, len(v)+maxHead), len(v))
		return append(out, v...), err
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

// valueError is an error on its way out of a value. Each container adds its step to the path; the top makes it an
// *Error.
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

// under says that err happened one step below: in that field, element or key.
func under(step string, err error) error {
	if e, ok := err.(*valueError); ok {
		e.path = step + e.path
	}
	return err
}

func encodeError(v any, err error) error {
	return placed("encode", reflect.TypeOf(v), err)
}

func decodeError(v any, err error) error {
	return placed("decode into", reflect.TypeOf(v).Elem(), err)
}

func placed(doing string, t reflect.Type, err error) error {
	e, ok := err.(*valueError)
	if !ok {
		return err
	}
	return Errorf(e.code, "%s %s%s: %s", doing, t, shortPath(e.path), e.msg).WithCause(e.cause)
}

// shortPath keeps a path through a cycle from filling an error message.
func shortPath(path string) string {
	if len(path) <= 200 {
		return path
	}
	return strings.ToValidUTF8(path[:100], "") + "…" + strings.ToValidUTF8(path[len(path)-80:], "")
}
