package wire

import (
	"encoding"
	"reflect"

	"github.com/vmihailenco/msgpack/v5"
)

// The pairs of methods by which a type encodes and decodes itself.
type (
	libraryCustom interface {
		msgpack.CustomEncoder
		msgpack.CustomDecoder
	}
	msgpackCustom interface {
		MarshalMsgpack() ([]byte, error)
		UnmarshalMsgpack([]byte) error
	}
	textCustom interface {
		encoding.TextMarshaler
		encoding.TextUnmarshaler
	}
	binaryCustom interface {
		encoding.BinaryMarshaler
		encoding.BinaryUnmarshaler
	}
)

// customCodec is the codec of a type that encodes itself, by its own methods or those of its pointer.
func customCodec(t reflect.Type) (typeCodec, bool) {
	if t.Kind() == reflect.Pointer || t.Kind() == reflect.Interface {
		return typeCodec{}, false
	}
	switch p := reflect.PointerTo(t); {
	case p.Implements(reflect.TypeFor[libraryCustom]()):
		return typeCodec{encLibrary, decLibrary}, true
	case p.Implements(reflect.TypeFor[msgpackCustom]()):
		return typeCodec{encMsgpack, decMsgpack}, true
	case p.Implements(reflect.TypeFor[textCustom]()):
		return typeCodec{encText, decText}, true
	case p.Implements(reflect.TypeFor[binaryCustom]()):
		return typeCodec{encBinary, decBinary}, true
	}
	return typeCodec{}, false
}

// methods returns v's pointer, which has all its methods.
func methods[T any](v reflect.Value) T { return addressable(v).Addr().Interface().(T) }

// addressable is v, or a copy of it when v has no address.
func addressable(v reflect.Value) reflect.Value {
	if v.CanAddr() {
		return v
	}
	p := reflect.New(v.Type()).Elem()
	p.Set(v)
	return p
}

// encLibrary writes what the type's EncodeMsgpack wrote, after the same check as for a Raw.
func encLibrary(e *encoder, v reflect.Value) error {
	b, err := libraryMarshal(methods[libraryCustom](v))
	if err != nil {
		return customError(CodeInvalid, v, err)
	}
	return e.raw(b)
}

func decLibrary(d *decoder, _ head, v reflect.Value) error {
	return customError(CodeRefused, v, libraryUnmarshal(d.view(), methods[libraryCustom](v)))
}

func encMsgpack(e *encoder, v reflect.Value) error {
	b, err := methods[msgpackCustom](v).MarshalMsgpack()
	if err != nil {
		return customError(CodeInvalid, v, err)
	}
	return e.raw(b)
}

func decMsgpack(d *decoder, _ head, v reflect.Value) error {
	return customError(CodeRefused, v, methods[msgpackCustom](v).UnmarshalMsgpack(d.raw()))
}

func encText(e *encoder, v reflect.Value) error {
	b, err := methods[textCustom](v).MarshalText()
	if err != nil {
		return customError(CodeInvalid, v, err)
	}
	return e.str(string(b))
}

func decText(d *decoder, h head, v reflect.Value) error {
	if h.form != formStr {
		return mismatch(h, v.Type())
	}
	return customError(CodeRefused, v, methods[textCustom](v).UnmarshalText(d.take(h.n)))
}

func encBinary(e *encoder, v reflect.Value) error {
	b, err := methods[binaryCustom](v).MarshalBinary()
	if err != nil {
		return customError(CodeInvalid, v, err)
	}
	if b == nil {
		b = []byte{}
	}
	return e.bytes(b)
}

func decBinary(d *decoder, h head, v reflect.Value) error {
	if h.form != formBin {
		return mismatch(h, v.Type())
	}
	return customError(CodeRefused, v, methods[binaryCustom](v).UnmarshalBinary(d.own(d.take(h.n))))
}

// customError names the type whose method failed; nil stays nil.
func customError(code Code, v reflect.Value, err error) error {
	if err == nil {
		return nil
	}
	return refuse(code, "%s: %w", v.Type(), err)
}
