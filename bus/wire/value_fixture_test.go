package wire_test

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"troupe/bus/wire"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "rewrite the fixtures in testdata; read the diff before committing")

// TestBodyFixtures pins the bytes of bodies. Each body-NAME.bin has a body-NAME.json with its content, for other
// languages: testdata/read_fixtures.py compares them in Python.
func TestBodyFixtures(t *testing.T) {
	fixtures := bodyFixtures(t)
	for name, v := range fixtures {
		t.Run(name, func(t *testing.T) {
			body, err := wire.Marshal(v)
			require.NoError(t, err)
			pin(t, "body-"+name, body, describeBody)
		})
	}
	requireFixtures(t, "body", len(fixtures))
}

// pin compares data with a fixture, and its description with the JSON file, or with -update writes both. It returns the
// fixture.
func pin(t *testing.T, name string, data []byte, describe func(*testing.T, []byte) []byte) []byte {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		require.NoError(t, os.WriteFile(path+".bin", data, 0o644))
		require.NoError(t, os.WriteFile(path+".json", describe(t, data), 0o644))
	}
	pinned, err := os.ReadFile(path + ".bin")
	require.NoError(t, err)
	require.Equal(t, pinned, data, "the wire has changed")
	words, err := os.ReadFile(path + ".json")
	require.NoError(t, err)
	require.Equal(t, string(words), string(describe(t, pinned)), "the meaning has changed")
	return pinned
}

func requireFixtures(t *testing.T, kind string, n int) {
	t.Helper()
	files, err := filepath.Glob("testdata/" + kind + "-*.bin")
	require.NoError(t, err)
	require.Len(t, files, n, "a fixture without a test")
}

func bodyFixtures(t *testing.T) map[string]any {
	pair := tensor(t, []int{2}, []float32{1, -1})
	out := map[string]any{
		"nil":        nil,
		"bool":       []any{true, false},
		"ints":       intsOfAllWidths(),
		"floats":     []any{0.0, math.Copysign(0, -1), 1.5, float32(1.5), 0.1, float32(0.1), 1e300, 5e-324, math.Inf(1), math.Inf(-1), math.NaN()},
		"string":     []any{"", "héllo, wörld: 世界 🎭", strings.Repeat("x", 31), strings.Repeat("y", 32), strings.Repeat("z", 256)},
		"bytes":      []any{[]byte{}, []byte{0, 1, 254, 255}, bytes.Repeat([]byte{7}, 256)},
		"list":       []any{[]any{}, []any{1, "two", []any{3.0}}, make([]bool, 15), make([]bool, 16)},
		"map":        map[string]any{"": nil, "a": 1, "b": map[string]any{"nested": []any{true}}, "a longer key": "x"},
		"map-large":  manyKeys(),
		"int-keys":   map[int]string{0: "zero", 127: "127", 128: "128", 70000: "70000", -1: "-1", -33: "-33", -40000: "-40000"},
		"mixed-keys": map[any]any{"1": "string", 1: "int", 1.5: "float", false: "bool", nil: "nil"},
		"struct": struct {
			Name  string    `msgpack:"name"`
			Score float64   `msgpack:"score"`
			Empty []int     `msgpack:"empty,omitempty"`
			When  time.Time `msgpack:"when"`
		}{"worker", 0.5, nil, time.Unix(1700000000, 0)},
		"time": []any{
			time.Unix(0, 0), time.Unix(1<<32-1, 0), time.Unix(1<<32, 0), time.Unix(1700000000, 123456789),
			time.Unix(1<<34, 1), time.Unix(-1, 500000000), time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC),
		},
		"tensor-0d":       tensor(t, []int{}, []float64{2.5}),
		"tensor-empty":    tensor(t, []int{0, 3}, []int64{}),
		"tensor-3d":       tensor(t, []int{2, 3, 4}, counted(24)),
		"tensor-in-map":   map[string]any{"before": "text of some length", "x": pair, "y": []any{pair, pair}},
		"tensor-longdims": wire.Tensor{DType: wire.Uint8, Shape: []int{1, 300, 1}, Data: make([]byte, 300)},
	}
	for _, d := range wire.DTypes {
		data := make([]byte, 6*d.Size())
		for i := range data {
			data[i] = byte(17 * i)
			if d == wire.Bool {
				data[i] = byte(i % 2)
			}
		}
		out["tensor-"+string(d)] = wire.Tensor{DType: d, Shape: []int{2, 3}, Data: data}
	}
	return out
}

func intsOfAllWidths() (out []any) {
	for _, n := range []int64{
		0, 1, 127, 128, 255, 256, 65535, 65536, 1<<32 - 1, 1 << 32, math.MaxInt64,
		-1, -32, -33, -128, -129, -32768, -32769, -1 << 31, -1<<31 - 1, math.MinInt64,
	} {
		out = append(out, n)
	}
	return append(out, uint64(math.MaxInt64+1), uint64(math.MaxUint64))
}

func manyKeys() map[string]int {
	m := map[string]int{}
	for i := range 20 {
		m[fmt.Sprintf("key%d", i)] = i
	}
	return m
}

func counted(n int) []int16 {
	out := make([]int16, n)
	for i := range out {
		out[i] = int16(i - n/2)
	}
	return out
}

func tensor[T wire.Element](t *testing.T, shape []int, data []T) wire.Tensor {
	out, err := wire.TensorOf(shape, data)
	require.NoError(t, err)
	return out
}

func describeBody(t *testing.T, body []byte) []byte {
	var v any
	require.NoError(t, wire.UnmarshalShared(body, &v))
	words, err := json.MarshalIndent(describe(t, body, v), "", " ")
	require.NoError(t, err)
	return append(words, '\n')
}

// described is a value in JSON. Type determines the other fields.
type described struct {
	Type    string         `json:"type"`
	Value   any            `json:"value,omitempty"` // bool, int, str; float and its bits
	Bits    string         `json:"bits,omitempty"`
	Hex     string         `json:"hex,omitempty"` // bytes, tensor
	Items   []described    `json:"items,omitempty"`
	Entries [][2]described `json:"entries,omitempty"` // map, sorted by key
	Seconds *int64         `json:"seconds,omitempty"` // time
	Nanos   int            `json:"nanoseconds,omitempty"`
	DType   string         `json:"dtype,omitempty"` // tensor
	Shape   []int          `json:"shape,omitempty"`
	Values  []string       `json:"values,omitempty"`
	DataAt  int            `json:"data_at,omitempty"` // offset of its elements in the body
}

func describe(t *testing.T, body []byte, v any) described {
	switch v := v.(type) {
	case nil:
		return described{Type: "nil"}
	case bool:
		return described{Type: "bool", Value: v}
	case int64, uint64:
		return described{Type: "int", Value: v}
	case float64:
		return described{Type: "float", Value: strconv.FormatFloat(v, 'g', -1, 64), Bits: fmt.Sprintf("%016x", math.Float64bits(v))}
	case string:
		return described{Type: "str", Value: v}
	case []byte:
		return described{Type: "bytes", Hex: hex.EncodeToString(v)}
	case time.Time:
		seconds := v.Unix()
		return described{Type: "time", Seconds: &seconds, Nanos: v.Nanosecond()}
	case wire.Tensor:
		at := dataAt(body, v)
		require.Zero(t, at%64)
		return described{
			Type: "tensor", DType: string(v.DType), Shape: v.Shape,
			Hex: hex.EncodeToString(v.Data), Values: describeElements(t, v), DataAt: at,
		}
	case []any:
		out := described{Type: "list"}
		for _, x := range v {
			out.Items = append(out.Items, describe(t, body, x))
		}
		return out
	case map[string]any:
		return describeMap(t, body, v)
	case map[any]any:
		return describeMap(t, body, v)
	}
	t.Fatalf("%T cannot be described", v)
	return described{}
}

// describeElements writes the elements as decimal numbers, to check byte order and narrow floats.
func describeElements(t *testing.T, x wire.Tensor) []string {
	switch x.DType {
	case wire.Float64:
		return printed[float64](t, x)
	case wire.Int8:
		return printed[int8](t, x)
	case wire.Int16:
		return printed[int16](t, x)
	case wire.Int32:
		return printed[int32](t, x)
	case wire.Int64:
		return printed[int64](t, x)
	case wire.Uint8:
		return printed[uint8](t, x)
	case wire.Uint16:
		return printed[uint16](t, x)
	case wire.Uint32:
		return printed[uint32](t, x)
	case wire.Uint64:
		return printed[uint64](t, x)
	case wire.Bool:
		return printed[bool](t, x)
	}
	floats, err := x.Float32s()
	require.NoError(t, err)
	wide := make([]float64, len(floats)) // exactly
	for i, f := range floats {
		wide[i] = float64(f)
	}
	return printed[float64](t, tensor(t, x.Shape, wide))
}

func printed[T wire.Element](t *testing.T, x wire.Tensor) []string {
	values, err := wire.Values[T](x)
	require.NoError(t, err)
	out := make([]string, len(values))
	for i, v := range values {
		out[i] = fmt.Sprint(v)
	}
	return out
}

// dataAt is the offset in the body of the elements of a tensor that shares its bytes; 0 if there are none.
func dataAt(body []byte, x wire.Tensor) int {
	if len(x.Data) == 0 {
		return 0
	}
	return int(uintptr(unsafe.Pointer(&x.Data[0])) - uintptr(unsafe.Pointer(&body[0])))
}

// describeMap sorts by key: the order in the body is pinned by its bytes.
func describeMap[K comparable](t *testing.T, body []byte, m map[K]any) described {
	encoded := func(k K) []byte {
		b, err := wire.Marshal(k)
		require.NoError(t, err)
		return b
	}
	out := described{Type: "map"}
	for _, k := range slices.SortedFunc(maps.Keys(m), func(a, b K) int { return bytes.Compare(encoded(a), encoded(b)) }) {
		out.Entries = append(out.Entries, [2]described{describe(t, body, k), describe(t, body, m[k])})
	}
	return out
}
