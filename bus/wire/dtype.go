package wire

import (
	"math"
	"reflect"
	"strconv"
)

// DType is the type of a tensor's elements, with the names of numpy and torch. The names travel on the wire.
type DType string

const (
	Float64      DType = "float64"
	Float32      DType = "float32"
	Float16      DType = "float16"
	BFloat16     DType = "bfloat16"
	Float8E4M3FN DType = "float8_e4m3fn"
	Float8E5M2   DType = "float8_e5m2"
	Int8         DType = "int8"
	Int16        DType = "int16"
	Int32        DType = "int32"
	Int64        DType = "int64"
	Uint8        DType = "uint8"
	Uint16       DType = "uint16"
	Uint32       DType = "uint32"
	Uint64       DType = "uint64"
	Bool         DType = "bool" // one byte each, 0 or 1
)

// DTypes are all supported dtypes.
var DTypes = []DType{
	Float64, Float32, Float16, BFloat16, Float8E4M3FN, Float8E5M2,
	Int8, Int16, Int32, Int64, Uint8, Uint16, Uint32, Uint64, Bool,
}

// Size is the length of one element in bytes; 0 for an unknown dtype.
func (d DType) Size() int {
	switch d {
	case Float8E4M3FN, Float8E5M2, Int8, Uint8, Bool:
		return 1
	case Float16, BFloat16, Int16, Uint16:
		return 2
	case Float32, Int32, Uint32:
		return 4
	case Float64, Int64, Uint64:
		return 8
	}
	return 0
}

// dtypeNames maps names to the constants, so that reading a tensor does not allocate the name.
var dtypeNames = func() map[string]DType {
	m := map[string]DType{}
	for _, d := range DTypes {
		m[string(d)] = d
	}
	return m
}()

// Element is a Go type of tensor elements. Floats of 16 and 8 bits have none; see Float32s.
type Element interface {
	~bool | ~int | ~int8 | ~int16 | ~int32 | ~int64 | ~uint | ~uint8 | ~uint16 | ~uint32 | ~uint64 | ~float32 | ~float64
}

// kindDTypes maps Go kinds to their DType.
var kindDTypes = map[reflect.Kind]DType{
	reflect.Bool: Bool,
	reflect.Int:  DType("int" + strconv.Itoa(strconv.IntSize)),
	reflect.Int8: Int8, reflect.Int16: Int16, reflect.Int32: Int32, reflect.Int64: Int64,
	reflect.Uint:  DType("uint" + strconv.Itoa(strconv.IntSize)),
	reflect.Uint8: Uint8, reflect.Uint16: Uint16, reflect.Uint32: Uint32, reflect.Uint64: Uint64,
	reflect.Float32: Float32, reflect.Float64: Float64,
}

// DTypeOf is the DType of a Go type; an int is int64 on 64-bit machines.
func DTypeOf[T Element]() DType { return kindDTypes[reflect.TypeFor[T]().Kind()] }

// ToBFloat16 rounds f to the nearest bfloat16, ties to even, and returns its bits. A NaN stays a NaN.
func ToBFloat16(f float32) uint16 {
	b := math.Float32bits(f)
	if f != f {
		return uint16(b>>16) | 0x40
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

// FromBFloat16 is the float32 of a bfloat16's bits, exactly.
func FromBFloat16(h uint16) float32 { return math.Float32frombits(uint32(h) << 16) }

// ToFloat16 rounds f to the nearest float16, ties to even, and returns its bits: infinity above 65504, a NaN for a NaN.
func ToFloat16(f float32) uint16 {
	b := math.Float32bits(f)
	sign, b := uint16(b>>16&0x8000), b&0x7fffffff
	switch {
	case b > 0x7f800000: // NaN: keep the top of its payload, set the quiet bit
		return sign | 0x7e00 | uint16(b>>13&0x1ff)
	case b >= 0x477ff000: // 65520 and above round to infinity
		return sign | 0x7c00
	case b >= 0x38800000: // 2⁻¹⁴ and above are normal: change the exponent's bias from 127 to 15, round off 13 bits
		b -= (127 - 15) << 23
		return sign | uint16((b+0xfff+b>>13&1)>>13)
	}
	// Below, adding 0.5 makes the float32 unit round to the unit of the float16 subnormals, 2⁻²⁴.
	sum := math.Float32frombits(b) + 0.5
	return sign | uint16(math.Float32bits(sum)-math.Float32bits(0.5))
}

// FromFloat16 is the float32 of a float16's bits, exactly.
func FromFloat16(h uint16) float32 {
	sign, exp, frac := uint32(h&0x8000)<<16, uint32(h>>10&0x1f), uint32(h&0x3ff)
	switch exp {
	case 0:
		return signed(sign, float32(frac)*(1.0/(1<<24)))
	case 0x1f:
		return math.Float32frombits(sign | 0x7f800000 | frac<<13)
	}
	return math.Float32frombits(sign | (exp+127-15)<<23 | frac<<13)
}

// fromFloat8E4M3FN is the float32 of a float8_e4m3fn: no infinities, all ones is NaN.
func fromFloat8E4M3FN(q uint8) float32 {
	sign, exp, frac := uint32(q&0x80)<<24, uint32(q>>3&0xf), uint32(q&7)
	switch {
	case q&0x7f == 0x7f:
		return math.Float32frombits(sign | 0x7fc00000)
	case exp == 0:
		return signed(sign, float32(frac)*(1.0/(1<<9)))
	}
	return math.Float32frombits(sign | (exp+127-7)<<23 | frac<<20)
}

// fromFloat8E5M2 is the float32 of a float8_e5m2, which is the upper half of a float16.
func fromFloat8E5M2(q uint8) float32 { return FromFloat16(uint16(q) << 8) }

func signed(sign uint32, f float32) float32 { return math.Float32frombits(sign | math.Float32bits(f)) }
