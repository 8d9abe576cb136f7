package wire

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"reflect"
	"time"
)

// decoder reads one body that has passed check, so it does not check lengths.
type decoder struct {
	UnmarshalOptions
	b   []byte
	off int
	at  int // offset of the last head
}

// into decodes the whole body into what v points to.
func (d *decoder) into(v any) error {
	rv := reflect.ValueOf(v)
	if rv.Kind() != reflect.Pointer || rv.IsNil() {
		return Errorf(CodeInvalid, "decode into %T: not a pointer to a value", v)
	}
	h := d.head()
	if done, err := d.fast(h, v); done {
		return err
	}
	rv = rv.Elem()
	if err := codecOf(rv.Type()).dec(d, h, rv); err != nil {
		return decodeError(v, err)
	}
	return nil
}

// fast decodes into the common types of bodies without reflection. Values that do not fit go to the codecs, which make
// the error.
func (d *decoder) fast(h head, v any) (done bool, err error) {
	switch p := v.(type) {
	case *any:
		if *p, err = d.any(h); err != nil {
			err = decodeError(v, err)
		}
		return true, err
	case *Raw:
		*p = d.raw()
		return true, nil
	case *[]byte:
		if h.form == formBin {
			*p = d.bytes(h)
			return true, nil
		}
	case *string:
		if h.form == formStr {
			*p = d.str(h)
			return true, nil
		}
	case *bool:
		if h.form == formBool {
			*p = h.n != 0
			return true, nil
		}
	case *float64:
		if h.form == formFloat {
			*p = math.Float64frombits(h.n)
			return true, nil
		}
	case *int:
		if n, ok := h.int(); ok && n == int64(int(n)) {
			*p = int(n)
			return true, nil
		}
	case *int64:
		if n, ok := h.int(); ok {
			*p = n
			return true, nil
		}
	case *Tensor:
		if h.form == formExt && h.ext == ExtTensor {
			*p, err = d.tensor(h)
			return true, err
		}
	}
	return false, nil
}

func (d *decoder) head() head {
	h, size := readHead(d.b[d.off:])
	d.at, d.off = d.off, d.off+size
	return h
}

// take is a view of the next n bytes.
func (d *decoder) take(n uint64) []byte {
	from := d.off
	d.off += int(n)
	return d.b[from:d.off:d.off]
}

// own is b itself if the decoded value may share the body, else a copy.
func (d *decoder) own(b []byte) []byte {
	if d.Shared {
		return b
	}
	return bytes.Clone(b)
}

func (d *decoder) str(h head) string   { return string(d.take(h.n)) }
func (d *decoder) bytes(h head) []byte { return d.own(d.take(h.n)) }

// raw returns the whole value whose head was read last.
func (d *decoder) raw() Raw { return d.own(d.view()) }

// view is raw without the copy.
func (d *decoder) view() []byte {
	from := d.at
	d.off = from + sizeOf(d.b[from:])
	return d.b[from:d.off:d.off]
}

// any decodes a value into the Go type of its form.
func (d *decoder) any(h head) (any, error) {
	switch h.form {
	case formBool:
		return h.n != 0, nil
	case formInt:
		return int64(h.n), nil
	case formUint:
		if h.n > math.MaxInt64 {
			return h.n, nil
		}
		return int64(h.n), nil
	case formFloat:
		return math.Float64frombits(h.n), nil
	case formStr:
		return d.str(h), nil
	case formBin:
		return d.bytes(h), nil
	case formArray:
		return d.list(h)
	case formMap:
		return d.stringMap(h)
	case formExt:
		return d.extension(h)
	}
	return nil, nil
}

func (d *decoder) list(h head) ([]any, error) {
	out := make([]any, h.n)
	for i := range out {
		v, err := d.any(d.head())
		if err != nil {
			return nil, under(fmt.Sprintf("[%d]", i), err)
		}
		out[i] = v
	}
	return out, nil
}

// stringMap reads a map with string keys, and continues as anyMap at the first key of another form.
func (d *decoder) stringMap(h head) (any, error) {
	if h.n > 0 && leads[d.b[d.off]].form != formStr {
		return d.anyMap(nil, d.head(), h.n)
	}
	m := make(map[string]any, h.n)
	for i := range h.n {
		kh := d.head()
		if kh.form != formStr {
			return d.anyMap(m, kh, h.n-i)
		}
		k := d.str(kh)
		v, err := d.any(d.head())
		if err != nil {
			return nil, under(keyStep(k), err)
		}
		m[k] = v
	}
	return m, nil
}

// anyMap reads the last left pairs of a map, beginning with the key kh. The pairs before are in sofar.
func (d *decoder) anyMap(sofar map[string]any, kh head, left uint64) (any, error) {
	m := make(map[any]any, uint64(len(sofar))+left)
	for k, v := range sofar {
		m[k] = v
	}
	for ; left > 0; left-- {
		k, err := d.any(kh)
		if err != nil {
			return nil, err
		}
		if m[k], err = d.any(d.head()); err != nil {
			return nil, under(fmt.Sprintf("[%v]", k), err)
		}
		if left > 1 {
			kh = d.head()
		}
	}
	return m, nil
}

// decodeStringMap reads a map with values of one type.
func decodeStringMap[V any](d *decoder, h head, value func(*decoder, head) (V, error)) (map[string]V, error) {
	switch h.form {
	case formNil:
		return nil, nil
	case formMap:
	default:
		return nil, mismatch(h, reflect.TypeFor[map[string]V]())
	}
	m := make(map[string]V, h.n)
	for range h.n {
		k, err := d.wantString(d.head())
		if err != nil {
			return nil, under("[key]", err)
		}
		if m[k], err = value(d, d.head()); err != nil {
			return nil, under(keyStep(k), err)
		}
	}
	return m, nil
}

func (d *decoder) wantString(h head) (string, error) {
	if h.form != formStr {
		return "", mismatch(h, reflect.TypeFor[string]())
	}
	return d.str(h), nil
}

func (d *decoder) wantTensor(h head) (Tensor, error) {
	if h.form != formExt || h.ext != ExtTensor {
		return Tensor{}, mismatch(h, reflect.TypeFor[Tensor]())
	}
	return d.tensor(h)
}

func (d *decoder) extension(h head) (any, error) {
	x := extByID(h.ext)
	if x == nil {
		return nil, refuse(CodeRefused, "%s", h.ext.refusal())
	}
	return x.decode(d, h)
}

// int is the integer in the head, if it fits an int64.
func (h head) int() (int64, bool) {
	return int64(h.n), h.form == formInt || h.form == formUint && h.n <= math.MaxInt64
}

// uint is the integer in the head, if it fits a uint64.
func (h head) uint() (uint64, bool) {
	return h.n, h.form == formUint || h.form == formInt && int64(h.n) >= 0
}

// float is the number in the head, if a float64 holds it exactly.
func (h head) float() (float64, bool) {
	switch h.form {
	case formFloat:
		return math.Float64frombits(h.n), true
	case formInt:
		f := float64(int64(h.n))
		return f, f < 1<<63 && int64(f) == int64(h.n)
	case formUint:
		f := float64(h.n)
		return f, f < 1<<64 && uint64(f) == h.n
	}
	return 0, false
}

// String describes the value, for errors.
func (h head) String() string {
	switch h.form {
	case formNil:
		return "nil"
	case formBool:
		return fmt.Sprint(h.n != 0)
	case formInt:
		return fmt.Sprint(int64(h.n))
	case formUint:
		return fmt.Sprint(h.n)
	case formFloat:
		return fmt.Sprintf("the float %v", math.Float64frombits(h.n))
	case formStr:
		return fmt.Sprintf("a string of %d bytes", h.n)
	case formBin:
		return fmt.Sprintf("%d bytes", h.n)
	case formArray:
		return fmt.Sprintf("an array of %d", h.n)
	case formMap:
		return fmt.Sprintf("a map of %d", h.n)
	case formExt:
		return h.ext.String()
	}
	return "no value"
}

// mismatch is the error for a value that does not fit a Go type.
func mismatch(h head, t reflect.Type) error {
	if h.form == formExt && extByID(h.ext) == nil {
		return refuse(CodeRefused, "%s", h.ext.refusal())
	}
	if h.form == formNil {
		return refuse(CodeRefused, "nil does not fit into %s; use a pointer", t)
	}
	return refuse(CodeRefused, "%s does not fit into %s", h, t)
}

// checkTime checks the payload of a timestamp.
func checkTime(p []byte) error {
	_, err := readTime(p)
	return err
}

func readTime(p []byte) (time.Time, error) {
	var sec int64
	var nsec uint64
	switch len(p) {
	case 4:
		sec = int64(binary.BigEndian.Uint32(p))
	case 8:
		x := binary.BigEndian.Uint64(p)
		sec, nsec = int64(x&(1<<34-1)), x>>34
	case 12:
		sec, nsec = int64(binary.BigEndian.Uint64(p[4:])), uint64(binary.BigEndian.Uint32(p))
	default:
		return time.Time{}, fmt.Errorf("a timestamp of %d bytes; it has 4, 8 or 12", len(p))
	}
	if nsec > 999_999_999 {
		return time.Time{}, fmt.Errorf("a timestamp with %d nanoseconds", nsec)
	}
	return time.Unix(sec, int64(nsec)).UTC(), nil
}
