package wire

import (
	"bytes"
	"encoding/binary"
	"math"
	"slices"
	"strconv"
	"unsafe"
)

// Tensor is an array of numbers: the bytes of its elements, little-endian, in C order (the last axis fastest), with
// their type and its shape. A shape without axes is a single number. In a body it is
//
//	ext 1, payload:
//	  1 byte     pad, 0 to 63
//	  pad bytes  zero; they align the elements to 64 bytes from the start of the body. Readers ignore them
//	  msgpack    [dtype, [shape…]]
//	  the rest   the elements
//
// A Tensor is a value. Its Data may be shared with other tensors (SliceRows), so it must not be changed.
type Tensor struct {
	DType DType
	Shape []int
	Data  []byte
}

const (
	tensorAlign = 64
	maxDims     = 64             // the limit of numpy and torch
	maxTensor   = maxLen - 1<<10 // bytes of elements: the 4 GiB of an ext less its head
	tensorSlack = 256            // bytes before the elements, for all but the most unusual shapes
)

// TensorOf makes a tensor from a copy of data. It refuses a shape whose product is not len(data).
func TensorOf[T Element](shape []int, data []T) (Tensor, error) {
	b := bytes.Clone(memory(data))
	toLittleEndian(b, int(unsafe.Sizeof(*new(T))))
	return newTensor(DTypeOf[T](), shape, b)
}

// BFloat16Of makes a bfloat16 tensor from data, rounded to nearest.
func BFloat16Of(shape []int, data []float32) (Tensor, error) {
	return newTensor(BFloat16, shape, narrow(data, ToBFloat16))
}

// Float16Of makes a float16 tensor from data, rounded to nearest.
func Float16Of(shape []int, data []float32) (Tensor, error) {
	return newTensor(Float16, shape, narrow(data, ToFloat16))
}

func newTensor(d DType, shape []int, data []byte) (Tensor, error) {
	t := Tensor{DType: d, Shape: slices.Clone(shape), Data: data}
	return t, t.Valid()
}

// Values returns a copy of the elements of t, whose DType must be that of T. For a bool, every byte but 0 is true.
func Values[T Element](t Tensor) ([]T, error) {
	if want := DTypeOf[T](); t.DType != want {
		return nil, Errorf(CodeInvalid, "the tensor is %s, not %s", t.String(), want)
	}
	if err := t.Valid(); err != nil {
		return nil, err
	}
	out := make([]T, len(t.Data)/t.DType.Size())
	t.fill(memory(out))
	return out, nil
}

// Float32s returns the elements of t as float32. The dtype must be a float of at most 32 bits, so that nothing is lost.
func (t Tensor) Float32s() ([]float32, error) {
	if err := t.Valid(); err != nil {
		return nil, err
	}
	switch t.DType {
	case Float32:
		return Values[float32](t)
	case Float16:
		return widen16(t.Data, FromFloat16), nil
	case BFloat16:
		return widen16(t.Data, FromBFloat16), nil
	case Float8E4M3FN:
		return widen8(t.Data, fromFloat8E4M3FN), nil
	case Float8E5M2:
		return widen8(t.Data, fromFloat8E5M2), nil
	}
	return nil, Errorf(CodeInvalid, "the tensor %s cannot be read as float32 without loss", t.String())
}

// Rows is the length of the first axis; 0 for a single number.
func (t Tensor) Rows() int {
	if len(t.Shape) == 0 {
		return 0
	}
	return t.Shape[0]
}

// SliceRows returns the rows from i up to j. They share t's bytes.
func (t Tensor) SliceRows(i, j int) (Tensor, error) {
	if err := t.Valid(); err != nil {
		return Tensor{}, err
	}
	if len(t.Shape) == 0 {
		return Tensor{}, Errorf(CodeInvalid, "the tensor %s is a single number and has no rows", t.String())
	}
	if i < 0 || i > j || j > t.Rows() {
		return Tensor{}, Errorf(CodeInvalid, "there are no rows %d to %d in the tensor %s", i, j, t.String())
	}
	row := t.rowBytes()
	out := Tensor{DType: t.DType, Shape: slices.Clone(t.Shape), Data: t.Data[i*row : j*row : j*row]}
	out.Shape[0] = j - i
	return out, nil
}

// rowBytes is the length of one row of a valid tensor.
func (t Tensor) rowBytes() int {
	if len(t.Data) == 0 {
		return 0
	}
	return len(t.Data) / t.Shape[0]
}

// ConcatRows concatenates tensors of one dtype with rows of one shape. The result has bytes of its own, except that a
// list of one tensor returns that tensor.
func ConcatRows(ts []Tensor) (Tensor, error) {
	if len(ts) == 0 {
		return Tensor{}, Errorf(CodeInvalid, "no tensors to concatenate: neither dtype nor shape is known")
	}
	rows, size := 0, 0
	for _, t := range ts {
		if err := t.follows(ts[0]); err != nil {
			return Tensor{}, err
		}
		rows, size = rows+t.Rows(), size+len(t.Data)
	}
	if len(ts) == 1 {
		return ts[0], nil
	}
	out := Tensor{DType: ts[0].DType, Shape: slices.Clone(ts[0].Shape), Data: make([]byte, 0, size)}
	out.Shape[0] = rows
	for _, t := range ts {
		out.Data = append(out.Data, t.Data...)
	}
	return out, nil
}

// follows reports why the rows of t cannot follow those of first.
func (t Tensor) follows(first Tensor) error {
	switch err := t.Valid(); {
	case err != nil:
		return err
	case len(t.Shape) == 0:
		return Errorf(CodeInvalid, "the tensor %s is a single number and has no rows", t.String())
	case t.DType != first.DType || len(first.Shape) == 0 || !slices.Equal(t.Shape[1:], first.Shape[1:]):
		return Errorf(CodeInvalid, "the rows of the tensors %s and %s differ", first.String(), t.String())
	}
	return nil
}

// Equal reports whether t and u have the same dtype, shape and bytes.
func (t Tensor) Equal(u Tensor) bool {
	return t.DType == u.DType && slices.Equal(t.Shape, u.Shape) && bytes.Equal(t.Data, u.Data)
}

// String is the dtype and the shape: "float32[512 6144]".
func (t Tensor) String() string {
	out := append([]byte(Clip(string(t.DType))), '[')
	for i, n := range t.Shape {
		if i > 0 {
			out = append(out, ' ')
		}
		out = strconv.AppendInt(out, int64(n), 10)
	}
	return string(append(out, ']'))
}

// Valid returns an error for an unknown dtype, a shape that does not fit the data, or more bytes than a body can hold.
func (t Tensor) Valid() error {
	size := t.DType.Size()
	switch {
	case size == 0:
		return Errorf(CodeInvalid, "the dtype of the tensor %s is not one of %v", t.String(), DTypes)
	case len(t.Shape) > maxDims:
		return Errorf(CodeInvalid, "a tensor of %d axes; the limit is %d", len(t.Shape), maxDims)
	}
	want, err := t.bytes()
	if err != nil {
		return err
	}
	if want != uint64(len(t.Data)) {
		return Errorf(CodeInvalid, "the tensor %s needs %d bytes and has %d", t.String(), want, len(t.Data))
	}
	return nil
}

// bytes is the size by dtype and shape. The product of the non-empty axes must be below maxTensor even if another axis
// is empty, so that no product overflows.
func (t Tensor) bytes() (uint64, error) {
	size, isEmpty := uint64(t.DType.Size()), false
	for _, n := range t.Shape {
		switch {
		case n < 0:
			return 0, Errorf(CodeInvalid, "the tensor %s has a negative axis", t.String())
		case n == 0:
			isEmpty = true
		case uint64(n) > maxTensor/size:
			return 0, Errorf(CodeInvalid, "the tensor %s is over the 4 GiB that one value can hold; split it by rows", t.String())
		default:
			size *= uint64(n)
		}
	}
	if isEmpty {
		return 0, nil
	}
	return size, nil
}

// appendTensorHead appends a tensor without its elements, for a body in which dst ends at pos.
func appendTensorHead(dst []byte, pos int, t Tensor) ([]byte, error) {
	if err := t.Valid(); err != nil {
		return dst, refuse(CodeInvalid, "%w", err)
	}
	var room [maxHead + 16 + 9*maxDims]byte
	meta := appendTensorMeta(room[:0], t)
	pad := -(pos + maxHead + 1 + len(meta)) & (tensorAlign - 1)
	n := 1 + pad + len(meta) + len(t.Data)
	dst = append(appendExt32Head(dst, ExtTensor, n), byte(pad))
	dst = append(dst, zeros[:pad]...)
	return append(dst, meta...), nil
}

var zeros [tensorAlign]byte

func appendTensorMeta(dst []byte, t Tensor) []byte {
	dst = appendString(append(dst, 0x92), string(t.DType))
	dst = appendArrayHead(dst, len(t.Shape))
	for _, n := range t.Shape {
		dst = appendUint(dst, uint64(n))
	}
	return dst
}

func checkTensor(p []byte) error {
	var room [maxDims]int
	_, err := readTensor(p, room[:0])
	return err
}

// readTensor reads the payload of a tensor. Data is a view of p. Shape is appended to room, or new if room is nil.
func readTensor(p []byte, room []int) (Tensor, error) {
	if len(p) == 0 || p[0] >= tensorAlign || 1+int(p[0]) > len(p) {
		return Tensor{}, errTensorHead
	}
	r := reader{b: p[1+p[0]:]}
	if r.arrayLen() != 2 {
		return Tensor{}, errTensorHead
	}
	t := Tensor{DType: r.dtype(), Shape: r.shape(room)}
	if r.bad {
		return Tensor{}, errTensorHead
	}
	t.Data = r.b
	return t, t.Valid()
}

var errTensorHead = Errorf(CodeMalformed, "a tensor that does not begin with its padding, dtype and shape")

func (r *reader) dtype() DType {
	name := r.text()
	if len(name) > MaxName {
		r.fail()
		return ""
	}
	if d, ok := dtypeNames[string(name)]; ok {
		return d
	}
	return DType(name) // for the error
}

func (r *reader) shape(room []int) []int {
	n := r.arrayLen()
	if n > maxDims {
		r.fail()
		return nil
	}
	if room == nil {
		room = make([]int, 0, n)
	}
	for range n {
		room = append(room, int(r.upTo(math.MaxInt)))
	}
	return room
}

// fill copies the elements of t to dst, the memory of a slice of their Go type.
func (t Tensor) fill(dst []byte) {
	if t.DType == Bool {
		for i, b := range t.Data {
			dst[i] = min(b, 1)
		}
		return
	}
	copy(dst, t.Data)
	toLittleEndian(dst, t.DType.Size())
}

// memory is the memory of data as bytes, for copying.
func memory[T Element](data []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(data))), len(data)*int(unsafe.Sizeof(*new(T))))
}

// toLittleEndian converts elements between the machine's byte order and the wire's, in place.
func toLittleEndian(b []byte, size int) {
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		swap(b, size)
	}
}

func swap(b []byte, size int) {
	for element := range slices.Chunk(b, size) {
		slices.Reverse(element)
	}
}

// narrow converts floats into the bytes of their 16-bit form.
func narrow(data []float32, to func(float32) uint16) []byte {
	out := make([]byte, 0, 2*len(data))
	for _, f := range data {
		out = binary.LittleEndian.AppendUint16(out, to(f))
	}
	return out
}

func widen16(data []byte, from func(uint16) float32) []float32 {
	out := make([]float32, len(data)/2)
	for i := range out {
		out[i] = from(binary.LittleEndian.Uint16(data[2*i:]))
	}
	return out
}

func widen8(data []byte, from func(uint8) float32) []float32 {
	out := make([]float32, len(data))
	for i, b := range data {
		out[i] = from(b)
	}
	return out
}
