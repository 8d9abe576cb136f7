package wire

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCheckRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		body []byte
		want string
	}{
		"empty":             {nil, "the body is empty"},
		"never used":        {[]byte{0xc1}, "byte 0: 0xc1 is not a msgpack code"},
		"two values":        {[]byte{1, 2, 3}, "byte 1: 2 bytes follow the value"},
		"cut number":        {[]byte{0xcb, 1, 2}, "byte 0: the value is cut off"},
		"cut length":        {[]byte{0xc6, 0, 0}, "the value is cut off"},
		"cut string":        {[]byte{0xa5, 'a', 'b'}, "a string of 5 bytes is longer than the 2 bytes that follow"},
		"cut bytes":         {[]byte{0xc6, 0xff, 0xff, 0xff, 0xff, 1}, "4294967295 bytes is longer than the 1 bytes"},
		"cut array":         {[]byte{0x92, 1}, "byte 0: an array of 2 does not fit in the 1 bytes that follow"},
		"array bomb":        {[]byte{0xdd, 0xff, 0xff, 0xff, 0xff}, "an array of 4294967295 does not fit"},
		"map bomb":          {[]byte{0xdf, 0xff, 0xff, 0xff, 0xff, 1, 1}, "a map of 4294967295 does not fit"},
		"inner bomb":        {[]byte{0x91, 0xdd, 0xff, 0xff, 0xff, 0xff}, "byte 1: an array of 4294967295"},
		"array key":         {[]byte{0x81, 0x90, 1}, "byte 1: a key of a map must be"},
		"bytes key":         {[]byte{0x81, 0xc4, 0, 1}, "a key of a map must be"},
		"map without value": {[]byte{0x81, 0xa1, 'a'}, "byte 3: the value is cut off"},
		"not UTF-8":         {[]byte{0xa1, 0xff}, "a string of 1 bytes is not UTF-8"},
		"time length":       {[]byte{0xd5, 0xff, 0, 0}, "a timestamp of 2 bytes"},
		"nanoseconds":       {append([]byte{0xd7, 0xff}, bytes.Repeat([]byte{0xff}, 8)...), "a timestamp with 1073741823 nanoseconds"},
		"deep":              {append(bytes.Repeat([]byte{0x91}, 100_000), codeNil), "byte 100: arrays and maps are nested deeper than 100"},
		"deep maps":         {append(bytes.Repeat([]byte{0x81, 0x01}, 100_000), codeNil), "nested deeper than 100"},
	} {
		t.Run(name, func(t *testing.T) {
			err := Check(c.body)
			require.ErrorIs(t, err, ErrMalformed)
			require.ErrorContains(t, err, c.want)
			kept := any("untouched")
			require.ErrorIs(t, Unmarshal(c.body, &kept), ErrMalformed)
			require.Equal(t, "untouched", kept)
		})
	}
	err := Check([]byte{0xd4, byte(ExtPickle), 1})
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "a Python pickle")
}

func TestCheckCountsValues(t *testing.T) {
	body := append([]byte{0xdd, 0x01, 0, 0, 0}, make([]byte, MaxValues)...)
	require.NoError(t, Check(body))
	body[4] = 1
	body = append(body, 0)
	require.ErrorIs(t, Check(body), ErrMalformed)

	_, err := Marshal(make([]bool, MaxValues+1))
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "send bulk data as bytes or a Tensor")
	_, err = Marshal([]any{Raw(body[:5:5]), 1})
	require.ErrorIs(t, err, ErrInvalid)
}

func TestCheckAllocatesNothing(t *testing.T) {
	body := mustMarshal(t, sampleWire())
	require.Zero(t, testing.AllocsPerRun(100, func() { require.NoError(t, Check(body)) }))
}

// allocated is the number of bytes that f allocates.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// Bodies with lengths beyond their bytes are refused before anything is allocated.
func TestBombsAllocateNothing(t *testing.T) {
	for _, body := range [][]byte{
		{0xdd, 0xff, 0xff, 0xff, 0xff},
		{0xdf, 0xff, 0xff, 0xff, 0xff},
		{0xc6, 0xff, 0xff, 0xff, 0xff},
		{0xdb, 0xff, 0xff, 0xff, 0xff},
		{0xc9, 0xff, 0xff, 0xff, 0xff, 1},
		append(bytes.Repeat([]byte{0x91}, 1<<20), codeNil),
		append(bytes.Repeat([]byte{0xdd, 0xff, 0xff, 0xff, 0xff}, 1<<18), codeNil),
		extBody(ExtTensor, append([]byte{0, 0x92, 0xa5, 'i', 'n', 't', '6', '4', 0x91, 0xcf}, bytes.Repeat([]byte{0x7f}, 8)...)),
	} {
		for _, v := range []any{new(any), new([]int), new(map[string]any), new([]byte), new(string), new(Tensor), new([][64]int)} {
			n := allocated(func() { require.Error(t, Unmarshal(body, v)) })
			require.Less(t, n, uint64(64<<10), "% x into %T", body[:min(len(body), 16)], v)
		}
	}
}

// Valid bodies decode into at most 200 times their size, as the comment of Check states.
func TestAmplificationIsBounded(t *testing.T) {
	const size = 1 << 18
	list := func(element ...byte) []byte {
		n := size / len(element)
		return append([]byte{0xdd, byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}, bytes.Repeat(element, n)...)
	}
	chain := func(link ...byte) []byte { // chains of the maximal depth
		return append(bytes.Repeat(link, MaxDepth-1), codeNil)
	}
	for name, body := range map[string][]byte{
		"zeros":         list(0),
		"minus ones":    list(0xff),
		"floats":        list(0xca, 0, 0, 0, 0),
		"empty strings": list(0xa0),
		"strings":       list(0xa1, 'a'),
		"empty bytes":   list(0xc4, 0),
		"empty lists":   list(0x90),
		"empty maps":    list(0x80),
		"small maps":    list(0x81, 0xa0, codeNil),
		"int maps":      list(0x81, 1, codeNil),
		"mixed maps":    list(0x82, 0xa0, codeNil, 1, codeNil),
		"mixed late":    list(0x83, 0xa0, codeNil, 0xa1, 'a', codeNil, 1, codeNil),
		"nine keys":     list(append([]byte{0x89}, bytes.Repeat([]byte{0xa0, codeNil}, 9)...)...),
		"nine ints":     list(0x89, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7, 0, 8, 0, 9, 0),
		"lists deep":    list(chain(0x91)...),
		"maps deep":     list(chain(0x81, 0xa0)...),
		"int maps deep": list(chain(0x81, 1)...),
		"mixed deep":    list(chain(0x82, 0xa0, codeNil, 1)...),
		"times":         list(0xd6, 0xff, 0, 0, 0, 0),
		"tensors":       list(0xc7, 9, 1, 0, 0x92, 0xa4, 'i', 'n', 't', '8', 0x91, 0),
		"tensors axes":  list(append([]byte{0xc7, 74, 1, 0, 0x92, 0xa4, 'i', 'n', 't', '8', 0xdc, 0, 64}, make([]byte, 64)...)...),
		"boxed":         list(0xc7, 1, byte(extBoxed), 0x80),
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, Check(body))
			var v any
			n := allocated(func() { require.NoError(t, Unmarshal(body, &v)) })
			factor := float64(n) / float64(len(body))
			t.Logf("%.1f bytes for each of %d", factor, len(body))
			require.Less(t, factor, 200.0)
		})
	}
}

// A key that is not a string makes the decoder change the map type; in nested maps this must not double the work.
func TestMixedMapsTakeLinearTime(t *testing.T) {
	body := []byte{codeNil}
	for range MaxDepth {
		body = append(append([]byte{0x82, 0xa0}, body...), 1, codeNil)
	}
	var v any
	require.NoError(t, Unmarshal(body, &v))
}

// Check accepts exactly the bodies that decode into an any.
func FuzzCheck(f *testing.F) {
	addSeeds(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		checked := Check(b)
		var v any
		decoded := Unmarshal(b, &v)
		if checked == nil && usesTestExt(b) {
			return // their unpack functions refuse some valid structures
		}
		require.Equal(t, checked == nil, decoded == nil, "check: %v, decode: %v", checked, decoded)
		if checked == nil {
			requireStable(t, &v)
		}
	})
}

// usesTestExt reports whether a body holds an ext type that ext_test.go registers.
func usesTestExt(b []byte) bool {
	for off := 0; off < len(b); {
		h, size := readHead(b[off:])
		if size == 0 {
			return false
		}
		off += size
		switch h.form {
		case formExt:
			if h.ext == extBoxed || h.ext == extTestHandle {
				return true
			}
			off += int(h.n)
		case formStr, formBin:
			off += int(h.n)
		}
	}
	return false
}

// addSeeds adds one body of each kind.
func addSeeds(f *testing.F) {
	files, err := filepath.Glob("testdata/body-*.bin")
	require.NoError(f, err)
	for _, name := range files {
		b, err := os.ReadFile(name)
		require.NoError(f, err)
		f.Add(b)
	}
	f.Add(mustMarshal(f, sampleWire()))
	f.Add(mustMarshal(f, sampleBoxed()))
	f.Add([]byte{0xdd, 0xff, 0xff, 0xff, 0xff})
	f.Add(bytes.Repeat([]byte{0x81, 0xa0}, 120))
	f.Add([]byte{0x82, 0xa0, 0x91, 0x01, 0x01, 0xd6, 0xff, 0, 0, 0, 0})
}
