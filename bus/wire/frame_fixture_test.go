package wire_test

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"testing"
	"time"

	"troupe/bus/wire"

	"github.com/stretchr/testify/require"
)

// describedFrame is a frame in JSON. The envelope is a map with the numbers of docs/wire.md as keys.
type describedFrame struct {
	Major    int       `json:"major"`
	Kind     int       `json:"kind"`
	Name     string    `json:"name"`
	Envelope described `json:"envelope"`
	Body     string    `json:"body,omitempty"`
}

// TestFrameFixtures pins the bytes of one frame of each kind.
func TestFrameFixtures(t *testing.T) {
	fixtures := frameFixtures(t)
	require.Len(t, fixtures, len(allKinds))
	for _, f := range fixtures {
		t.Run(f.Kind.String(), func(t *testing.T) {
			got, err := wire.ParseFrame(pin(t, "frame-"+f.Kind.String(), f.Append(nil), describeFrame))
			require.NoError(t, err)
			require.Equal(t, plain(f), plain(got))
		})
	}
	requireFixtures(t, "frame", len(fixtures))
}

func describeFrame(t *testing.T, msg []byte) []byte {
	f, err := wire.ParseFrame(msg)
	require.NoError(t, err)
	envelope := msg[8 : 8+binary.BigEndian.Uint32(msg[4:])]
	var v any
	require.NoError(t, wire.UnmarshalShared(envelope, &v))
	words, err := json.MarshalIndent(describedFrame{
		Major: int(msg[2]), Kind: int(msg[3]), Name: f.Kind.String(), Envelope: describe(t, envelope, v), Body: hex.EncodeToString(f.Body),
	}, "", " ")
	require.NoError(t, err)
	return append(words, '\n')
}

const caller, worker = "CALLERSESSION000000000", "WORKERSESSION000000000"

// frameFixtures have maps of one entry, because envelopes do not sort their maps.
func frameFixtures(t *testing.T) []wire.Frame {
	args, err := wire.Marshal(42)
	require.NoError(t, err)
	args = wire.Args{Positional: []wire.Raw{args}}.Append(nil, nil)
	failure, err := wire.Marshal(&wire.Error{Code: wire.CodeApplication, Message: "no", Rank: -1, Node: "node-a"})
	require.NoError(t, err)
	ref := wire.BodyRef{Owner: caller, ID: 5, Len: 1 << 20}
	call := wire.Frame{Kind: wire.KindCall, Header: wire.Header{
		Session: caller, Seq: 7, Acked: 5, Method: "step", Object: "critic", Timeout: 30 * time.Second, Age: 1500 * time.Microsecond,
		Caller: "train@node-a", Trace: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", Meta: []byte{0x80},
		Order: 9, Prev: 8, Prevs: map[int]uint64{3: 6}, Some: true, Ranks: wire.Ranks(1, 3), CollectSome: true, Collect: wire.Ranks(1),
		NoData: true, Inline: 32768, Gens: map[int]uint32{3: 2},
	}, Body: args}
	answer := wire.Frame{Kind: wire.KindAnswer, Header: wire.Header{
		Seq: 7, Rank: 3, Gen: 2, Code: wire.CodeApplication, Queued: 250 * time.Microsecond, Ran: 2 * time.Millisecond,
	}, Body: failure}
	bundle := wire.Frame{Kind: wire.KindBundle}
	for rank := range 2 {
		inner := wire.Frame{Kind: wire.KindAnswer, Header: wire.Header{Seq: 8, Rank: rank}, Body: []byte{byte(rank)}}
		bundle.Body = append(binary.BigEndian.AppendUint32(bundle.Body, uint32(len(inner.Append(nil)))), inner.Append(nil)...)
	}
	placed := wire.Frame{Kind: wire.KindCall, Header: wire.Header{Session: caller, Seq: 9, Method: "step"}, Body: args}
	const subject = "troupe.default.critic.i1.all"
	sequence := wire.Frame{Kind: wire.KindSequence, Header: wire.Header{Session: caller, Seq: 9, Order: 12, Prev: 11, Some: true, Ranks: wire.Ranks(2)}}
	sequence.Body = append(append([]byte{0xa0 | byte(len(subject))}, subject...), 0xc4, byte(len(placed.Append(nil))))
	sequence.Body = append(sequence.Body, placed.Append(nil)...)
	beat, err := wire.Marshal([]map[string]any{{"rank": 0, "gen": 0, "state": "ready", "busy": 0, "calls": 0, "queued": 0, "node": "node-a"}})
	require.NoError(t, err)
	return []wire.Frame{
		call, answer, bundle, sequence,
		{Kind: wire.KindAsk, Header: wire.Header{Session: caller, Seq: 7, Age: 800 * time.Millisecond, Some: true, Ranks: wire.Ranks(0, 9)}},
		{Kind: wire.KindStatus, Header: wire.Header{Seq: 7, Rank: 0, State: wire.StateRunning, Ran: time.Hour}},
		{Kind: wire.KindCancel, Header: wire.Header{Session: caller, Seq: 7}},
		{Kind: wire.KindWant, Header: wire.Header{Session: worker, Ref: ref, ForHost: wire.ForAll, Offset: 524288, Some: true, Ranks: wire.Ranks(4, 5)}},
		{Kind: wire.KindChunk, Header: wire.Header{Ref: ref, Offset: 524288}, Body: []byte("a piece of the body")},
		{Kind: wire.KindProgress, Header: wire.Header{Session: worker, Ref: ref, Offset: 786432}},
		{Kind: wire.KindDone, Header: wire.Header{Session: worker, Ref: ref, Some: true, Ranks: wire.Ranks(4, 5)}},
		{Kind: wire.KindGone, Header: wire.Header{Ref: ref}},
		{Kind: wire.KindMissing, Header: wire.Header{Stream: caller, Object: "troupe.default.critic.i1", Rank: 3, Gen: 2, Prev: 6, Order: 9}},
		{Kind: wire.KindSkip, Header: wire.Header{Session: caller, Order: 9, Prev: 8}},
		{Kind: wire.KindBeat, Header: wire.Header{Session: worker}, Body: beat},
		{Kind: wire.KindVersion},
		{Kind: wire.KindLong, Header: wire.Header{Ref: ref}},
	}
}
