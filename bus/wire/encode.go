package wire

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

// encoder collects a body: short values in buf, long runs of bytes by reference in cuts, so that each run is copied
// once, into a result that is allocated once. One Marshal uses it at a time.
type encoder struct {
	base  int    // offset of the body in the result; tensors are aligned from the start of the result
	buf   []byte // everything but the cuts
	cuts  []cut  // in order
	large int    // bytes in cuts

	depth  int      // containers around the current value
	hops   int      // pointers and interfaces being followed
	values uint64   // elements, keys and values of containers so far
	keys   []string // stack of the sorted keys of the open maps
}

// cut is a run of the caller's bytes that is inserted before buf[at].
type cut struct {
	at   int
	data []byte
}

const (
	cutSize   = 4 << 10  // shorter runs are copied into buf
	keepSize  = 64 << 10 // the longest buf that the pool keeps
	keepItems = 1 << 10  // the most cuts and keys that it keeps
	maxHops   = 10 * MaxDepth
)

var encoders = sync.Pool{New: func() any { return new(encoder) }}

// release returns the encoder to the pool, without the caller's bytes and without large buffers.
func (e *encoder) release() {
	kept := encoder{buf: reusable(e.buf, keepSize), cuts: reusable(e.cuts, keepItems), keys: reusable(e.keys, keepItems)}
	clear(kept.cuts[:cap(kept.cuts)])
	clear(kept.keys[:cap(kept.keys)])
	*e = kept
	encoders.Put(e)
}

func reusable[T any](s []T, limit int) []T {
	if cap(s) > limit {
		return nil
	}
	return s[:0]
}

// pos is the offset in the result of the next byte.
func (e *encoder) pos() int { return e.base + len(e.buf) + e.large }

// appendTo appends the pieces to dst.
func (e *encoder) appendTo(dst []byte) []byte {
	if cap(dst) == 0 && len(e.cuts) == 0 && cap(e.buf) > keepSize {
		out := e.buf
		e.buf = nil
		return out
	}
	dst = slices.Grow(dst, len(e.buf)+e.large)
	from := 0
	for _, c := range e.cuts {
		dst = append(dst, e.buf[from:c.at]...)
		dst = append(dst, c.data...)
		from = c.at
	}
	return append(dst, e.buf[from:]...)
}

// run writes bytes unchanged.
func (e *encoder) run(b []byte) {
	if len(b) < cutSize {
		e.buf = append(e.buf, b...)
		return
	}
	e.cuts = append(e.cuts, cut{at: len(e.buf), data: b})
	e.large += len(b)
}

// any writes v by its dynamic type, without reflection for the types that an any decodes to.
func (e *encoder) any(v any) error {
	if out, ok := appendScalar(e.buf, v); ok {
		e.buf = out
		return nil
	}
	switch v := v.(type) {
	case string:
		return e.str(v)
	case []byte:
		return e.bytes(v)
	case Raw:
		return e.raw(v)
	case Tensor:
		return e.tensor(v)
	case time.Time:
		e.time(v)
		return nil
	case []any:
		return e.list(v)
	case map[string]any:
		return encodeStringMap(e, v, (*encoder).any)
	}
	rv := reflect.ValueOf(v)
	return codecOf(rv.Type()).enc(e, rv)
}

func (e *encoder) nil() { e.buf = append(e.buf, codeNil) }

func (e *encoder) str(s string) error {
	if !utf8.ValidString(s) {
		return refuse(CodeInvalid, "the string %q is not UTF-8; send []byte", Clip(s))
	}
	if uint64(len(s)) > maxLen {
		return tooLong(len(s))
	}
	e.buf = appendString(e.buf, s)
	return nil
}

func (e *encoder) bytes(b []byte) error {
	if b == nil {
		e.nil()
		return nil
	}
	if uint64(len(b)) > maxLen {
		return tooLong(len(b))
	}
	e.buf = appendLen(e.buf, codeBin8, len(b))
	e.run(b)
	return nil
}

func (e *encoder) raw(r Raw) error {
	values, err := checkRaw(r, e.depth)
	if err != nil {
		return err
	}
	e.run(r.orNil())
	return e.count(values)
}

func (e *encoder) tensor(t Tensor) (err error) {
	e.buf, err = appendTensorHead(e.buf, e.pos(), t)
	e.run(t.Data)
	return err
}

// time writes msgpack's timestamp, in the shortest of its three forms.
func (e *encoder) time(t time.Time) {
	sec, nsec := t.Unix(), uint64(t.Nanosecond())
	ext := byte(0xff) // ExtTimestamp
	switch {
	case nsec == 0 && sec>>32 == 0:
		e.buf = binary.BigEndian.AppendUint32(append(e.buf, 0xd6, ext), uint32(sec))
	case sec>>34 == 0:
		e.buf = binary.BigEndian.AppendUint64(append(e.buf, 0xd7, ext), nsec<<34|uint64(sec))
	default:
		e.buf = binary.BigEndian.AppendUint32(append(e.buf, 0xc7, 12, ext), uint32(nsec))
		e.buf = binary.BigEndian.AppendUint64(e.buf, uint64(sec))
	}
}

func (e *encoder) list(vs []any) error {
	if vs == nil {
		e.nil()
		return nil
	}
	if err := e.openArray(len(vs)); err != nil {
		return err
	}
	for i, v := range vs {
		if err := e.any(v); err != nil {
			return under(fmt.Sprintf("[%d]", i), err)
		}
	}
	e.close()
	return nil
}

// openArray starts an array of n elements, openMap a map of n pairs; close ends them. After an error the encoder is not
// used any more, so containers may stay open.
func (e *encoder) openArray(n int) error {
	err := e.open(uint64(n))
	e.buf = appendArrayHead(e.buf, n)
	return err
}

func (e *encoder) openMap(n int) error {
	err := e.open(2 * uint64(n))
	e.buf = appendMapHead(e.buf, n)
	return err
}

func (e *encoder) open(values uint64) error {
	e.depth++
	if e.depth > MaxDepth {
		return tooDeep()
	}
	return e.count(values)
}

func (e *encoder) close() { e.depth-- }

func (e *encoder) count(values uint64) error {
	e.values += values
	if e.values > MaxValues {
		return refuse(CodeInvalid, "more than %d values in one body; send bulk data as bytes or a Tensor", MaxValues)
	}
	return nil
}

// follow counts the pointers and interfaces on the path to a value: a cycle of those alone opens no container.
func (e *encoder) follow(v reflect.Value, enc encFunc) error {
	e.hops++
	if e.hops > maxHops {
		return refuse(CodeInvalid, "more than %d pointers deep: a cycle?", maxHops)
	}
	err := enc(e, v)
	e.hops--
	return err
}

// encodeStringMap writes a map in the order of its encoded keys: for strings by length, then by bytes.
func encodeStringMap[V any](e *encoder, m map[string]V, value func(*encoder, V) error) error {
	if m == nil {
		e.nil()
		return nil
	}
	if err := e.openMap(len(m)); err != nil {
		return err
	}
	from := len(e.keys)
	for k := range m {
		e.keys = append(e.keys, k)
	}
	slices.SortFunc(e.keys[from:], compareKeys)
	for i := range len(m) {
		k := e.keys[from+i]
		if err := e.str(k); err != nil {
			return under("[key]", err)
		}
		if err := value(e, m[k]); err != nil {
			return under(keyStep(k), err)
		}
	}
	e.keys = e.keys[:from]
	e.close()
	return nil
}

func compareKeys(a, b string) int {
	if len(a) != len(b) {
		return len(a) - len(b)
	}
	return strings.Compare(a, b)
}

func keyStep(k string) string { return fmt.Sprintf("[%q]", Clip(k)) }

// entry is one pair of a map whose keys are encoded before they are sorted.
type entry struct {
	key   []byte
	value reflect.Value
}

// entries encodes the keys of m and sorts by them.
func (e *encoder) entries(m reflect.Value, key encFunc) ([]entry, error) {
	k := encoders.Get().(*encoder)
	defer k.release()
	out := make([]entry, 0, m.Len())
	ends := make([]int, 0, m.Len())
	for it := m.MapRange(); it.Next(); {
		if err := key(k, it.Key()); err != nil {
			return nil, under("[key]", err)
		}
		out = append(out, entry{value: it.Value()})
		ends = append(ends, len(k.buf))
	}
	if len(k.cuts) > 0 || k.values > 0 {
		return nil, under("[key]", refuse(CodeInvalid, badKey))
	}
	keys := bytes.Clone(k.buf)
	from := 0
	for i, end := range ends {
		out[i].key, from = keys[from:end], end
	}
	slices.SortFunc(out, func(a, b entry) int { return bytes.Compare(a.key, b.key) })
	return out, checkKeys(out)
}

const badKey = "a key of a map must be nil, a bool, a number or a string"

// checkKeys refuses keys that are not scalars, and two keys with one encoding.
func checkKeys(es []entry) error {
	for i, x := range es {
		if leads[x.key[0]].form > formStr {
			return under("[key]", refuse(CodeInvalid, badKey))
		}
		if i > 0 && bytes.Equal(x.key, es[i-1].key) {
			return under("[key]", refuse(CodeInvalid, "two keys have the same encoding, % x", x.key))
		}
	}
	return nil
}

func tooDeep() error { return refuse(CodeInvalid, "nested deeper than %d: a cycle?", MaxDepth) }

func tooLong(n int) error {
	return refuse(CodeInvalid, "%d bytes are more than the 4 GiB that one value can hold; split it", n)
}
