package wire

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"unicode/utf8"
)

// field is one encoded field of a struct.
type field struct {
	name      string
	key       []byte // the name, encoded
	index     []int
	omitEmpty bool
	codec     *typeCodec
}

func (b codecBuilder) structure(t reflect.Type) typeCodec {
	fields, err := b.fields(t)
	if err != nil {
		return unsupported(t, err.Error())
	}
	byName := make(map[string]*field, len(fields))
	for i, f := range fields {
		byName[f.name] = &fields[i]
	}
	return typeCodec{
		enc: func(e *encoder, v reflect.Value) error { return encStruct(e, v, fields) },
		dec: func(d *decoder, h head, v reflect.Value) error { return decStruct(d, h, v, byName) },
	}
}

// fields lists the encoded fields of a struct, or reports why it cannot be encoded.
func (b codecBuilder) fields(t reflect.Type) ([]field, error) {
	var out []field
	var closed [][]int // embedded structs that are not inlined: their fields belong to them
	for _, f := range reflect.VisibleFields(t) {
		if within(closed, f.Index) {
			continue
		}
		tag, err := parseTag(f)
		if err != nil {
			return nil, err
		}
		if inlined(f, tag) {
			continue
		}
		closed = append(closed, f.Index)
		if tag.name == "-" || !f.IsExported() {
			continue
		}
		if slices.ContainsFunc(out, func(o field) bool { return o.name == tag.name }) {
			return nil, fmt.Errorf("two of its fields are named %q", tag.name)
		}
		out = append(out, field{tag.name, appendString(nil, tag.name), f.Index, tag.omitEmpty, b.codec(f.Type)})
	}
	if len(out) == 0 && t.NumField() > 0 {
		return nil, errors.New("it has no exported fields; give it MarshalMsgpack and UnmarshalMsgpack, or omit it with the tag `msgpack:\"-\"`")
	}
	return out, nil
}

// within reports whether a field is inside one of others.
func within(others [][]int, index []int) bool {
	return slices.ContainsFunc(others, func(o []int) bool { return len(o) < len(index) && slices.Equal(o, index[:len(o)]) })
}

// fieldTag is a parsed msgpack tag.
type fieldTag struct {
	name      string // the Go name if the tag has none
	given     bool   // the tag has a name
	omitEmpty bool
}

// parseTag reads a field's tag. Unknown options are refused: they might change the encoding of the field.
func parseTag(f reflect.StructField) (fieldTag, error) {
	name, options, _ := strings.Cut(f.Tag.Get("msgpack"), ",")
	tag := fieldTag{name: name, given: name != ""}
	if !tag.given {
		tag.name = f.Name
	}
	for option := range strings.SplitSeq(options, ",") {
		switch option {
		case "":
		case "omitempty":
			tag.omitEmpty = true
		default:
			return tag, fmt.Errorf("the tag of %s has the unsupported option %q", f.Name, option)
		}
	}
	if !utf8.ValidString(name) {
		return tag, fmt.Errorf("the tag of %s is not UTF-8", f.Name)
	}
	if tag.given && name != "-" && !f.IsExported() {
		return tag, fmt.Errorf("its field %s has a tag, but is not exported", f.Name)
	}
	if inlined(f, tag) && f.Type.Kind() == reflect.Pointer && !f.IsExported() {
		return tag, fmt.Errorf("it embeds a pointer to the unexported struct %s", f.Name)
	}
	return tag, nil
}

// inlined reports whether an embedded struct is replaced by its fields: unless its tag has a name, or its type a codec of
// its own.
func inlined(f reflect.StructField, tag fieldTag) bool {
	t := indirect(f.Type)
	if !f.Anonymous || tag.given || t.Kind() != reflect.Struct {
		return false
	}
	_, custom := customCodec(t)
	return !custom && extByType(t) == nil && extByType(reflect.PointerTo(t)) == nil
}

func indirect(t reflect.Type) reflect.Type {
	if t.Kind() == reflect.Pointer {
		return t.Elem()
	}
	return t
}

func encStruct(e *encoder, v reflect.Value, fields []field) error {
	n := 0
	for i := range fields {
		if _, ok := fields[i].of(v); ok {
			n++
		}
	}
	if err := e.openMap(n); err != nil {
		return err
	}
	for i := range fields {
		f := &fields[i]
		fv, ok := f.of(v)
		if !ok {
			continue
		}
		e.buf = append(e.buf, f.key...)
		if err := f.codec.enc(e, fv); err != nil {
			return under("."+f.name, err)
		}
	}
	e.close()
	return nil
}

// of returns the field of v and whether it is encoded: not if it is empty with omitempty, or in a nil embedded pointer.
func (f *field) of(v reflect.Value) (reflect.Value, bool) {
	if len(f.index) > 1 {
		fv, err := v.FieldByIndexErr(f.index)
		return fv, err == nil && !(f.omitEmpty && empty(fv))
	}
	fv := v.Field(f.index[0])
	return fv, !(f.omitEmpty && empty(fv))
}

func empty(v reflect.Value) bool {
	switch v.Kind() {
	case reflect.Slice, reflect.Map:
		return v.Len() == 0
	}
	return v.IsZero()
}

func decStruct(d *decoder, h head, v reflect.Value, byName map[string]*field) error {
	if h.form == formNil && v.NumField() == 0 {
		return nil
	}
	if h.form != formMap {
		return mismatch(h, v.Type())
	}
	for range h.n {
		f, err := d.field(byName)
		switch {
		case err != nil:
			return err
		case f == nil:
			d.off += sizeOf(d.b[d.off:])
		default:
			if err := f.codec.dec(d, d.head(), f.settable(v)); err != nil {
				return under("."+f.name, err)
			}
		}
	}
	return nil
}

// field reads a key and finds its field; nil when there is none and unknown keys are allowed.
func (d *decoder) field(byName map[string]*field) (*field, error) {
	h := d.head()
	var f *field
	if h.form == formStr {
		f = byName[string(d.take(h.n))]
	}
	if f == nil && d.Strict {
		return nil, refuse(CodeRefused, "there is no field for the key %s", encodedKey(d.b[d.at:d.off]))
	}
	return f, nil
}

// settable returns the field of v and allocates the embedded pointers on the path to it.
func (f *field) settable(v reflect.Value) reflect.Value {
	for i, x := range f.index {
		if i > 0 && v.Kind() == reflect.Pointer {
			if v.IsNil() {
				v.Set(reflect.New(v.Type().Elem()))
			}
			v = v.Elem()
		}
		v = v.Field(x)
	}
	return v
}
