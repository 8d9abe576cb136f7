package wire

import (
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"
	"time"
)

// Ext is the number of a msgpack ext type, for values without a msgpack form. A number never changes its meaning and is
// never reused.
type Ext int8

const (
	ExtTimestamp Ext = -1 // an instant; msgpack's own
	ExtTensor    Ext = 1  // Tensor: dtype, shape, bytes
	ExtBatch     Ext = 2  // named tensors with equally many rows, and metadata
	ExtHandle    Ext = 3  // a role, or a worker of one, to be called
	ExtReference Ext = 4  // Reference: a value that its owner keeps
	ExtArgument  Ext = 5  // Argument: a reference as an argument of a call, which gets the value
	ExtDevice    Ext = 6  // a tensor on a device of its owner, for callers that take it so (Header.OnDevice)

	// 16 to 31 are for Python values that keep their type between Python programs. Go passes them on inside a Raw and
	// does not decode them.
	ExtPythonTuple     Ext = 16
	ExtPythonSet       Ext = 17
	ExtPythonFrozenset Ext = 18
	ExtPythonDataclass Ext = 19
	ExtPythonEnum      Ext = 20
	ExtNumpyScalar     Ext = 21
	ExtPickle          Ext = 22
	ExtPythonException Ext = 23
	ExtPythonComplex   Ext = 24
	ExtPythonDecimal   Ext = 25
	ExtPythonTime      Ext = 26
	ExtPythonQueue     Ext = 27
	ExtObjectArray     Ext = 29
	ExtPythonOrdered   Ext = 30

	extPythonFirst, extPythonLast Ext = 16, 31
)

// extNames holds the name of each ext type, and the remedy for a sender when the receiver cannot decode it.
var extNames = map[Ext]struct{ name, remedy string }{
	ExtTimestamp:       {"timestamp", ""},
	ExtTensor:          {"tensor", ""},
	ExtBatch:           {"batch", "the program must import the package that defines batches"},
	ExtHandle:          {"handle", "the program must import the package that defines handles"},
	ExtReference:       {"reference", ""},
	ExtArgument:        {"reference as an argument", ""},
	ExtDevice:          {"tensor on a device", "make the call that returns it with options(device=False)"},
	ExtPythonTuple:     {"Python tuple", "send a list"},
	ExtPythonSet:       {"Python set", "send a sorted list"},
	ExtPythonFrozenset: {"Python frozenset", "send a sorted list"},
	ExtPythonDataclass: {"Python dataclass", "send dataclasses.asdict(value)"},
	ExtPythonEnum:      {"Python enum", "send its .value"},
	ExtNumpyScalar:     {"numpy scalar", "send its .item()"},
	ExtPickle:          {"Python pickle", "send dicts, lists, numbers, strings, bytes and arrays"},
	ExtPythonException: {"Python exception", "raise it, or send its text"},
	ExtPythonComplex:   {"Python complex", "send the real and the imaginary part"},
	ExtPythonDecimal:   {"Python decimal", "send its text"},
	ExtPythonTime:      {"Python date or time", "send a datetime in UTC, or its text"},
	ExtPythonQueue:     {"Python queue", "send the worker behind it"},
	ExtObjectArray:     {"numpy array of strings or objects", "send a list"},
	ExtPythonOrdered:   {"Python ordered dict", "send dict(value)"},
}

func (x Ext) String() string {
	if known, ok := extNames[x]; ok {
		return fmt.Sprintf("a %s (ext %d)", known.name, int8(x))
	}
	if x >= extPythonFirst && x <= extPythonLast {
		return fmt.Sprintf("a Python value of a later version (ext %d)", int8(x))
	}
	return fmt.Sprintf("the unknown ext type %d", int8(x))
}

// refusal is the error text of a program that cannot decode x.
func (x Ext) refusal() string {
	if remedy := extNames[x].remedy; remedy != "" {
		return fmt.Sprintf("%s cannot be decoded here; %s", x, remedy)
	}
	return fmt.Sprintf("%s cannot be decoded here; run the same version on both sides", x)
}

// extCodec encodes and decodes one ext type.
type extCodec struct {
	check  func(payload []byte) error // nil: the payload is one msgpack value, and checked as such
	decode func(d *decoder, h head) (any, error)
	codec  typeCodec
}

// The ext types known to this program, by number and by Go type. Written at start-up, read on every message.
var exts struct {
	byID   [256]atomic.Pointer[extCodec] // by the number as a uint8
	byType sync.Map                      // reflect.Type → *extCodec
}

func init() {
	addExt(ExtTimestamp, checkTime, (*decoder).time, encTime)
	addExt(ExtTensor, checkTensor, (*decoder).tensor, encTensor)
}

func extByID(x Ext) *extCodec { return exts.byID[uint8(x)].Load() }

func extByType(t reflect.Type) *extCodec {
	c, _ := exts.byType.Load(t)
	found, _ := c.(*extCodec)
	return found
}

// RegisterExt makes values of type T travel as the ext type id, ExtBatch or ExtHandle. The payload is the encoding of
// the result of pack; unpack turns it into a T again, or returns an error. The result of pack is not changed; unpack
// owns its argument, but after UnmarshalShared the bytes in it are views of the body. The package that defines T calls
// RegisterExt from init; it panics when the number or the type is taken. A nil pointer T is encoded as nil.
func RegisterExt[T, P any](id Ext, pack func(T) (P, error), unpack func(P) (T, error)) {
	if id != ExtBatch && id != ExtHandle {
		panic(fmt.Sprintf("wire: %s cannot be registered", id))
	}
	registerExt(id, pack, unpack)
}

func registerExt[T, P any](id Ext, pack func(T) (P, error), unpack func(P) (T, error)) {
	encode := func(e *encoder, v reflect.Value) error {
		if v.Kind() == reflect.Pointer && v.IsNil() {
			e.nil()
			return nil
		}
		p, err := pack(v.Interface().(T))
		if err != nil {
			return customError(CodeInvalid, v, err)
		}
		return e.nested(id, reflect.ValueOf(&p).Elem())
	}
	decode := func(d *decoder, h head) (T, error) {
		var p P
		var zero T
		if err := codecOf(reflect.TypeFor[P]()).dec(d, d.head(), reflect.ValueOf(&p).Elem()); err != nil {
			return zero, under(fmt.Sprintf("(%s)", extNames[id].name), err)
		}
		v, err := unpack(p)
		if err != nil {
			return zero, refuse(CodeRefused, "%s: %w", id, err)
		}
		return v, nil
	}
	addExt(id, nil, decode, encode)
}

// addExt adds a type to the tables.
func addExt[T any](id Ext, check func([]byte) error, decode func(*decoder, head) (T, error), encode encFunc) {
	t := reflect.TypeFor[T]()
	x := &extCodec{
		check:  check,
		decode: func(d *decoder, h head) (any, error) { return decode(d, h) },
	}
	x.codec = typeCodec{enc: encode, dec: func(d *decoder, h head, v reflect.Value) error {
		switch {
		case h.form == formNil && t.Kind() == reflect.Pointer:
			v.SetZero()
			return nil
		case h.form != formExt || h.ext != id:
			return mismatch(h, t)
		}
		got, err := decode(d, h)
		if err == nil {
			v.Set(reflect.ValueOf(&got).Elem())
		}
		return err
	}}
	_, typeTaken := exts.byType.LoadOrStore(t, x)
	if typeTaken || !exts.byID[uint8(id)].CompareAndSwap(nil, x) {
		panic(fmt.Sprintf("wire: %s or the type %s is registered twice", id, t))
	}
}

// nested writes an ext type whose payload is the value v. Its head is always an ext32, so that the offsets of tensors in
// the payload are known before its length.
func (e *encoder) nested(id Ext, v reflect.Value) error {
	e.depth++
	if e.depth > MaxDepth {
		return tooDeep()
	}
	if err := e.count(1); err != nil {
		return err
	}
	e.buf = appendExt32Head(e.buf, id, 0)
	patch, start := len(e.buf), e.pos()
	if err := codecOf(v.Type()).enc(e, v); err != nil {
		return under(fmt.Sprintf("(%s)", extNames[id].name), err)
	}
	n := e.pos() - start
	if uint64(n) > maxLen {
		return tooLong(n)
	}
	appendExt32Head(e.buf[:patch-maxHead], id, n)
	e.depth--
	return nil
}

func (d *decoder) time(h head) (time.Time, error) { return readTime(d.take(h.n)) }

func (d *decoder) tensor(h head) (Tensor, error) {
	t, err := readTensor(d.take(h.n), nil)
	if err == nil {
		t.Data = d.own(t.Data)
	}
	return t, err
}
