package wire

import (
	"math"
	"slices"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// offsetIn is the offset of view in b.
func offsetIn(b, view []byte) int {
	return int(uintptr(unsafe.Pointer(unsafe.SliceData(view))) - uintptr(unsafe.Pointer(unsafe.SliceData(b))))
}

func mustTensor[T Element](t testing.TB, shape []int, data []T) Tensor {
	t.Helper()
	out, err := TensorOf(shape, data)
	require.NoError(t, err)
	return out
}

func TestTensorOfAndValues(t *testing.T) {
	type token int32
	testValues(t, Float64, []float64{1, math.Inf(1), -0.5})
	testValues(t, Float32, []float32{1, 2, math.MaxFloat32})
	testValues(t, Int8, []int8{1, -2, 3})
	testValues(t, Int16, []int16{1, -2, 3})
	testValues(t, Int32, []int32{1, -2, 3})
	testValues(t, Int32, []token{1, -2, 3})
	testValues(t, Int64, []int64{1, -2, math.MaxInt64})
	testValues(t, Int64, []int{1, -2, 3})
	testValues(t, Uint8, []uint8{1, 2, 255})
	testValues(t, Uint16, []uint16{1, 2, 3})
	testValues(t, Uint32, []uint32{1, 2, 3})
	testValues(t, Uint64, []uint64{1, 2, math.MaxUint64})
	testValues(t, Bool, []bool{true, false, true})
}

func testValues[T Element](t *testing.T, want DType, data []T) {
	t.Helper()
	x := mustTensor(t, []int{len(data)}, data)
	require.Equal(t, want, x.DType)
	before := x.Data[0]
	back, err := Values[T](x)
	require.NoError(t, err)
	require.Equal(t, data, back)
	clear(data)
	clear(back)
	require.Equal(t, before, x.Data[0], "the tensor is a copy, and so are its values")
	_, err = TensorOf([]int{len(data) + 1}, data)
	require.ErrorIs(t, err, ErrInvalid)
}

func TestTensorIsLittleEndian(t *testing.T) {
	require.Equal(t, []byte{1, 0, 0, 0, 0xfe, 0xff, 0xff, 0xff}, mustTensor(t, []int{2}, []int32{1, -2}).Data)
	b := []byte{1, 2, 3, 4}
	swap(b, 2)
	require.Equal(t, []byte{2, 1, 4, 3}, b)
	bools, err := Values[bool](Tensor{Bool, []int{2}, []byte{0, 7}})
	require.NoError(t, err)
	require.Equal(t, []bool{false, true}, bools)
}

func TestValuesRefuses(t *testing.T) {
	_, err := Values[float32](Tensor{Float64, nil, make([]byte, 8)})
	require.ErrorContains(t, err, "the tensor is float64[], not float32")
	_, err = Values[float32](Tensor{Float32, []int{2}, make([]byte, 4)})
	require.ErrorIs(t, err, ErrInvalid)
	_, err = Tensor{Int32, nil, make([]byte, 4)}.Float32s()
	require.ErrorIs(t, err, ErrInvalid)
}

func TestTensorValid(t *testing.T) {
	for _, x := range []Tensor{
		{Float32, nil, make([]byte, 4)},
		{Float32, []int{}, make([]byte, 4)},
		{Float32, []int{0}, nil},
		{Float32, []int{3, 0, 5}, []byte{}},
		{Bool, []int{1, 2, 3}, make([]byte, 6)},
		{Int8, make([]int, maxDims), nil},
	} {
		require.NoError(t, x.Valid(), x)
		var back Tensor
		require.NoError(t, Unmarshal(mustMarshal(t, x), &back))
		require.True(t, x.Equal(back))
	}
	for _, x := range []Tensor{
		{},
		{"float31", nil, nil},
		{Float32, nil, nil},
		{Float32, []int{-1}, nil},
		{Float32, []int{-1, -4}, make([]byte, 16)},
		{Float32, []int{0}, make([]byte, 4)},
		{Float32, []int{math.MaxInt, math.MaxInt}, nil},
		{Float32, []int{1 << 31, 1 << 31, 1 << 2}, nil}, // overflows to 0
		{Float32, []int{0, math.MaxInt, 2}, nil},        // would overflow if a row were counted
		{Float32, []int{1 << 30}, nil},                  // 4 GiB
		{Int8, make([]int, maxDims+1), nil},
	} {
		require.ErrorIs(t, x.Valid(), ErrInvalid, x)
		_, err := Marshal(x)
		require.ErrorIs(t, err, ErrInvalid)
	}
}

func TestTensorAlignment(t *testing.T) {
	x := mustTensor(t, []int{2, 3}, []float32{1, 2, 3, 4, 5, 6})
	large := mustTensor(t, []int{cutSize}, make([]float32, cutSize))
	for prefix := range 200 {
		for _, v := range []any{x, []Tensor{x}, map[string]any{"k": large, "l": "text", "n": []any{x, large}}} {
			b, err := AppendMarshal(make([]byte, prefix, 1000), v)
			require.NoError(t, err)
			var out any
			require.NoError(t, UnmarshalShared(b[prefix:], &out))
			requireAligned(t, b, out)
		}
	}
}

func requireAligned(t *testing.T, b []byte, v any) {
	switch v := v.(type) {
	case Tensor:
		require.Zero(t, offsetIn(b, v.Data)%tensorAlign)
	case []any:
		for _, x := range v {
			requireAligned(t, b, x)
		}
	case map[string]any:
		for _, x := range v {
			requireAligned(t, b, x)
		}
	}
}

// Marshal copies bulk data once, into a result that is allocated once: it allocates as much as growing a slice to the
// size of the body.
func TestBulkIsAllocatedOnce(t *testing.T) {
	x := mustTensor(t, []int{1 << 18}, make([]float32, 1<<18))
	for _, v := range []any{x, x.Data, map[string]any{"x": x, "y": x, "n": 1}, []any{"a", []Tensor{x, x, x}, Raw(mustMarshal(t, x))}} {
		var body []byte
		n := allocated(func() { body = mustMarshal(t, v) })
		floor := allocated(func() { body = slices.Grow([]byte(nil), len(body)) })
		require.InEpsilon(t, floor, n, 0.05, "%T", v)
	}
}

func TestReadTensorRefusals(t *testing.T) {
	meta := []byte{0x92, 0xa4, 'i', 'n', 't', '8', 0x91, 2}
	good := append(append([]byte{0}, meta...), 1, 2)
	require.NoError(t, Check(extBody(ExtTensor, good)))
	padded := append(append([]byte{3, 9, 9, 9}, meta...), 1, 2) // readers do not look at the padding
	require.NoError(t, Check(extBody(ExtTensor, padded)))
	for name, payload := range map[string][]byte{
		"empty":           {},
		"pad alone":       {0},
		"pad too long":    append([]byte{64}, make([]byte, 100)...),
		"pad past end":    {5, 0, 0},
		"no array":        {0, 0xc0},
		"array of three":  append(append([]byte{0, 0x93}, meta[1:]...), 1, 2),
		"dtype no string": {0, 0x92, 1, 0x90},
		"dtype cut":       {0, 0x92, 0xa9, 'i'},
		"dtype unknown":   {0, 0x92, 0xa4, 'i', 'n', 't', '9', 0x90},
		"dtype long":      append([]byte{0, 0x92, 0xd9, 200}, make([]byte, 210)...),
		"shape missing":   {0, 0x92, 0xa4, 'i', 'n', 't', '8'},
		"shape cut":       {0, 0x92, 0xa4, 'i', 'n', 't', '8', 0x92, 1},
		"axis negative":   {0, 0x92, 0xa4, 'i', 'n', 't', '8', 0x91, 0xff},
		"axis a float":    {0, 0x92, 0xa4, 'i', 'n', 't', '8', 0x91, 0xca, 0, 0, 0, 0},
		"axis huge":       append([]byte{0, 0x92, 0xa4, 'i', 'n', 't', '8', 0x91, 0xcf}, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff),
		"many axes":       append([]byte{0, 0x92, 0xa4, 'i', 'n', 't', '8', 0xdc, 0, 65}, make([]byte, 65)...),
		"too short":       good[:len(good)-1],
		"too long":        append(good[:len(good):len(good)], 3),
	} {
		t.Run(name, func(t *testing.T) {
			require.ErrorIs(t, Check(extBody(ExtTensor, payload)), ErrMalformed)
			require.ErrorIs(t, Unmarshal(extBody(ExtTensor, payload), new(Tensor)), ErrMalformed)
		})
	}
}

func TestRows(t *testing.T) {
	x := mustTensor(t, []int{3, 2}, []int16{1, 2, 3, 4, 5, 6})
	require.Equal(t, 3, x.Rows())
	mid, err := x.SliceRows(1, 3)
	require.NoError(t, err)
	require.Equal(t, []int{2, 2}, mid.Shape)
	values, err := Values[int16](mid)
	require.NoError(t, err)
	require.Equal(t, []int16{3, 4, 5, 6}, values)
	require.Equal(t, 4, offsetIn(x.Data, mid.Data), "no copy")

	none, err := x.SliceRows(2, 2)
	require.NoError(t, err)
	require.Equal(t, []int{0, 2}, none.Shape)
	whole, err := ConcatRows([]Tensor{none, mid, none, x})
	require.NoError(t, err)
	require.Equal(t, []int{5, 2}, whole.Shape)
	require.NoError(t, whole.Valid())

	hollow := Tensor{Float32, []int{4, 0}, nil}
	part, err := hollow.SliceRows(1, 3)
	require.NoError(t, err)
	require.Equal(t, []int{2, 0}, part.Shape)
	both, err := ConcatRows([]Tensor{part, hollow})
	require.NoError(t, err)
	require.Equal(t, []int{6, 0}, both.Shape)
}

func TestRowsRefusals(t *testing.T) {
	x := mustTensor(t, []int{3, 2}, make([]int16, 6))
	scalar := Tensor{Int16, nil, make([]byte, 2)}
	require.Zero(t, scalar.Rows())
	for _, r := range [][2]int{{-1, 1}, {2, 1}, {0, 4}, {4, 4}} {
		_, err := x.SliceRows(r[0], r[1])
		require.ErrorIs(t, err, ErrInvalid)
	}
	_, err := scalar.SliceRows(0, 0)
	require.ErrorContains(t, err, "has no rows")
	for _, ts := range [][]Tensor{
		nil,
		{scalar},
		{x, scalar},
		{scalar, x},
		{x, mustTensor(t, []int{3, 3}, make([]int16, 9))},
		{x, mustTensor(t, []int{3, 2}, make([]uint16, 6))},
		{x, {Int16, []int{3, 2}, nil}},
	} {
		_, err := ConcatRows(ts)
		require.ErrorIs(t, err, ErrInvalid)
	}
}

func TestRowsSplitAndJoin(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x := anyTensor().Filter(func(x Tensor) bool { return len(x.Shape) > 0 }).Draw(t, "tensor")
		at := rapid.IntRange(0, x.Rows()).Draw(t, "at")
		a, err := x.SliceRows(0, at)
		require.NoError(t, err)
		b, err := x.SliceRows(at, x.Rows())
		require.NoError(t, err)
		back, err := ConcatRows([]Tensor{a, b})
		require.NoError(t, err)
		require.True(t, x.Equal(back))
	})
}

// Every payload that is accepted is a valid tensor: all helper functions accept it.
func FuzzTensor(f *testing.F) {
	for _, d := range DTypes {
		x := Tensor{d, []int{2, 3}, make([]byte, 6*d.Size())}
		head, _ := appendTensorHead(nil, 0, x)
		f.Add(append(head[maxHead:], x.Data...))
	}
	f.Add([]byte{0, 0x92, 0xa4, 'i', 'n', 't', '8', 0x92, 0, 0xce, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, payload []byte) {
		var x Tensor
		if Unmarshal(extBody(ExtTensor, payload), &x) != nil {
			return
		}
		require.NoError(t, x.Valid())
		var back Tensor
		require.NoError(t, Unmarshal(mustMarshal(t, x), &back))
		require.True(t, x.Equal(back))
		_, _ = x.Float32s()
		_, _ = Values[bool](x)
		_, _ = Values[int64](x)
		if len(x.Shape) > 0 {
			half, err := x.SliceRows(x.Rows()/2, x.Rows())
			require.NoError(t, err)
			_, err = ConcatRows([]Tensor{half, half})
			require.NoError(t, err)
		}
	})
}
