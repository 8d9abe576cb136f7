package wire

import (
	"fmt"
	"reflect"
	"sync"
	"time"
	"unsafe"
)

type (
	encFunc func(e *encoder, v reflect.Value) error
	decFunc func(d *decoder, h head, v reflect.Value) error // h has been read; v can be set
)

// typeCodec encodes and decodes values of one Go type.
type typeCodec struct {
	enc encFunc
	dec decFunc
}

// codecs holds the finished typeCodec of every reflect.Type used so far.
var codecs sync.Map

func codecOf(t reflect.Type) *typeCodec {
	if c, ok := codecs.Load(t); ok {
		return c.(*typeCodec)
	}
	b := codecBuilder{}
	c := b.codec(t)
	for t, c := range b {
		codecs.LoadOrStore(t, c)
	}
	return c
}

// codecBuilder holds the codecs under construction. A type that contains itself finds its own unfinished codec there,
// which is used only after all of them are finished and published.
type codecBuilder map[reflect.Type]*typeCodec

func (b codecBuilder) codec(t reflect.Type) *typeCodec {
	if c, ok := b[t]; ok {
		return c
	}
	if c, ok := codecs.Load(t); ok {
		return c.(*typeCodec)
	}
	c := new(typeCodec)
	b[t] = c
	*c = b.build(t)
	return c
}

func (b codecBuilder) build(t reflect.Type) typeCodec {
	if x := extByType(t); x != nil {
		return x.codec
	}
	if extByType(reflect.PointerTo(t)) != nil {
		return unsupported(t, "send a pointer to it")
	}
	if t == reflect.TypeFor[Raw]() {
		return typeCodec{encRaw, decRaw}
	}
	if c, ok := customCodec(t); ok {
		return c
	}
	switch t.Kind() {
	case reflect.Bool:
		return typeCodec{encBool, decBool}
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return typeCodec{encInt, decInt}
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return typeCodec{encUint, decUint}
	case reflect.Float32:
		return typeCodec{encFloat32, decFloat}
	case reflect.Float64:
		return typeCodec{encFloat64, decFloat}
	case reflect.String:
		return typeCodec{encString, decString}
	case reflect.Interface:
		return interfaceCodec(t)
	case reflect.Pointer:
		return b.pointer(t)
	case reflect.Slice:
		return b.slice(t)
	case reflect.Array:
		return b.array(t)
	case reflect.Map:
		return b.mapping(t)
	case reflect.Struct:
		return b.structure(t)
	}
	return unsupported(t, "omit the field with the tag `msgpack:\"-\"`")
}

// unsupported is the codec of a type that cannot be encoded. It refuses every value, nil too, so that the mistake shows
// at the first use.
func unsupported(t reflect.Type, remedy string) typeCodec {
	err := func() error { return refuse(CodeInvalid, "%s cannot be sent; %s", t, remedy) }
	return typeCodec{
		enc: func(*encoder, reflect.Value) error { return err() },
		dec: func(*decoder, head, reflect.Value) error { return err() },
	}
}

func encRaw(e *encoder, v reflect.Value) error { return e.raw(v.Bytes()) }

func decRaw(d *decoder, _ head, v reflect.Value) error {
	v.SetBytes(d.raw())
	return nil
}

func encBool(e *encoder, v reflect.Value) error {
	e.buf = appendBool(e.buf, v.Bool())
	return nil
}

func decBool(_ *decoder, h head, v reflect.Value) error {
	if h.form != formBool {
		return mismatch(h, v.Type())
	}
	v.SetBool(h.n != 0)
	return nil
}

func encInt(e *encoder, v reflect.Value) error {
	e.buf = appendInt(e.buf, v.Int())
	return nil
}

func decInt(_ *decoder, h head, v reflect.Value) error {
	n, ok := h.int()
	if !ok || v.OverflowInt(n) {
		return mismatch(h, v.Type())
	}
	v.SetInt(n)
	return nil
}

func encUint(e *encoder, v reflect.Value) error {
	e.buf = appendUint(e.buf, v.Uint())
	return nil
}

func decUint(_ *decoder, h head, v reflect.Value) error {
	n, ok := h.uint()
	if !ok || v.OverflowUint(n) {
		return mismatch(h, v.Type())
	}
	v.SetUint(n)
	return nil
}

func encFloat32(e *encoder, v reflect.Value) error {
	e.buf = appendFloat32(e.buf, float32(v.Float()))
	return nil
}

func encFloat64(e *encoder, v reflect.Value) error {
	e.buf = appendFloat64(e.buf, v.Float())
	return nil
}

func decFloat(_ *decoder, h head, v reflect.Value) error {
	f, ok := h.float()
	if !ok || v.OverflowFloat(f) {
		return mismatch(h, v.Type())
	}
	v.SetFloat(f)
	if h.form != formFloat && v.Float() != f {
		return mismatch(h, v.Type())
	}
	return nil
}

func encString(e *encoder, v reflect.Value) error { return e.str(v.String()) }

func decString(d *decoder, h head, v reflect.Value) error {
	if h.form != formStr {
		return mismatch(h, v.Type())
	}
	v.SetString(d.str(h))
	return nil
}

func encTime(e *encoder, v reflect.Value) error {
	e.time(v.Interface().(time.Time))
	return nil
}

func encTensor(e *encoder, v reflect.Value) error { return e.tensor(v.Interface().(Tensor)) }

// interfaceCodec encodes the value in an interface, and decodes into an empty interface.
func interfaceCodec(t reflect.Type) typeCodec {
	enc := func(e *encoder, v reflect.Value) error {
		return e.follow(v, func(e *encoder, v reflect.Value) error { return e.any(v.Interface()) })
	}
	if t.NumMethod() > 0 {
		return typeCodec{enc, unsupported(t, "decode into a concrete type").dec}
	}
	return typeCodec{enc, decAny}
}

func decAny(d *decoder, h head, v reflect.Value) error {
	x, err := d.any(h)
	if err != nil {
		return err
	}
	if x == nil {
		v.SetZero()
		return nil
	}
	v.Set(reflect.ValueOf(x))
	return nil
}

func (b codecBuilder) pointer(t reflect.Type) typeCodec {
	if endless(t) {
		return unsupported(t, "it points to nothing but pointers")
	}
	elem := b.codec(t.Elem())
	return typeCodec{
		enc: func(e *encoder, v reflect.Value) error {
			if v.IsNil() {
				e.nil()
				return nil
			}
			return e.follow(v.Elem(), elem.enc)
		},
		dec: func(d *decoder, h head, v reflect.Value) error {
			if h.form == formNil {
				v.SetZero()
				return nil
			}
			if v.IsNil() {
				v.Set(reflect.New(t.Elem()))
			}
			return elem.dec(d, h, v.Elem())
		},
	}
}

// endless reports whether t is declared as a pointer to itself.
func endless(t reflect.Type) bool {
	for range 10 {
		if t = t.Elem(); t.Kind() != reflect.Pointer {
			return false
		}
	}
	return true
}

func (b codecBuilder) slice(t reflect.Type) typeCodec {
	if plain(t.Elem(), reflect.Uint8) {
		return typeCodec{encBytes, decBytes}
	}
	elem := b.codec(t.Elem())
	enc := func(e *encoder, v reflect.Value) error {
		if v.IsNil() {
			e.nil()
			return nil
		}
		return encElements(e, v, elem)
	}
	dec := func(d *decoder, h head, v reflect.Value) error {
		switch {
		case h.form == formNil:
			v.SetZero()
			return nil
		case h.form == formExt:
			return decVector(d, h, v)
		case h.form != formArray:
			return mismatch(h, t)
		}
		v.Set(reflect.MakeSlice(t, int(h.n), int(h.n)))
		return decElements(d, v, elem)
	}
	return typeCodec{enc, dec}
}

// plain reports whether t is of that kind and does not encode itself.
func plain(t reflect.Type, kind reflect.Kind) bool {
	_, custom := customCodec(t)
	return t.Kind() == kind && !custom
}

func encBytes(e *encoder, v reflect.Value) error { return e.bytes(v.Bytes()) }

func decBytes(d *decoder, h head, v reflect.Value) error {
	switch h.form {
	case formNil:
		v.SetZero()
	case formBin:
		v.SetBytes(d.bytes(h))
	case formExt:
		return decVector(d, h, v)
	default:
		return mismatch(h, v.Type())
	}
	return nil
}

// decVector reads a one-dimensional tensor into a slice of its numbers.
func decVector(d *decoder, h head, v reflect.Value) error {
	elem := v.Type().Elem()
	if h.ext != ExtTensor || !plain(elem, elem.Kind()) {
		return mismatch(h, v.Type())
	}
	t, err := readTensor(d.take(h.n), nil)
	if err != nil {
		return err
	}
	if len(t.Shape) != 1 || t.DType != kindDTypes[elem.Kind()] {
		return refuse(CodeRefused, "the tensor %s does not fit into %s", t, v.Type())
	}
	v.Set(reflect.MakeSlice(v.Type(), t.Shape[0], t.Shape[0]))
	t.fill(unsafe.Slice((*byte)(v.UnsafePointer()), len(t.Data)))
	return nil
}

func (b codecBuilder) array(t reflect.Type) typeCodec {
	if plain(t.Elem(), reflect.Uint8) {
		return typeCodec{encByteArray, decByteArray}
	}
	elem := b.codec(t.Elem())
	return typeCodec{
		enc: func(e *encoder, v reflect.Value) error { return encElements(e, v, elem) },
		dec: func(d *decoder, h head, v reflect.Value) error {
			if h.form != formArray || h.n != uint64(t.Len()) {
				return mismatch(h, t)
			}
			return decElements(d, v, elem)
		},
	}
}

func encByteArray(e *encoder, v reflect.Value) error { return e.bytes(addressable(v).Bytes()) }

func decByteArray(d *decoder, h head, v reflect.Value) error {
	if h.form != formBin || h.n != uint64(v.Len()) {
		return mismatch(h, v.Type())
	}
	copy(v.Bytes(), d.take(h.n))
	return nil
}

func encElements(e *encoder, v reflect.Value, elem *typeCodec) error {
	if err := e.openArray(v.Len()); err != nil {
		return err
	}
	for i := range v.Len() {
		if err := elem.enc(e, v.Index(i)); err != nil {
			return under(fmt.Sprintf("[%d]", i), err)
		}
	}
	e.close()
	return nil
}

func decElements(d *decoder, v reflect.Value, elem *typeCodec) error {
	for i := range v.Len() {
		if err := elem.dec(d, d.head(), v.Index(i)); err != nil {
			return under(fmt.Sprintf("[%d]", i), err)
		}
	}
	return nil
}

func (b codecBuilder) mapping(t reflect.Type) typeCodec {
	switch t {
	case reflect.TypeFor[map[string]any]():
		return stringMapCodec((*encoder).any, (*decoder).any)
	case reflect.TypeFor[map[string]string]():
		return stringMapCodec((*encoder).str, (*decoder).wantString)
	case reflect.TypeFor[map[string]Raw]():
		return stringMapCodec((*encoder).raw, func(d *decoder, _ head) (Raw, error) { return d.raw(), nil })
	case reflect.TypeFor[map[string]Tensor]():
		return stringMapCodec((*encoder).tensor, (*decoder).wantTensor)
	}
	key, elem := b.codec(t.Key()), b.codec(t.Elem())
	return typeCodec{
		enc: func(e *encoder, v reflect.Value) error {
			if v.IsNil() {
				e.nil()
				return nil
			}
			return encMap(e, v, key, elem)
		},
		dec: func(d *decoder, h head, v reflect.Value) error {
			switch h.form {
			case formNil:
				v.SetZero()
				return nil
			case formMap:
				return decMap(d, h, v, key, elem)
			}
			return mismatch(h, t)
		},
	}
}

// stringMapCodec is the codec of the usual maps: without reflection, and with keys that are sorted before encoding.
func stringMapCodec[V any](write func(*encoder, V) error, read func(*decoder, head) (V, error)) typeCodec {
	return typeCodec{
		enc: func(e *encoder, v reflect.Value) error {
			return encodeStringMap(e, v.Interface().(map[string]V), write)
		},
		dec: func(d *decoder, h head, v reflect.Value) error {
			m, err := decodeStringMap(d, h, read)
			if err == nil {
				v.Set(reflect.ValueOf(m))
			}
			return err
		},
	}
}

func encMap(e *encoder, v reflect.Value, key, elem *typeCodec) error {
	entries, err := e.entries(v, key.enc)
	if err != nil {
		return err
	}
	if err := e.openMap(len(entries)); err != nil {
		return err
	}
	for _, x := range entries {
		e.buf = append(e.buf, x.key...)
		if err := elem.enc(e, x.value); err != nil {
			return under("["+encodedKey(x.key)+"]", err)
		}
	}
	e.close()
	return nil
}

// encodedKey describes an encoded key, for errors.
func encodedKey(key []byte) string {
	h, size := readHead(key)
	if h.form == formStr {
		return fmt.Sprintf("%q", Clip(string(key[size:])))
	}
	return h.String()
}

func decMap(d *decoder, h head, v reflect.Value, key, elem *typeCodec) error {
	t := v.Type()
	m := reflect.MakeMapWithSize(t, int(h.n))
	k, x := reflect.New(t.Key()).Elem(), reflect.New(t.Elem()).Elem()
	for range h.n {
		k.SetZero()
		x.SetZero()
		at := d.off
		if err := key.dec(d, d.head(), k); err != nil {
			return under("[key]", err)
		}
		step := d.b[at:d.off]
		if err := elem.dec(d, d.head(), x); err != nil {
			return under("["+encodedKey(step)+"]", err)
		}
		m.SetMapIndex(k, x)
	}
	v.Set(m)
	return nil
}
