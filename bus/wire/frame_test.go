package wire_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"troupe/bus/wire"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

var allKinds = []wire.Kind{
	wire.KindCall, wire.KindAnswer, wire.KindAsk, wire.KindStatus, wire.KindCancel, wire.KindWant, wire.KindChunk, wire.KindProgress,
	wire.KindDone, wire.KindGone, wire.KindMissing, wire.KindSkip, wire.KindBeat, wire.KindSequence, wire.KindVersion, wire.KindBundle,
	wire.KindLong,
}

// saysRank are the kinds with the rank of their sender.
var saysRank = map[wire.Kind]bool{wire.KindAnswer: true, wire.KindStatus: true, wire.KindMissing: true}

func genDuration(t *rapid.T, name string) time.Duration {
	return time.Duration(rapid.Int64Range(0, math.MaxInt64/1000).Draw(t, name)) * time.Microsecond
}

func genRanks(t *rapid.T, name string) wire.RankSet {
	return wire.Ranks(rapid.SliceOfN(rapid.IntRange(0, 5000), 0, 20).Draw(t, name)...)
}

func genRankMap[V uint32 | uint64](t *rapid.T, name string, v *rapid.Generator[V]) map[int]V {
	m := rapid.MapOfN(rapid.IntRange(0, math.MaxInt32), v, 0, 40).Draw(t, name)
	if len(m) == 0 {
		return nil
	}
	return m
}

func genFrame(t *rapid.T) wire.Frame {
	text, number := rapid.StringN(0, 80, -1), rapid.Uint64()
	name := rapid.StringMatching(`[A-Za-z0-9_-]{0,64}`)
	h := wire.Header{
		Session: name.Draw(t, "session"), Seq: number.Draw(t, "seq"), Acked: number.Draw(t, "acked"),
		Method: text.Draw(t, "method"), Object: text.Draw(t, "object"),
		Timeout: genDuration(t, "timeout"), Age: genDuration(t, "age"),
		Caller: text.Draw(t, "caller"), Trace: text.Draw(t, "trace"), Meta: rapid.SliceOfN(rapid.Byte(), 0, 300).Draw(t, "meta"),
		Stream: name.Draw(t, "stream"), Order: number.Draw(t, "order"), Prev: number.Draw(t, "prev"),
		Prevs: genRankMap(t, "prevs", rapid.Uint64()), Some: rapid.Bool().Draw(t, "some"), CollectSome: rapid.Bool().Draw(t, "collectSome"),
		NoData: rapid.Bool().Draw(t, "noData"), Inline: rapid.Uint32().Draw(t, "inline"),
		Ref:    wire.BodyRef{Owner: name.Draw(t, "owner"), ID: number.Draw(t, "id"), Len: rapid.Int64Range(0, math.MaxInt64).Draw(t, "len")},
		Offset: number.Draw(t, "offset"), Gen: rapid.Uint32().Draw(t, "gen"), Gens: genRankMap(t, "gens", rapid.Uint32()),
		Code: wire.Code(text.Draw(t, "code")), State: wire.State(rapid.Byte().Draw(t, "state")),
		Queued: genDuration(t, "queued"), Ran: genDuration(t, "ran"),
	}
	f := wire.Frame{Kind: rapid.SampledFrom(allKinds).Draw(t, "kind"), Header: h, Body: rapid.SliceOfN(rapid.Byte(), 0, 100).Draw(t, "body")}
	if saysRank[f.Kind] {
		f.Header.Rank = rapid.IntRange(0, math.MaxInt32).Draw(t, "rank")
	}
	if h.Some {
		f.Header.Ranks = genRanks(t, "ranks")
	}
	if h.CollectSome {
		f.Header.Collect = genRanks(t, "collect")
	}
	return f
}

// plain makes frames comparable: empty slices become nil.
func plain(f wire.Frame) wire.Frame {
	f.Header.Ranks, f.Header.Collect = wire.Ranks(f.Header.Ranks.List()...), wire.Ranks(f.Header.Collect.List()...)
	if len(f.Header.Meta) == 0 {
		f.Header.Meta = nil
	}
	if len(f.Body) == 0 {
		f.Body = nil
	}
	return f
}

func TestFrameRoundTrip(t *testing.T) {
	var reader wire.FrameReader
	rapid.Check(t, func(t *rapid.T) {
		f := genFrame(t)
		prefix := rapid.SliceOfN(rapid.Byte(), 0, 5).Draw(t, "before")
		msg := f.Append(prefix)
		require.Equal(t, prefix, msg[:len(prefix)])
		got, err := wire.ParseFrame(msg[len(prefix):])
		require.NoError(t, err)
		require.Equal(t, plain(f), plain(got))
		again, err := reader.Parse(msg[len(prefix):])
		require.NoError(t, err)
		require.Equal(t, plain(f), plain(again))
	})
}

func TestDurationsRoundUp(t *testing.T) {
	for d, want := range map[time.Duration]time.Duration{
		0: 0, -time.Second: 0, 1: time.Microsecond, time.Microsecond: time.Microsecond, 1001: 2 * time.Microsecond, time.Hour: time.Hour,
	} {
		f := wire.Frame{Kind: wire.KindCall, Header: wire.Header{Timeout: d}}
		got, err := wire.ParseFrame(f.Append(nil))
		require.NoError(t, err)
		require.Equal(t, want, got.Header.Timeout)
	}
}

// TestUnknownFieldsAreIgnored checks that fields of a later minor version are ignored.
func TestUnknownFieldsAreIgnored(t *testing.T) {
	later := map[string]string{
		"nil": "\xc0", "bool": "\xc3", "negative": "\xff", "float": "\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00", "string": "\xa2hi",
		"bin": "\xc4\x02ab", "list": "\x93\x01\x92\x02\x03\xa1x", "map": "\x82\x01\x02\x81\xa1k\x05\x90", "fixext": "\xd6\x01abcd",
		"ext": "\xc7\x03\x01abc", "array16": "\xdc\x00\x01\x07", "map16": "\xde\x00\x01\x07\x08", "map32": "\xdf\x00\x00\x00\x01\x07\x08",
	}
	for name, value := range later {
		t.Run(name, func(t *testing.T) {
			envelope := "\x83\x01\xa1s" + "\xcc\xc8" + value + "\x02\x07"
			got, err := wire.ParseFrame([]byte("Tp\x01\x01\x00\x00\x00" + string(rune(len(envelope))) + envelope + "body"))
			require.NoError(t, err)
			require.Equal(t, wire.Frame{Kind: wire.KindCall, Header: wire.Header{Session: "s", Seq: 7}, Body: []byte("body")}, got)
		})
	}
}

func TestMalformedFramesAreRefused(t *testing.T) {
	good := (&wire.Frame{Kind: wire.KindCall, Header: wire.Header{Session: "s", Seq: 7}, Body: []byte("body")}).Append(nil)
	for name, msg := range map[string][]byte{
		"empty":             {},
		"short":             good[:7],
		"another magic":     append([]byte("XX"), good[2:]...),
		"cut envelope":      good[:10],
		"envelope too long": []byte("Tp\x01\x01\xff\xff\xff\xff"),
		"no map":            []byte("Tp\x01\x01\x00\x00\x00\x01\x90"),
		"too many entries":  []byte("Tp\x01\x01\x00\x00\x00\x03\xde\xff\xff"),
		"too few entries":   []byte("Tp\x01\x01\x00\x00\x00\x03\x80\x01\x02"),
		"wrong type":        []byte("Tp\x01\x01\x00\x00\x00\x03\x81\x01\x02"),
		"negative":          []byte("Tp\x01\x01\x00\x00\x00\x03\x81\x02\xff"),
		"rank too large":    []byte("Tp\x01\x02\x00\x00\x00\x0b\x81\x17\xcf\xff\xff\xff\xff\xff\xff\xff\xff"),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := wire.ParseFrame(msg)
			require.ErrorIs(t, err, wire.ErrMalformed)
		})
	}
}

func TestKindsAndStatesHaveNames(t *testing.T) {
	seen := map[string]bool{}
	for _, k := range allKinds {
		require.NotContains(t, k.String(), "kind ")
		require.False(t, seen[k.String()], "%s twice", k)
		seen[k.String()] = true
	}
	require.Equal(t, "kind 99", wire.Kind(99).String())
	require.Equal(t, "sent never seen queued running outcome unknown",
		strings.Join([]string{wire.StateNone.String(), wire.StateNever.String(), wire.StateQueued.String(), wire.StateRunning.String(), wire.StateUnknown.String()}, " "))
}

// otherMajor is the frame with the next major version.
func otherMajor(f wire.Frame) []byte {
	msg := f.Append(nil)
	msg[2] = wire.Major + 1
	return msg
}

func TestOtherMajorVersionIsRefused(t *testing.T) {
	_, err := wire.ParseFrame(otherMajor(wire.Frame{Kind: wire.KindCall}))
	require.ErrorIs(t, err, wire.ErrVersion)
	require.EqualError(t, err, "the peer uses version 2 of the wire, this process version 1; run the same major version on both")
}

// FuzzParseFrame checks that no input panics or allocates more than a few times its size.
func FuzzParseFrame(f *testing.F) {
	for _, k := range allKinds {
		f.Add((&wire.Frame{Kind: k, Header: wire.Header{
			Session: "s", Seq: 1, Prevs: map[int]uint64{1: 2}, Gens: map[int]uint32{1: 2}, Some: true, Ranks: wire.Ranks(1, 9),
			Meta: []byte{0x80}, Ref: wire.BodyRef{Owner: "o", ID: 1, Len: 5},
		}, Body: []byte("body")}).Append(nil))
	}
	f.Add([]byte("Tp\x01\x01\x00\x00\x00\x09\x81\x0e\xde\xff\xff\x01\x02\x03\x04"))
	f.Add([]byte("Tp\x01\x01\x00\x00\x00\x0a\x81\xcc\xc8\xdd\xff\xff\xff\xff\x01\x02"))
	var reader wire.FrameReader
	f.Fuzz(func(t *testing.T, msg []byte) {
		var got wire.Frame
		var err error
		allocated := bytesAllocated(func() { got, err = wire.ParseFrame(msg) })
		require.LessOrEqual(t, allocated, uint64(64*len(msg)+64<<10))
		other, otherErr := reader.Parse(msg)
		require.Equal(t, err == nil, otherErr == nil)
		if err != nil {
			return
		}
		require.Equal(t, plain(got), plain(other))
		again, err := wire.ParseFrame(got.Append(nil))
		require.NoError(t, err)
		if !saysRank[got.Kind] {
			got.Header.Rank = 0
		}
		require.Equal(t, plain(got), plain(again), "a parsed frame round-trips")
		for _, r := range got.Header.Ranks.List() {
			require.True(t, got.Header.Ranks.Has(r))
		}
	})
}

// TestALocationTravels checks that a location survives both encoders of an envelope, and that an envelope without one has no field of it.
func TestALocationTravels(t *testing.T) {
	h := wire.Header{
		Seq: 7, Rank: 3, Ref: wire.BodyRef{Owner: "OWNER", ID: 5, Len: 1 << 20},
		Location: wire.Location{Owner: "00112233445566778899aabbccddeeff", Segment: 3, Offset: 8192, Gen: 1<<64 - 1},
	}
	f := wire.Frame{Kind: wire.KindAnswer, Header: h}
	for _, msg := range [][]byte{f.Append(nil), wire.AppendAnswerHead(nil, &h)} {
		got, err := wire.ParseFrame(msg)
		require.NoError(t, err)
		require.Equal(t, h.Location, got.Header.Location)
		require.Equal(t, h.Ref, got.Header.Ref)
	}
	with := len(f.Append(nil))
	f.Header.Location = wire.Location{}
	require.Less(t, len(f.Append(nil)), with-32)
}
