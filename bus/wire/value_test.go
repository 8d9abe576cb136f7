package wire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"math"
	"math/big"
	"net/netip"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"
	"pgregory.net/rapid"
)

func mustMarshal(t testing.TB, v any) []byte {
	t.Helper()
	b, err := Marshal(v)
	require.NoError(t, err)
	return b
}

func decodeAny(t testing.TB, b []byte) any {
	t.Helper()
	var v any
	require.NoError(t, Unmarshal(b, &v))
	return v
}

func TestMarshalForms(t *testing.T) {
	long := strings.Repeat("x", 300)
	when := time.Date(2024, 5, 6, 7, 8, 9, 10, time.FixedZone("", 3600))
	for _, c := range []struct {
		in   any
		hex  string // of the start of the body
		back any    // decoded into an any; nil: in itself
	}{
		{nil, "c0", nil},
		{true, "c3", nil},
		{7, "07", int64(7)},
		{-1, "ff", int64(-1)},
		{-33, "d0df", int64(-33)},
		{uint8(200), "ccc8", int64(200)},
		{int8(-5), "fb", int64(-5)},
		{int32(-70000), "d2fffeee90", int64(-70000)},
		{uint(5), "05", int64(5)},
		{uint16(300), "cd012c", int64(300)},
		{uint32(1 << 31), "ce80000000", int64(1 << 31)},
		{int16(-300), "d1fed4", int64(-300)},
		{70000, "ce00011170", int64(70000)},
		{math.MinInt64, "d38000000000000000", int64(math.MinInt64)},
		{math.MaxInt64, "cf7fffffffffffffff", int64(math.MaxInt64)},
		{uint64(math.MaxUint64), "cfffffffffffffffff", nil},
		{float32(1.5), "ca3fc00000", 1.5},
		{1.5, "cb3ff8000000000000", nil},
		{"hé", "a368c3a9", nil},
		{long, "da012c7878", nil},
		{[]byte{1, 2}, "c4020102", nil},
		{[]byte{}, "c400", nil},
		{[]byte(nil), "c0", nil},
		{[3]byte{1, 2, 3}, "c403010203", []byte{1, 2, 3}},
		{[]any{int64(1), "a"}, "9201a161", nil},
		{[]int{1, 2}, "920102", []any{int64(1), int64(2)}},
		{[]int{}, "90", []any{}},
		{[]int(nil), "c0", nil},
		{map[string]any{"bb": nil, "c": nil, "a": nil}, "83a161c0a163c0a26262c0", nil},
		{map[string]bool{"b": true, "a": false}, "82a161c2a162c3", map[string]any{"a": false, "b": true}},
		{map[int]string{300: "x", -1: "y", 2: "z"}, "8302a17acd012ca178ffa179", map[any]any{int64(300): "x", int64(-1): "y", int64(2): "z"}},
		{map[any]any{"a": int64(1), int64(1): "a"}, "8201a161a16101", nil},
		{map[bool]int(nil), "c0", nil},
		{when, "d7ff", when.UTC()},
		{time.Duration(5), "05", int64(5)},
		{struct{}{}, "80", map[string]any{}},
		{new(5), "05", int64(5)},
		{new(new(5)), "05", int64(5)},
		{(*int)(nil), "c0", nil},
		{netip.MustParseAddr("10.0.0.1"), "a831302e302e302e31", "10.0.0.1"},
		{*big.NewInt(77), "a23737", "77"},
		{Raw{0x93, 1, 2, 3}, "93010203", []any{int64(1), int64(2), int64(3)}},
		{Raw(nil), "c0", nil},
		{[]Raw{{1}, nil}, "9201c0", []any{int64(1), nil}},
	} {
		b := mustMarshal(t, c.in)
		require.True(t, strings.HasPrefix(hex.EncodeToString(b), c.hex), "%T %v: % x", c.in, c.in, b)
		require.NoError(t, Check(b))
		want := c.back
		if v := reflect.ValueOf(c.in); want == nil && c.hex != "c0" && v.IsValid() {
			want = c.in
		}
		require.Equal(t, want, decodeAny(t, b), "%T", c.in)
	}
}

type wireBase struct {
	ID   int    `msgpack:"id"`
	Note string `msgpack:"note,omitempty"`
}

type WireLinked struct {
	Depth int `msgpack:"depth"`
}

type wireSample struct {
	wireBase
	*WireLinked
	Name    string             `msgpack:"name"`
	Plain   float32            // named by its Go name
	Hidden  string             `msgpack:"-"`
	private string             //lint:ignore U1000 it must not travel
	Tags    []string           `msgpack:"tags,omitempty"`
	Meta    map[string]any     `msgpack:"meta"`
	Ranks   map[int32]Tensor   `msgpack:"ranks"`
	Next    *wireSample        `msgpack:"next"`
	When    time.Time          `msgpack:"when,omitempty"`
	Wait    time.Duration      `msgpack:"wait"`
	Addr    netip.Addr         `msgpack:"addr"`
	Digest  [4]byte            `msgpack:"digest"`
	Pair    [2]uint16          `msgpack:"pair"`
	Body    Raw                `msgpack:"body"`
	Anyway  any                `msgpack:"any"`
	ByAddr  map[netip.Addr]int `msgpack:"by_addr"`
	Flags   map[string]string  `msgpack:"flags"`
}

func sampleWire() wireSample {
	inner := &wireSample{wireBase: wireBase{ID: 2}, Addr: netip.MustParseAddr("::1"), Body: Raw{codeNil}}
	return wireSample{
		wireBase: wireBase{ID: 1, Note: "n"}, WireLinked: &WireLinked{Depth: 3}, Name: "a", Plain: 0.25,
		Tags: []string{"x", "y"}, Meta: map[string]any{"k": []any{int64(1), nil}},
		Ranks: map[int32]Tensor{-1: {Int8, []int{2}, []byte{1, 2}}}, Next: inner,
		When: time.Unix(1700000000, 5).UTC(), Wait: time.Second, Addr: netip.MustParseAddr("10.1.2.3"),
		Digest: [4]byte{1, 2, 3, 4}, Pair: [2]uint16{5, 6}, Body: Raw{0x91, 0x07}, Anyway: "s",
		ByAddr: map[netip.Addr]int{netip.MustParseAddr("10.0.0.9"): 9}, Flags: map[string]string{"a": "b"},
	}
}

func TestStructs(t *testing.T) {
	in := sampleWire()
	b := mustMarshal(t, in)
	var out wireSample
	require.NoError(t, UnmarshalWith(b, &out, UnmarshalOptions{Strict: true}))
	require.Equal(t, in, out)
	require.Equal(t, b, mustMarshal(t, &in), "a pointer is encoded as its value")

	keys := decodeAny(t, b).(map[string]any)
	require.Contains(t, keys, "id")
	require.Contains(t, keys, "depth")
	require.Contains(t, keys, "Plain")
	for _, absent := range []string{"wireBase", "WireLinked", "Hidden", "-", "private"} {
		require.NotContains(t, keys, absent)
	}
	require.NotContains(t, keys["next"], "note", "omitempty")
	require.NotContains(t, keys["next"], "depth", "a nil embedded pointer has no fields")
}

func TestEmbeddedWithATagIsAField(t *testing.T) {
	type outer struct {
		wireBase   `msgpack:"-"`
		WireLinked `msgpack:"linked"`
	}
	b := mustMarshal(t, outer{WireLinked: WireLinked{Depth: 4}})
	require.Equal(t, map[string]any{"linked": map[string]any{"depth": int64(4)}}, decodeAny(t, b))
}

func TestUnmarshalFillsInPlace(t *testing.T) {
	out := wireSample{Name: "kept", Tags: []string{"old", "old"}, Next: &wireSample{Name: "kept too"}}
	next := out.Next
	require.NoError(t, Unmarshal(mustMarshal(t, map[string]any{
		"tags": []string{"new"}, "next": map[string]any{"id": 9}, "unknown": []any{1, 2},
	}), &out))
	require.Equal(t, "kept", out.Name)
	require.Equal(t, []string{"new"}, out.Tags)
	require.Same(t, next, out.Next)
	require.Equal(t, "kept too", out.Next.Name)
	require.Equal(t, 9, out.Next.ID)
}

func TestStrictRefusesUnknownFields(t *testing.T) {
	b := mustMarshal(t, map[string]any{"next": map[string]any{"nmae": 1}})
	var out wireSample
	require.NoError(t, Unmarshal(b, &out))
	err := UnmarshalWith(b, &out, UnmarshalOptions{Strict: true})
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, `wire.wireSample.next: there is no field for the key "nmae"`)
}

type endlessPointer *endlessPointer

func TestMarshalRefusals(t *testing.T) {
	type deep struct{ C chan int }
	type twice struct {
		A int `msgpack:"x"`
		B int `msgpack:"x"`
	}
	type option struct {
		A int `msgpack:",as_array"`
	}
	type pointerEmbed struct{ *wireBase }
	type tagged struct {
		A int
		b int `msgpack:"b"`
	}
	cycle := map[string]any{}
	cycle["self"] = cycle
	var loop any
	loop = &loop
	ring := &wireSample{}
	ring.Next = ring
	for name, c := range map[string]struct {
		in   any
		want []string
	}{
		"chan":            {make(chan int), []string{"encode chan int", "cannot be sent"}},
		"func":            {func() {}, []string{"func()"}},
		"complex":         {complex(1, 2), []string{"complex128"}},
		"uintptr":         {uintptr(1), []string{"uintptr"}},
		"field":           {map[string]any{"a": []any{1, deep{}}}, []string{`["a"][1].C: chan int cannot be sent`}},
		"nil chan":        {&deep{}, []string{"encode *wire.deep.C: chan int"}},
		"typed map":       {map[int]deep{3: {}}, []string{"[3].C: chan int"}},
		"no fields":       {errors.New("x"), []string{"no exported fields"}},
		"same name":       {twice{}, []string{`two of its fields are named "x"`}},
		"tag option":      {option{}, []string{"as_array"}},
		"unexported":      {tagged{b: 1}, []string{"its field b has a tag, but is not exported"}},
		"embedded":        {pointerEmbed{}, []string{"unexported struct wireBase"}},
		"endless":         {new(endlessPointer), []string{"nothing but pointers"}},
		"not UTF-8":       {[]string{"ok", "\xff"}, []string{"[1]", "not UTF-8; send []byte"}},
		"not UTF-8 key":   {map[string]any{"\xff": 1}, []string{"[key]", "not UTF-8"}},
		"cycle":           {cycle, []string{`["self"]["self"]`, "…", "nested deeper than 100: a cycle?"}},
		"pointer cycle":   {loop, []string{"pointers deep: a cycle?"}},
		"struct cycle":    {ring, []string{"nested deeper than 100"}},
		"bytes key":       {map[[2]byte]int{{1, 2}: 1}, []string{"[key]", "a key of a map must be"}},
		"struct key":      {map[struct{ A int }]int{{1}: 1}, []string{"[key]", "a key of a map must be"}},
		"time key":        {map[time.Time]int{{}: 1}, []string{"[key]", "a key of a map must be"}},
		"same key":        {map[any]any{int8(1): 1, int64(1): 2}, []string{"two keys have the same encoding"}},
		"NaN keys":        {map[float64]int{math.NaN(): 1, math.NaN(): 2}, []string{"two keys have the same encoding"}},
		"raw":             {[]any{Raw{0x92, 1}}, []string{"[0]", "the Raw is not a valid msgpack value", "byte 0"}},
		"raw too long":    {Raw{1, 2}, []string{"1 bytes follow"}},
		"tensor":          {[]Tensor{{Float32, []int{2}, make([]byte, 7)}}, []string{"[0]", "float32[2] needs 8 bytes and has 7"}},
		"dtype":           {Tensor{"complex64", nil, nil}, []string{"complex64[] is not one of [float64 float32"}},
		"tensor too long": {Tensor{Uint8, []int{1 << 32}, nil}, []string{"4 GiB", "split it by rows"}},
	} {
		t.Run(name, func(t *testing.T) {
			dst := []byte("before")
			b, err := AppendMarshal(dst, c.in)
			require.Equal(t, "before", string(b))
			require.ErrorIs(t, err, ErrInvalid)
			for _, w := range c.want {
				require.ErrorContains(t, err, w)
			}
		})
	}
}

func TestMarshalDepth(t *testing.T) {
	nest := func(n int) (v any) {
		for range n {
			v = []any{v}
		}
		return v
	}
	b := mustMarshal(t, nest(MaxDepth))
	require.NoError(t, Check(b))
	_, err := Marshal(nest(MaxDepth + 1))
	require.ErrorIs(t, err, ErrInvalid)
	_, err = Marshal([]any{Raw(b)})
	require.ErrorIs(t, err, ErrInvalid, "the depth of a Raw adds to that of its container")
}

func TestUnmarshalRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		in   any
		into any
		want string
	}{
		"too wide":         {300, new(int8), "300 does not fit into int8"},
		"negative":         {-1, new(uint64), "-1 does not fit into uint64"},
		"unsigned":         {uint64(math.MaxUint64), new(int), "18446744073709551615 does not fit into int"},
		"fraction":         {1.5, new(int), "the float 1.5 does not fit into int"},
		"whole float":      {2.0, new(int), "the float 2 does not fit into int"},
		"inexact":          {1<<53 + 1, new(float64), "9007199254740993 does not fit into float64"},
		"inexact float32":  {1<<24 + 1, new(float32), "16777217 does not fit into float32"},
		"huge float":       {1e300, new(float32), "does not fit into float32"},
		"nil":              {nil, new(int), "nil does not fit into int; use a pointer"},
		"nil struct":       {nil, new(wireBase), "nil does not fit into wire.wireBase"},
		"string for int":   {"7", new(int), "a string of 1 bytes does not fit into int"},
		"string for bytes": {"7", new([]byte), "a string of 1 bytes does not fit into []uint8"},
		"bytes for string": {[]byte("7"), new(string), "1 bytes does not fit into string"},
		"int for bool":     {1, new(bool), "1 does not fit into bool"},
		"map for list":     {map[string]any{}, new([]int), "a map of 0 does not fit into []int"},
		"list for struct":  {[]int{1}, new(wireBase), "an array of 1 does not fit into wire.wireBase"},
		"array length":     {[]int{1, 2, 3}, new([2]int), "an array of 3 does not fit into [2]int"},
		"bytes length":     {[]byte{1}, new([2]byte), "1 bytes does not fit into [2]uint8"},
		"path":             {map[string]any{"next": map[string]any{"pair": []any{1, "x"}}}, new(wireSample), "wire.wireSample.next.pair[1]: a string"},
		"map path":         {map[string]any{"k": 300}, new(map[string]int8), `map[string]int8["k"]: 300`},
		"map key":          {map[int]int{1: 2}, new(map[string]int), "[key]: 1 does not fit into string"},
		"text":             {"10.0.0", new(netip.Addr), "netip.Addr: ParseAddr"},
		"tensor for int":   {Tensor{Int8, nil, []byte{1}}, new(int), "a tensor (ext 1) does not fit into int"},
		"time for tensor":  {time.Unix(0, 0), new(Tensor), "a timestamp (ext -1) does not fit into wire.Tensor"},
		"list for tensor":  {[]float32{1}, new(Tensor), "an array of 1 does not fit into wire.Tensor"},
		"tensor dtype":     {Tensor{Float32, []int{1}, make([]byte, 4)}, new([]float64), "the tensor float32[1] does not fit into []float64"},
		"tensor shape":     {Tensor{Int8, []int{1, 2}, make([]byte, 2)}, new([]int8), "the tensor int8[1 2] does not fit into []int8"},
		"map for string":   {map[string]any{"k": 1}, new(map[string]string), `["k"]: 1 does not fit into string`},
		"list for map":     {[]int{1}, new(map[string]any), "an array of 1 does not fit into map[string]interface {}"},
		"key of any map":   {map[int]int{1: 1}, new(map[string]any), "[key]: 1 does not fit into string"},
		"tensor of map":    {map[string]any{"k": 1}, new(map[string]Tensor), `["k"]: 1 does not fit into wire.Tensor`},
		"text for binary":  {"x", new(opaque), "a string of 1 bytes does not fit into wire.opaque"},
		"pickle":           {Raw{0xd4, byte(ExtPickle), 0}, new(any), "a Python pickle (ext 22) cannot be decoded here; send dicts"},
		"tuple in a field": {map[string]any{"any": Raw{0xd4, byte(ExtPythonTuple), 0}}, new(wireSample), "wire.wireSample.any: a Python tuple (ext 16) cannot be decoded here; send a list"},
		"object array":     {map[string]any{"uid": Raw{0xd4, byte(ExtObjectArray), 0}}, new(map[string]Tensor), `["uid"]: a numpy array of strings or objects (ext 29) cannot be decoded here; send a list`},
		"tuple for list":   {Raw{0xd4, byte(ExtPythonTuple), 0}, new([]int), "send a list"},
		"ordered dict":     {Raw{0xd4, 30, 0}, new(any), "send dict(value)"},
		"later python":     {Raw{0xd4, 31, 0}, new(any), "Python value of a later version (ext 31)"},
		"unknown ext":      {[]any{Raw{0xd4, 99, 0}}, new(any), "[0]: the unknown ext type 99 cannot be decoded here"},
		"batch":            {Raw{0xd4, byte(ExtBatch), 0}, new(any), "a batch (ext 2) cannot be decoded here; the program must import"},
	} {
		t.Run(name, func(t *testing.T) {
			err := Unmarshal(mustMarshal(t, c.in), c.into)
			require.ErrorIs(t, err, ErrRefused)
			require.ErrorContains(t, err, c.want)
		})
	}
}

func TestUnmarshalTargets(t *testing.T) {
	var stringer interface{ String() string }
	for _, v := range []any{nil, 5, (*int)(nil), new(chan int), new(endlessPointer), &stringer} {
		require.ErrorIs(t, Unmarshal([]byte{7}, v), ErrInvalid)
	}
	require.NoError(t, Unmarshal([]byte{codeNil}, new(struct{})), "no arguments")
}

func TestUnmarshalWidens(t *testing.T) {
	var f float64
	require.NoError(t, Unmarshal(mustMarshal(t, 3), &f))
	require.Equal(t, 3.0, f)
	var g float32
	require.NoError(t, Unmarshal(mustMarshal(t, 0.1), &g))
	require.Equal(t, float32(0.1), g)
	var p *int
	require.NoError(t, Unmarshal(mustMarshal(t, 3), &p))
	require.Equal(t, 3, *p)
	require.NoError(t, Unmarshal(mustMarshal(t, nil), &p))
	require.Nil(t, p)

	vector, err := TensorOf([]int{3}, []float32{1, 2, 3})
	require.NoError(t, err)
	var fs []float32
	require.NoError(t, Unmarshal(mustMarshal(t, vector), &fs))
	require.Equal(t, []float32{1, 2, 3}, fs)
	var bs []byte
	require.NoError(t, Unmarshal(mustMarshal(t, Tensor{Uint8, []int{2}, []byte{1, 2}}), &bs))
	require.Equal(t, []byte{1, 2}, bs)
	var empty []int
	require.NoError(t, Unmarshal(mustMarshal(t, Tensor{Int64, []int{0}, nil}), &empty))
	require.Equal(t, []int{}, empty)
}

func TestUnmarshalIntoEachKind(t *testing.T) {
	testInto(t, true)
	testInto(t, -7)
	testInto(t, int8(-7))
	testInto(t, int16(-7))
	testInto(t, int32(-7))
	testInto(t, int64(-7))
	testInto(t, uint(7))
	testInto(t, uint8(7))
	testInto(t, uint16(7))
	testInto(t, uint32(7))
	testInto(t, uint64(math.MaxUint64))
	testInto(t, float32(0.5))
	testInto(t, 0.5)
	testInto(t, "text")
	testInto(t, []byte{1, 2})
	testInto(t, Raw{0x91, 1})
	testInto(t, Tensor{Int8, []int{2}, []byte{1, 2}})
	testInto(t, time.Unix(5, 6).UTC())
	testInto(t, map[string]string{"a": "b"})
	testInto(t, map[string]Raw{"a": {1}})
	testInto(t, map[string]Tensor{"a": {Int8, []int{1}, []byte{3}}})
	testInto(t, map[string]any{"a": nil})
	testInto(t, map[string]any(nil))
	testInto(t, map[uint8]bool{1: true})
	testInto(t, [][]string{{"a"}, nil, {}})
	testInto[any](t, "any")
	testInto[any](t, nil)
}

func testInto[T any](t *testing.T, in T) {
	t.Helper()
	var alone T
	require.NoError(t, Unmarshal(mustMarshal(t, in), &alone))
	require.Equal(t, in, alone)
	var nested struct{ V []T }
	require.NoError(t, Unmarshal(mustMarshal(t, map[string][]T{"V": {in, in}}), &nested))
	require.Equal(t, []T{in, in}, nested.V)
}

// Pools and the table of codecs are shared by all goroutines.
func TestCodecIsSafeForConcurrentUse(t *testing.T) {
	type fresh struct { // its codec is built by the first goroutine
		Next *fresh
		Wire wireSample
		More map[int][]fresh
	}
	in := fresh{Next: &fresh{Wire: sampleWire()}, Wire: sampleWire(), More: map[int][]fresh{1: {{Wire: sampleWire()}}}}
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for range 50 {
				var out fresh
				b, err := Marshal(in)
				if err == nil {
					err = Unmarshal(b, &out)
				}
				if err != nil || len(out.More[1]) != 1 || out.Next.Wire.Name != "a" {
					t.Errorf("%v %v", out, err)
				}
			}
		})
	}
	group.Wait()
}

// After Unmarshal the caller may overwrite the body; after UnmarshalShared values are views of it.
func TestSharing(t *testing.T) {
	type holder struct {
		B []byte
		R Raw
		T Tensor
		A any
	}
	in := holder{[]byte{1, 2}, Raw{0x91, 1}, Tensor{Int8, []int{2}, []byte{3, 4}}, []byte{5}}
	b := mustMarshal(t, in)
	var private, shared holder
	require.NoError(t, Unmarshal(b, &private))
	require.NoError(t, UnmarshalShared(b, &shared))
	require.Equal(t, in, shared)
	for i := range b {
		b[i] = 0xee
	}
	require.Equal(t, in, private)
	require.Equal(t, holder{[]byte{0xee, 0xee}, Raw{0xee, 0xee}, Tensor{Int8, []int{2}, []byte{0xee, 0xee}}, []byte{0xee}}, shared)
	require.Equal(t, len(shared.B), cap(shared.B), "appending to a view must not write into the body")
}

func TestRawPassesThrough(t *testing.T) {
	type call struct {
		Method string
		Args   Raw
	}
	python := Raw{0x92, 0xd4, byte(ExtPythonTuple), 1, 0xc7, 3, byte(ExtPickle), 0x80, 0x04, 0x2e}
	require.ErrorIs(t, Check(python), ErrRefused)
	b := mustMarshal(t, call{"m", python})
	var out call
	require.NoError(t, Unmarshal(b, &out))
	require.Equal(t, call{"m", python}, out)
	require.False(t, out.Args.IsNil())
	require.True(t, Raw(nil).IsNil())
	require.True(t, Raw(mustMarshal(t, nil)).IsNil())
	var whole Raw
	require.NoError(t, Unmarshal(b, &whole))
	require.Equal(t, b, []byte(whole))
}

func TestAppendMarshal(t *testing.T) {
	in := sampleWire()
	prefix := []byte("prefix")
	for _, v := range []any{nil, 1, "s", []byte{1}, Raw{1}, in.Tags, in} {
		b, err := AppendMarshal(prefix, v)
		require.NoError(t, err)
		require.Equal(t, prefix, b[:len(prefix)])
		alone := mustMarshal(t, v)
		if _, has := v.(wireSample); !has { // the padding of its tensor depends on the offset
			require.Equal(t, alone, b[len(prefix):])
		}
	}
}

// Large runs of bytes are collected by reference; the order and the lengths of the pieces must be right.
func TestMarshalLargePieces(t *testing.T) {
	big := bytes.Repeat([]byte{7}, 3*cutSize)
	f32, err := TensorOf([]int{2, cutSize}, make([]float32, 2*cutSize))
	require.NoError(t, err)
	in := map[string]any{
		"a": big, "b": "text", "c": []any{big, big[:cutSize], big[:cutSize-1], f32, int64(1)},
		"d": strings.Repeat("long", keepSize), "e": f32,
	}
	b := mustMarshal(t, in)
	require.NoError(t, Check(b))
	require.Equal(t, in, decodeAny(t, b))
	text := strings.Repeat("only text ", keepSize)
	require.Equal(t, []any{text}, decodeAny(t, mustMarshal(t, []string{text})))
}

type celsius float64

func (c celsius) MarshalMsgpack() ([]byte, error) {
	if c < -273 {
		return nil, errors.New("colder than cold")
	}
	return Marshal(map[string]float64{"celsius": float64(c)})
}

func (c *celsius) UnmarshalMsgpack(b []byte) error {
	var m map[string]float64
	err := Unmarshal(b, &m)
	*c = celsius(m["celsius"])
	return err
}

type opaque struct{ b []byte }

func (o opaque) MarshalBinary() ([]byte, error)  { return o.b, nil }
func (o *opaque) UnmarshalBinary(b []byte) error { o.b = b; return nil }

type colour uint8

func (c colour) MarshalText() ([]byte, error) { return []byte{'c', '0' + byte(c)}, nil }
func (c *colour) UnmarshalText(b []byte) error {
	*c = colour(b[1] - '0')
	return nil
}

func TestSlicesOfCustomBytes(t *testing.T) {
	in := struct {
		S []colour
		A [2]colour
		M map[colour]colour
	}{[]colour{1, 2}, [2]colour{3, 4}, map[colour]colour{5: 6}}
	b := mustMarshal(t, in)
	require.Equal(t, map[string]any{"S": []any{"c1", "c2"}, "A": []any{"c3", "c4"}, "M": map[string]any{"c5": "c6"}}, decodeAny(t, b))
	out := in
	require.NoError(t, Unmarshal(b, &out))
	require.Equal(t, in, out)
	require.ErrorIs(t, Unmarshal(mustMarshal(t, Tensor{Uint8, []int{1}, []byte{1}}), new([]colour)), ErrRefused)
}

func TestCustomTypes(t *testing.T) {
	in := map[string][]celsius{"a": {1.5, -40}}
	b := mustMarshal(t, in)
	require.Equal(t, map[string]any{"celsius": 1.5}, decodeAny(t, b).(map[string]any)["a"].([]any)[0])
	var out map[string][]celsius
	require.NoError(t, Unmarshal(b, &out))
	require.Equal(t, in, out)

	_, err := Marshal([]celsius{-300})
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "[0]: wire.celsius: colder than cold")
	require.ErrorIs(t, Unmarshal([]byte{1}, new(celsius)), ErrRefused)

	for _, o := range []opaque{{[]byte{1, 2}}, {[]byte{}}} {
		var back opaque
		require.NoError(t, Unmarshal(mustMarshal(t, o), &back))
		require.Equal(t, o, back)
	}
	require.Equal(t, []byte{}, decodeAny(t, mustMarshal(t, opaque{})))
}

func TestTimes(t *testing.T) {
	for _, at := range []time.Time{
		{}, time.Unix(0, 0), time.Unix(1<<32-1, 0), time.Unix(1<<32, 0), time.Unix(1, 999999999),
		time.Unix(1<<34-1, 1), time.Unix(1<<34, 1), time.Unix(-1, 5), time.Date(9999, 12, 31, 23, 59, 59, 999999999, time.UTC),
	} {
		var back time.Time
		require.NoError(t, Unmarshal(mustMarshal(t, at), &back))
		require.True(t, at.Equal(back), "%v %v", at, back)
		require.Equal(t, time.UTC, back.Location())
	}
}

func TestSameValueSameBytes(t *testing.T) {
	m := map[int]any{}
	s := map[string]map[any]any{}
	for i := range 200 {
		m[i-100] = map[float64]int{float64(i): i, -1: 2, 0.5: 3}
		s[strings.Repeat("k", i%17)+string(rune('a'+i%26))] = map[any]any{i: nil, "x": true, 2.5: 1, false: 0, nil: 1}
	}
	first := mustMarshal(t, []any{m, s})
	for range 20 {
		require.Equal(t, first, mustMarshal(t, []any{m, s}))
	}
	require.Equal(t, first, mustMarshal(t, decodeAny(t, first)), "the same after decoding into an any")
}

// anyValue generates the types that an any decodes to, so that a round trip is the identity.
func anyValue(depth int) *rapid.Generator[any] {
	kinds := []*rapid.Generator[any]{
		rapid.Just[any](nil),
		rapid.Bool().AsAny(),
		rapid.Int64().AsAny(),
		rapid.Uint64Min(math.MaxInt64 + 1).AsAny(),
		rapid.Float64().AsAny(),
		rapid.String().AsAny(),
		rapid.Map(rapid.SliceOf(rapid.Byte()), func(b []byte) any { return append([]byte{}, b...) }),
		rapid.Custom(func(t *rapid.T) any {
			return time.Unix(rapid.Int64().Draw(t, "s"), rapid.Int64Range(0, 999999999).Draw(t, "ns")).UTC()
		}),
		anyTensor().AsAny(),
	}
	if depth > 0 {
		below := rapid.Deferred(func() *rapid.Generator[any] { return anyValue(depth - 1) })
		key := rapid.OneOf(rapid.Int64().AsAny(), rapid.String().AsAny(), rapid.Bool().AsAny(), rapid.Float64().AsAny())
		kinds = append(kinds,
			rapid.Map(rapid.SliceOfN(below, 0, 20), func(v []any) any { return append([]any{}, v...) }),
			rapid.MapOfN(rapid.String(), below, 0, 20).AsAny(),
			rapid.Map(rapid.MapOfN(key, below, 0, 10), func(m map[any]any) any { m[int64(5)] = "five"; return m }),
		)
	}
	return rapid.OneOf(kinds...)
}

func anyTensor() *rapid.Generator[Tensor] {
	return rapid.Custom(func(t *rapid.T) Tensor {
		out := Tensor{DType: rapid.SampledFrom(DTypes).Draw(t, "dtype"), Shape: []int{}}
		n := out.DType.Size()
		for range rapid.IntRange(0, 4).Draw(t, "axes") {
			out.Shape = append(out.Shape, rapid.IntRange(0, 5).Draw(t, "axis"))
			n *= out.Shape[len(out.Shape)-1]
		}
		out.Data = rapid.SliceOfN(rapid.Byte(), n, n).Draw(t, "data")
		return out
	})
}

func TestAnyRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := anyValue(3).Draw(t, "value")
		prefix := make([]byte, rapid.IntRange(0, 200).Draw(t, "prefix"))
		b, err := AppendMarshal(prefix, in)
		require.NoError(t, err)
		b = b[len(prefix):]
		require.NoError(t, Check(b))
		var private, shared any
		require.NoError(t, Unmarshal(b, &private))
		require.NoError(t, UnmarshalShared(b, &shared))
		require.Equal(t, in, private)
		require.Equal(t, in, shared)
	})
}

func TestTypedRoundTrip(t *testing.T) {
	type leaf struct {
		I8  int8    `msgpack:"i8"`
		U16 uint16  `msgpack:"u16,omitempty"`
		F   float32 `msgpack:"f"`
		S   *string `msgpack:"s"`
		B   []byte
	}
	type node struct {
		leaf
		Leaves []leaf
		ByID   map[int16]leaf
		ByName map[string][]uint32
		Fixed  [3]int64
		Flag   *bool `msgpack:",omitempty"`
		Wait   time.Duration
	}
	rapid.Check(t, func(t *rapid.T) {
		in := rapid.Make[node]().Draw(t, "node")
		b, err := Marshal(in)
		require.NoError(t, err)
		again, err := Marshal(&in)
		require.NoError(t, err)
		require.Equal(t, b, again)
		var out node
		require.NoError(t, UnmarshalWith(b, &out, UnmarshalOptions{Strict: true}))
		require.Equal(t, in, out)
	})
}

// Check and the decoder agree on whether a damaged body is valid.
func TestDamagedBodies(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b, err := Marshal(anyValue(3).Draw(t, "value"))
		require.NoError(t, err)
		for range rapid.IntRange(1, 4).Draw(t, "times") {
			at := rapid.IntRange(0, len(b)-1).Draw(t, "at")
			switch rapid.IntRange(0, 2).Draw(t, "damage") {
			case 0:
				b[at] = rapid.Byte().Draw(t, "byte")
			case 1:
				b = append(b[:at:at], b[at+1:]...)
			case 2:
				b = append(b[:at:at], append([]byte{rapid.Byte().Draw(t, "byte")}, b[at:]...)...)
			}
			if len(b) == 0 {
				return
			}
		}
		var v any
		checked, decoded := Check(b), Unmarshal(b, &v)
		if usesTestExt(b) {
			return
		}
		require.Equal(t, checked == nil, decoded == nil, "check: %v, decode: %v", checked, decoded)
	})
}

// vmihailenco/msgpack decodes the output of Marshal, and Unmarshal decodes its output.
func TestLibraryInteroperates(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := withoutTensors(anyValue(3).Draw(t, "value"))
		ours, err := Marshal(in)
		require.NoError(t, err)
		d := msgpack.NewDecoder(bytes.NewReader(ours))
		d.SetMapDecoder(func(d *msgpack.Decoder) (any, error) { return d.DecodeUntypedMap() })
		theirs, err := d.DecodeInterface()
		require.NoError(t, err)
		viaPeer, err := Marshal(theirs)
		require.NoError(t, err)
		require.Equal(t, ours, viaPeer)

		b, err := msgpack.Marshal(in)
		require.NoError(t, err)
		var back any
		require.NoError(t, Unmarshal(b, &back))
		require.Equal(t, in, back)
	})
}

// withoutTensors replaces tensors by their bytes.
func withoutTensors(v any) any {
	switch v := v.(type) {
	case Tensor:
		return v.Data
	case []any:
		for i := range v {
			v[i] = withoutTensors(v[i])
		}
	case map[string]any:
		for k := range v {
			v[k] = withoutTensors(v[k])
		}
	case map[any]any:
		for k := range v {
			v[k] = withoutTensors(v[k])
		}
	}
	return v
}

// No input panics when it is decoded into any of these types, and decoded values can be encoded and decoded again.
func FuzzUnmarshal(f *testing.F) {
	addSeeds(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, v := range []any{
			new(any), new(wireSample), new(Tensor), new([]float32), new(map[int8]string), new(map[string]*wireSample),
			new([][]any), new(Raw), new([]byte), new(string), new(int16), new(float32), new(time.Time), new(netip.Addr),
			new([3]uint8), new(*bool), new(boxed), new(map[any]any), new(map[float64][]time.Time), new([]celsius),
		} {
			if UnmarshalShared(b, v) == nil {
				requireStable(t, v)
			}
			_ = UnmarshalWith(b, v, UnmarshalOptions{Strict: true})
		}
	})
}

// requireStable writes v, reads it and writes it again.
func requireStable(t *testing.T, v any) {
	t.Helper()
	first, err := Marshal(v)
	if err != nil && strings.Contains(err.Error(), "same encoding") {
		return // several NaN as keys of one map
	}
	require.NoError(t, err)
	again := reflect.New(reflect.TypeOf(v).Elem())
	require.NoError(t, Unmarshal(first, again.Interface()))
	second, err := Marshal(again.Interface())
	require.NoError(t, err)
	require.Equal(t, first, second)
}
