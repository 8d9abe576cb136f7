package wire

import (
	"bytes"

	"github.com/vmihailenco/msgpack/v5"
)

// MarshalRecord encodes a message of Troupe's own protocols: a struct, defined by both sides, of bools, numbers, strings,
// bytes, Raws, times, and slices, string maps and structs of those. github.com/vmihailenco/msgpack/v5 does the work. The
// bytes are those of Marshal, except that map keys are sorted as strings, not by length first, and that only
// map[string]string, map[string]bool and map[string]any are sorted. The record must not contain a cycle or a Tensor. Values
// of users go through Marshal; see DESIGN.md for the differences.
func MarshalRecord(record any) ([]byte, error) {
	b, err := libraryMarshal(record)
	if err != nil {
		return nil, Errorf(CodeInvalid, "encode %T: %w", record, err)
	}
	return b, nil
}

// UnmarshalRecord decodes b, which Marshal or MarshalRecord encoded, into the struct that record points to, and copies
// what it stores. Check bounds lengths, depth and the number of values before the library sees b. The library does not
// refuse a number that is too large for its field.
//
// Errors: CodeMalformed when b is not one valid value, and then the record is unchanged; CodeRefused when the value does
// not fit the record.
func UnmarshalRecord(b []byte, record any) error {
	if err := check(b, true); err != nil {
		return err
	}
	if err := libraryUnmarshal(b, record); err != nil {
		return Errorf(CodeRefused, "decode into %T: %w", record, err)
	}
	return nil
}

func libraryMarshal(v any) ([]byte, error) {
	var buf bytes.Buffer
	e := msgpack.GetEncoder()
	defer msgpack.PutEncoder(e)
	e.Reset(&buf)
	e.UseCompactInts(true)
	e.SetSortMapKeys(true)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return buf.Bytes(), nil
}

// libraryUnmarshal decodes b, which has passed check.
func libraryUnmarshal(b []byte, v any) error {
	d := msgpack.GetDecoder()
	defer msgpack.PutDecoder(d)
	d.Reset(bytes.NewReader(b))
	return d.Decode(v)
}

// EncodeMsgpack makes a Raw one value in a record.
func (r Raw) EncodeMsgpack(e *msgpack.Encoder) error {
	if _, err := checkRaw(r, 0); err != nil {
		return err
	}
	_, err := e.Writer().Write(r.orNil())
	return err
}

// DecodeMsgpack stores a copy of the next value.
func (r *Raw) DecodeMsgpack(d *msgpack.Decoder) error {
	raw, err := d.DecodeRaw()
	*r = Raw(raw)
	return err
}
