package bus_test

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
)

// describedFrame is a frame in JSON. The envelope is a map with the numbers of docs/wire.md as keys.
type describedFrame struct {
	Major    int       `json:"major"`
	Kind     int       `json:"kind"`
	Name     string    `json:"name"`
	Envelope described `json:"envelope"`
	Body     string    `json:"body,omitempty"`
}

// TestFrameFixtures holds the bytes of frames still, one of each kind, as TestBodyFixtures does those of bodies.
func TestFrameFixtures(t *testing.T) {
	fixtures := frameFixtures(t)
	require.Len(t, fixtures, len(allKinds))
	for _, f := range fixtures {
		t.Run(f.Kind.String(), func(t *testing.T) {
			got, err := bus.ParseFrame(pin(t, "frame-"+f.Kind.String(), f.Append(nil), describeFrame))
			require.NoError(t, err)
			require.Equal(t, plain(f), plain(got))
		})
	}
	requireFixtures(t, "frame", len(fixtures))
}

func describeFrame(t *testing.T, msg []byte) []byte {
	f, err := bus.ParseFrame(msg)
	require.NoError(t, err)
	envelope := msg[8 : 8+binary.BigEndian.Uint32(msg[4:])]
	var v any
	require.NoError(t, bus.UnmarshalShared(envelope, &v))
	words, err := json.MarshalIndent(describedFrame{
		Major: int(msg[2]), Kind: int(msg[3]), Name: f.Kind.String(), Envelope: describe(t, envelope, v), Body: hex.EncodeToString(f.Body),
	}, "", " ")
	require.NoError(t, err)
	return append(words, '\n')
}

const caller, worker = "CALLERSESSION000000000", "WORKERSESSION000000000"

// frameFixtures are frames as they travel. A map has one entry, because the order of more is not fixed.
func frameFixtures(t *testing.T) []bus.Frame {
	args, err := bus.Marshal(42)
	require.NoError(t, err)
	args = bus.Args{Positional: []bus.Raw{args}}.Append(nil, nil)
	failure, err := bus.Marshal(&bus.Error{Code: bus.CodeApplication, Message: "no", Rank: -1, Node: "node-a"})
	require.NoError(t, err)
	ref := bus.Ref{Owner: caller, ID: 5, Len: 1 << 20}
	call := bus.Frame{Kind: bus.KindCall, Header: bus.Header{
		Session: caller, Seq: 7, Acked: 5, Method: "step", Object: "critic", Timeout: 30 * time.Second, Age: 1500 * time.Microsecond,
		Caller: "train@node-a", Trace: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", Meta: []byte{0x80},
		Order: 9, Prev: 8, Prevs: map[int]uint64{3: 6}, Some: true, Ranks: bus.Ranks(1, 3), CollectSome: true, Collect: bus.Ranks(1),
		NoData: true, Inline: 32768, Gens: map[int]uint32{3: 2},
	}, Body: args}
	answer := bus.Frame{Kind: bus.KindAnswer, Header: bus.Header{
		Seq: 7, Rank: 3, Gen: 2, Code: bus.CodeApplication, Queued: 250 * time.Microsecond, Ran: 2 * time.Millisecond,
	}, Body: failure}
	bundle := bus.Frame{Kind: bus.KindBundle}
	for rank := range 2 {
		inner := bus.Frame{Kind: bus.KindAnswer, Header: bus.Header{Seq: 8, Rank: rank}, Body: []byte{byte(rank)}}
		bundle.Body = append(binary.BigEndian.AppendUint32(bundle.Body, uint32(len(inner.Append(nil)))), inner.Append(nil)...)
	}
	placed := bus.Frame{Kind: bus.KindCall, Header: bus.Header{Session: caller, Seq: 9, Method: "step"}, Body: args}
	const subject = "troupe.default.critic.i1.all"
	sequence := bus.Frame{Kind: bus.KindSequence, Header: bus.Header{Session: caller, Seq: 9, Order: 12, Prev: 11, Some: true, Ranks: bus.Ranks(2)}}
	sequence.Body = append(append([]byte{0xa0 | byte(len(subject))}, subject...), 0xc4, byte(len(placed.Append(nil))))
	sequence.Body = append(sequence.Body, placed.Append(nil)...)
	beat, err := bus.Marshal([]map[string]any{{"rank": 0, "gen": 0, "state": "ready", "busy": 0, "calls": 0, "queued": 0, "node": "node-a"}})
	require.NoError(t, err)
	return []bus.Frame{
		call, answer, bundle, sequence,
		{Kind: bus.KindAsk, Header: bus.Header{Session: caller, Seq: 7, Age: 800 * time.Millisecond, Some: true, Ranks: bus.Ranks(0, 9)}},
		{Kind: bus.KindStatus, Header: bus.Header{Seq: 7, Rank: 0, State: bus.StateRunning, Ran: time.Hour}},
		{Kind: bus.KindCancel, Header: bus.Header{Session: caller, Seq: 7}},
		{Kind: bus.KindWant, Header: bus.Header{Session: worker, Ref: ref, Offset: 524288, Some: true, Ranks: bus.Ranks(4, 5)}},
		{Kind: bus.KindChunk, Header: bus.Header{Ref: ref, Offset: 524288}, Body: []byte("a piece of the body")},
		{Kind: bus.KindProgress, Header: bus.Header{Session: worker, Ref: ref, Offset: 786432}},
		{Kind: bus.KindDone, Header: bus.Header{Session: worker, Ref: ref, Some: true, Ranks: bus.Ranks(4, 5)}},
		{Kind: bus.KindGone, Header: bus.Header{Ref: ref}},
		{Kind: bus.KindMissing, Header: bus.Header{Stream: caller, Object: "troupe.default.critic.i1", Rank: 3, Gen: 2, Prev: 6, Order: 9}},
		{Kind: bus.KindSkip, Header: bus.Header{Session: caller, Order: 9, Prev: 8}},
		{Kind: bus.KindBeat, Header: bus.Header{Session: worker}, Body: beat},
		{Kind: bus.KindVersion},
	}
}
