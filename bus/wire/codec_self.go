package wire

import (
	"encoding"
	"reflect"
)

// The pairs of methods by which a type writes and reads itself.
type (
	msgpackSelf interface {
		MarshalMsgpack() ([]byte, error)
		UnmarshalMsgpack([]byte) error
	}
	textSelf interface {
		encoding.TextMarshaler
		encoding.TextUnmarshaler
	}
	binarySelf interface {
		encoding.BinaryMarshaler
		encoding.BinaryUnmarshaler
	}
)

// selfCodec is the codec of a type that writes and reads itself, by methods of its own or of its pointer.
func selfCodec(t reflect.Type) (typeCodec, bool) {
	if t.Kind() == reflect.Pointer || t.Kind() == reflect.Interface {
		return typeCodec{}, false
	}
	switch p := reflect.PointerTo(t); {
	case p.Implements(reflect.TypeFor[msgpackSelf]()):
		return typeCodec{encMsgpackSelf, decMsgpackSelf}, true
	case p.Implements(reflect.TypeFor[textSelf]()):
		return typeCodec{encTextSelf, decTextSelf}, true
	case p.Implements(reflect.TypeFor[binarySelf]()):
		return typeCodec{encBinarySelf, decBinarySelf}, true
	}
	return typeCodec{}, false
}

// self returns v's pointer, which has all its methods.
func self[T any](v reflect.Value) T { return addressable(v).Addr().Interface().(T) }

// addressable is v, or a copy of it when v has no address.
func addressable(v reflect.Value) reflect.Value {
	if v.CanAddr() {
		return v
	}
	p := reflect.New(v.Type()).Elem()
	p.Set(v)
	return p
}

func encMsgpackSelf(e *encoder, v reflect.Value) error {
	b, err := self[msgpackSelf](v).MarshalMsgpack()
	if err != nil {
		return selfError(CodeInvalid, v, err)
	}
	return e.raw(b)
}

func decMsgpackSelf(d *decoder, _ head, v reflect.Value) error {
	return selfError(CodeRefused, v, self[msgpackSelf](v).UnmarshalMsgpack(d.raw()))
}

func encTextSelf(e *encoder, v reflect.Value) error {
	b, err := self[textSelf](v).MarshalText()
	if err != nil {
		return selfError(CodeInvalid, v, err)
	}
	return e.str(string(b))
}

func decTextSelf(d *decoder, h head, v reflect.Value) error {
	if h.form != formStr {
		return mismatch(h, v.Type())
	}
	return selfError(CodeRefused, v, self[textSelf](v).UnmarshalText(d.take(h.n)))
}

func encBinarySelf(e *encoder, v reflect.Value) error {
	b, err := self[binarySelf](v).MarshalBinary()
	if err != nil {
		return selfError(CodeInvalid, v, err)
	}
	if b == nil {
		b = []byte{}
	}
	return e.bytes(b)
}

func decBinarySelf(d *decoder, h head, v reflect.Value) error {
	if h.form != formBin {
		return mismatch(h, v.Type())
	}
	return selfError(CodeRefused, v, self[binarySelf](v).UnmarshalBinary(d.own(d.take(h.n))))
}

// selfError says which type's own method failed; nil stays nil.
func selfError(code Code, v reflect.Value, err error) error {
	if err == nil {
		return nil
	}
	return refuse(code, "%s: %w", v.Type(), err)
}
