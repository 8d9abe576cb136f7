package wire

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestDTypeSizes(t *testing.T) {
	require.Len(t, DTypes, 15)
	for _, d := range DTypes {
		require.Positive(t, d.Size(), d)
		require.Equal(t, d, dtypeNames[string(d)])
	}
	require.Zero(t, DType("complex64").Size())
}

func TestEveryFloat16SurvivesFloat32(t *testing.T) {
	for h := range 1 << 16 {
		f := FromFloat16(uint16(h))
		if f != f {
			require.True(t, isNaN(FromFloat16(ToFloat16(f))))
			continue
		}
		require.Equal(t, uint16(h), ToFloat16(f), "%#x", h)
	}
}

func TestEveryBFloat16SurvivesFloat32(t *testing.T) {
	for h := range 1 << 16 {
		f := FromBFloat16(uint16(h))
		if f != f {
			require.True(t, isNaN(FromBFloat16(ToBFloat16(f))))
			continue
		}
		require.Equal(t, uint16(h), ToBFloat16(f), "%#x", h)
	}
}

func isNaN(f float32) bool { return f != f }

func TestFloat16Known(t *testing.T) {
	for f, want := range map[float32]uint16{
		0: 0, 1: 0x3c00, -2: 0xc000, 65504: 0x7bff, 65519: 0x7bff, 65520: 0x7c00, 1e30: 0x7c00,
		0x1p-24: 1, 0x1p-25: 0, 0x1.8p-25: 1, 0x1p-14: 0x0400, 0x1.ff8p-15: 0x03ff, 0x1.ff4p-15: 0x03fe, 0x1.ffcp-15: 0x0400,
		1.0009765625: 0x3c01, 1.00048828125: 0x3c00, 1.00146484375: 0x3c02, 0.1: 0x2e66,
	} {
		require.Equal(t, want, ToFloat16(f), "%v", f)
	}
	require.Equal(t, uint16(0x8000), ToFloat16(float32(math.Copysign(0, -1))))
	require.Equal(t, uint16(0xfc00), ToFloat16(float32(math.Inf(-1))))
}

func TestBFloat16Known(t *testing.T) {
	for f, want := range map[float32]uint16{
		0: 0, 1: 0x3f80, -2: 0xc000, 3.140625: 0x4049, 1.00390625: 0x3f80, 1.01171875: 0x3f82, math.MaxFloat32: 0x7f80,
	} {
		require.Equal(t, want, ToBFloat16(f), "%v", f)
	}
	require.True(t, isNaN(FromBFloat16(ToBFloat16(math.Float32frombits(0x7f800001)))), "a NaN with all payload bits in the lower half")
}

// The result is the nearest 16-bit float; of two equally near ones, the even one.
func TestRoundingIsToNearest(t *testing.T) {
	for name, c := range map[string]struct {
		to   func(float32) uint16
		from func(uint16) float32
	}{"float16": {ToFloat16, FromFloat16}, "bfloat16": {ToBFloat16, FromBFloat16}} {
		t.Run(name, rapid.MakeCheck(func(t *rapid.T) {
			limit := float64(c.from(c.to(60000)))
			f := float32(rapid.Float64Range(-limit, limit).Draw(t, "f"))
			if rapid.Bool().Draw(t, "small") {
				f *= 0x1p-30
			}
			h := c.to(f)
			off := math.Abs(float64(c.from(h)) - float64(f))
			for _, other := range []uint16{h - 1, h + 1} {
				o := math.Abs(float64(c.from(other)) - float64(f))
				if other&0x7fff == 0x7fff || math.IsNaN(o) {
					continue // across zero
				}
				require.LessOrEqual(t, off, o)
				if off == o {
					require.Zero(t, h&1, "ties go to even")
				}
			}
		}))
	}
}

func TestFloat8(t *testing.T) {
	for q, want := range map[uint8]float32{
		0: 0, 0x01: 0x1p-9, 0x07: 0x1.cp-7, 0x08: 0x1p-6, 0x38: 1, 0xb8: -1, 0x7e: 448, 0xfe: -448,
	} {
		require.Equal(t, want, fromFloat8E4M3FN(q), "%#x", q)
	}
	require.True(t, isNaN(fromFloat8E4M3FN(0x7f)))
	for q, want := range map[uint8]float32{
		0: 0, 0x01: 0x1p-16, 0x04: 0x1p-14, 0x3c: 1, 0xbc: -1, 0x7b: 57344, 0x7c: float32(math.Inf(1)),
	} {
		require.Equal(t, want, fromFloat8E5M2(q), "%#x", q)
	}
	require.True(t, isNaN(fromFloat8E5M2(0x7f)))
}

func TestFloat32s(t *testing.T) {
	want := []float32{1, -0.5, 3}
	for name, make := range map[string]func([]int, []float32) (Tensor, error){
		"float32": TensorOf[float32], "float16": Float16Of, "bfloat16": BFloat16Of,
	} {
		x, err := make([]int{3}, want)
		require.NoError(t, err)
		require.Equal(t, DType(name), x.DType)
		got, err := x.Float32s()
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	got, err := Tensor{Float8E5M2, []int{2}, []byte{0x3c, 0xbc}}.Float32s()
	require.NoError(t, err)
	require.Equal(t, []float32{1, -1}, got)
	got, err = Tensor{Float8E4M3FN, []int{2}, []byte{0x38, 0xb8}}.Float32s()
	require.NoError(t, err)
	require.Equal(t, []float32{1, -1}, got)
}
