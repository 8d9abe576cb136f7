package wire

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// The code that every rank runs for every call does not allocate.
func TestFrameAllocations(t *testing.T) {
	call := Frame{Kind: KindCall, Body: make([]byte, 64), Header: Header{
		Session: "ABCDEFGHIJKL", Seq: 1000, Acked: 999, Method: "echo", Caller: "train@node", Order: 1000, Prev: 999, Inline: 32 << 10,
	}}
	answer := Frame{Kind: KindAnswer, Body: make([]byte, 64), Header: Header{Seq: 1000, Rank: 511, Gen: 1, Queued: time.Millisecond, Ran: time.Second}}
	callMsg, answerMsg := call.Append(nil), answer.Append(nil)
	buf := make([]byte, 0, 1024)
	var reader FrameReader
	var f Frame
	for name, do := range map[string]func(){
		"writing a call":    func() { buf = call.Append(buf[:0]) },
		"reading a call":    func() { require.NoError(t, reader.ParseInto(&f, callMsg)) },
		"reading an answer": func() { require.NoError(t, f.Parse(answerMsg, nil)) },
		"an answer's head":  func() { buf = AppendAnswerHead(buf[:0], &answer.Header) },
	} {
		require.Zero(t, testing.AllocsPerRun(100, do), name)
	}

}

func TestQuickAllocations(t *testing.T) {
	buf := make([]byte, 0, 256)
	in, number := make([]byte, 64), 42
	body, err := Marshal(in)
	require.NoError(t, err)
	require.Zero(t, testing.AllocsPerRun(100, func() { _, _ = AppendQuick(buf, &in) }))
	require.Zero(t, testing.AllocsPerRun(100, func() { _, _ = AppendQuick(buf, &number) }))
	require.EqualValues(t, 1, testing.AllocsPerRun(100, func() {
		var out []byte
		require.True(t, ReadQuick(body, &out))
	}), "the bytes, and nothing else")
}

// AppendAnswerHead and Frame.Append write the same bytes.
func TestAnswerHead(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		duration := rapid.Custom(func(t *rapid.T) time.Duration { return time.Duration(rapid.Int64Range(0, 1<<62).Draw(t, "ns")) })
		h := Header{
			Seq: rapid.Uint64Min(1).Draw(t, "seq"), Rank: rapid.IntRange(0, 1<<31-1).Draw(t, "rank"), Gen: rapid.Uint32().Draw(t, "gen"),
			Code: Code(rapid.StringN(0, 64, -1).Draw(t, "code")), Queued: duration.Draw(t, "queued"), Ran: duration.Draw(t, "ran"),
		}
		if rapid.Bool().Draw(t, "ref") {
			h.Ref = BodyRef{Owner: "ABCDEFGHIJKL", ID: rapid.Uint64Min(1).Draw(t, "id"), Len: rapid.Int64Range(1, 1<<62).Draw(t, "len")}
		}
		require.Equal(t, (&Frame{Kind: KindAnswer, Header: h}).Append(nil), AppendAnswerHead(nil, &h))
		if h.Code == "" && h.Ref.Owner == "" {
			require.LessOrEqual(t, len(AppendAnswerHead(nil, &h)), 64, "bus.ReplyRoom")
		}
	})
}

// AppendQuick and ReadQuick agree with Marshal and Unmarshal, and decline other types.
func TestQuickEqualsMarshal(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		data, number, real, flag := rapid.SliceOf(rapid.Byte()).Draw(t, "bytes"), rapid.Int64().Draw(t, "int"), rapid.Float64().Draw(t, "float"), rapid.Bool().Draw(t, "bool")
		data = append(make([]byte, 0, 1), data...) // never nil
		short := int(number)
		for p, v := range map[any]any{&data: data, &number: number, &real: real, &flag: flag, &short: short} {
			want, err := Marshal(v)
			require.NoError(t, err)
			got, ok := AppendQuick([]byte("before"), p)
			require.True(t, ok)
			require.Equal(t, "before"+string(want), string(got))
		}
		var back []byte
		body, err := Marshal(data)
		require.NoError(t, err)
		require.True(t, ReadQuick(body, &back))
		require.Equal(t, data, back)
		require.False(t, ReadQuick(append(body, 0xc0), &back), "a value follows")
		require.False(t, ReadQuick(body[:len(body)-1], &back), "the value is cut off")
	})
	var none []byte
	_, ok := AppendQuick(nil, &none)
	require.False(t, ok, "nil is not empty")
	_, ok = AppendQuick(nil, new(string))
	require.False(t, ok)
	require.False(t, ReadQuick([]byte{0xc4, 0}, (*[]byte)(nil)))
	require.False(t, ReadQuick([]byte{0xc0}, &none))
	require.Error(t, Unmarshal([]byte{0xc4, 0}, (*[]byte)(nil)))
}
