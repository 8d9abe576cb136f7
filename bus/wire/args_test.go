package wire_test

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"troupe/bus/wire"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// bytesAllocated is the number of bytes that the process allocates during do: the least of three tries.
func bytesAllocated(do func()) uint64 {
	least := ^uint64(0)
	for range 3 {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		do()
		runtime.ReadMemStats(&after)
		least = min(least, after.TotalAlloc-before.TotalAlloc)
	}
	return least
}

func TestArgsRoundTrip(t *testing.T) {
	value := rapid.Custom(func(t *rapid.T) wire.Raw {
		var v any
		switch rapid.IntRange(0, 4).Draw(t, "type") {
		case 0:
			v = rapid.Int().Draw(t, "int")
		case 1:
			v = rapid.String().Draw(t, "string")
		case 2:
			v = rapid.SliceOf(rapid.Byte()).Draw(t, "bytes")
		case 3:
			v = rapid.MapOf(rapid.String(), rapid.Float64()).Draw(t, "map")
		}
		raw, err := wire.Marshal(v)
		require.NoError(t, err)
		return raw
	})
	rapid.Check(t, func(t *rapid.T) {
		a := wire.Args{
			Positional: rapid.SliceOfN(value, 0, 40).Draw(t, "positional"),
			Named:      rapid.MapOfN(rapid.String(), value, 0, 40).Draw(t, "named"),
		}
		var names []string
		for n := range a.Named {
			names = append(names, n)
		}
		body := a.Append(nil, names)
		got, err := wire.ParseArgs(body)
		require.NoError(t, err)
		require.Equal(t, len(a.Positional), len(got.Positional))
		require.Equal(t, len(a.Named), len(got.Named))
		for i := range a.Positional {
			require.Equal(t, string(a.Positional[i]), string(got.Positional[i]))
		}
		for n := range a.Named {
			require.Equal(t, string(a.Named[n]), string(got.Named[n]))
		}
		one, ok := wire.SingleArg(body)
		require.Equal(t, len(a.Positional) == 1 && len(a.Named) == 0, ok)
		if ok {
			require.Equal(t, string(a.Positional[0]), string(one))
		}
	})
}

func TestArgsOfOtherWriters(t *testing.T) {
	for name, body := range map[string]string{
		"nothing":       "",
		"short forms":   "\x92\x91\x01\x81\xa1a\x02",
		"array16":       "\xdc\x00\x02\xdc\x00\x01\x01\x81\xa1a\x02",
		"array32":       "\xdd\x00\x00\x00\x02\xdd\x00\x00\x00\x01\x01\xdf\x00\x00\x00\x01\xd9\x01a\x02",
		"no named":      "\x92\x91\x01\xc0",
		"empty named":   "\x92\x91\x01\x80",
		"no positional": "\x92\x90\x81\xa1a\x02",
	} {
		t.Run(name, func(t *testing.T) {
			a, err := wire.ParseArgs([]byte(body))
			require.NoError(t, err)
			require.LessOrEqual(t, len(a.Positional), 1)
		})
	}
}

func TestMalformedArgsAreRefused(t *testing.T) {
	for name, body := range map[string]string{
		"no list":        "\x81\x01\x02",
		"one element":    "\x91\x90",
		"three elements": "\x93\x90\xc0\xc0",
		"cut":            "\x92\x93\x01",
		"more behind":    "\x92\x90\xc0\xc0",
		"named a list":   "\x92\x90\x90",
		"a key a number": "\x92\x90\x81\x01\x02",
		"never used":     "\x92\x91\xc1\xc0",
	} {
		t.Run(name, func(t *testing.T) {
			_, err := wire.ParseArgs([]byte(body))
			require.ErrorIs(t, err, wire.ErrMalformed)
			require.EqualError(t, err, "the body of a call must be [positional, named]: a list, and a map or nil")
		})
	}
}

// TestHostileArgsAllocateNothing checks that a count above the limit is refused before a list is allocated.
func TestHostileArgsAllocateNothing(t *testing.T) {
	const n = 10 << 20
	body := slices.Concat([]byte{0x92, 0xdd, 0, n >> 16, 0, 0}, []byte(strings.Repeat("\x01", n)), []byte{0xc0})
	require.Less(t, bytesAllocated(func() {
		_, err := wire.ParseArgs(body)
		require.ErrorIs(t, err, wire.ErrMalformed)
		require.ErrorContains(t, err, "a call has at most 65535 arguments")
	}), uint64(1<<20))
	many := wire.Args{Positional: slices.Repeat([]wire.Raw{{0x01}}, 65535)}
	got, err := wire.ParseArgs(many.Append(nil, nil))
	require.NoError(t, err)
	require.Len(t, got.Positional, 65535)
	named := wire.Args{Named: map[string]wire.Raw{}}
	var names []string
	for i := range 70_000 {
		names = append(names, fmt.Sprint(i))
		named.Named[names[i]] = wire.Raw{0x01}
	}
	_, err = wire.ParseArgs(named.Append(nil, names))
	require.ErrorContains(t, err, "a call has at most 65535 arguments")
}

// FuzzParseArgs checks that no input panics or allocates more than a few times its size.
func FuzzParseArgs(f *testing.F) {
	for _, s := range []string{"", "\x92\x91\x01\x81\xa1a\x02", "\x92\xdd\xff\xff\xff\xff\x01", "\x92\x90\xdf\xff\xff\xff\xff\xa1a\x01", "\x92\x91\xc0\xc0"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		var got wire.Args
		var err error
		allocated := bytesAllocated(func() { got, err = wire.ParseArgs(body) })
		require.LessOrEqual(t, allocated, uint64(128*len(body)+64<<10))
		one, single := wire.SingleArg(body)
		if err != nil {
			require.False(t, single, "a malformed body has no argument")
			return
		}
		if single {
			require.Equal(t, []wire.Raw{one}, got.Positional)
			require.Empty(t, got.Named)
		}
		for _, p := range got.Positional {
			require.NotEmpty(t, p)
		}
	})
}
