package wire

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"
)

// Major is the version of the wire. A frame of another major version is answered with an error that says both.
const Major = 1

// Kind says what a frame is for. The numbers are the wire's and never change their meaning.
type Kind uint8

const (
	KindCall     Kind = 1  // caller → worker: run a method
	KindAnswer   Kind = 2  // worker → caller: what it returned
	KindAsk      Kind = 3  // caller → worker, control: what became of this call?
	KindStatus   Kind = 4  // worker → caller: queued, running since, never seen, outcome unknown
	KindCancel   Kind = 5  // caller → worker, control: the caller gave up
	KindWant     Kind = 6  // receiver → owner of a body: send it, from this offset
	KindChunk    Kind = 7  // owner → receivers: a piece of a body
	KindProgress Kind = 8  // receiver → owner: I have this much; the next pieces may come
	KindDone     Kind = 9  // receiver → owner: I have all of it, or need none of it
	KindGone     Kind = 10 // owner → receiver: I do not have that body
	KindMissing  Kind = 11 // worker → whoever orders its calls: something before this call has not arrived
	KindSkip     Kind = 12 // the answer: beyond Prev nothing more is coming up to Order
	KindBeat     Kind = 13 // worker process: who lives here and since when they are busy
	KindSequence Kind = 14 // caller → sequencer of an ordered role: the frames of one call, to be sent in order
	KindVersion  Kind = 15 // a peer of another major version could not read the frame
	KindBundle   Kind = 16 // several frames in one message, each behind its length as a big-endian uint32
)

var kindNames = map[Kind]string{
	KindCall: "call", KindAnswer: "answer", KindAsk: "ask", KindStatus: "status", KindCancel: "cancel", KindWant: "want",
	KindChunk: "chunk", KindProgress: "progress", KindDone: "done", KindGone: "gone", KindMissing: "missing",
	KindSkip: "skip", KindBeat: "beat", KindSequence: "sequence", KindVersion: "version", KindBundle: "bundle",
}

func (k Kind) String() string {
	if name, ok := kindNames[k]; ok {
		return name
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

// State is what a worker says of a call it is asked about.
type State uint8

const (
	StateNone    State = 0
	StateNever   State = 1 // the call has not arrived; send it again
	StateQueued  State = 2 // it waits its turn
	StateRunning State = 3 // it runs
	StateUnknown State = 4 // it ran or may have run, and its answer is no longer kept
)

func (s State) String() string {
	switch s {
	case StateNever:
		return "never seen"
	case StateQueued:
		return "queued"
	case StateRunning:
		return "running"
	case StateUnknown:
		return "outcome unknown"
	}
	return "sent"
}

// Ref names a body that does not travel in its frame: the owner's session, the owner's number for it, its length.
type Ref struct {
	Owner string
	ID    uint64
	Len   int64
}

// Header is the envelope: everything about a message that is not its body. One struct serves all kinds; a field that
// is zero does not travel. Comments name the kinds that use a field where it is not all of them.
type Header struct {
	Session string // the caller's session: with Seq it is the call's id, and where answers go
	Seq     uint64
	Acked   uint64 // the caller has every answer up to this sequence
	Method  string
	Object  string        // named object in the worker; empty: the worker's own
	Timeout time.Duration // remaining time; clocks of nodes are never compared. 0: no deadline
	Age     time.Duration // how long ago the call was first sent; 0 for a first sending
	Caller  string        // who calls, for people
	Trace   string        // W3C traceparent
	Meta    []byte        // the dispatch mode's metadata, msgpack

	Stream string         // who gave the call its place: a sequencer's session; empty: the caller itself
	Order  uint64         // the call's place in that stream; 0: unordered
	Prev   uint64         // the place of the call before it for the same rank
	Prevs  map[int]uint64 // ranks for which Prev is another one

	Some        bool    // the frame is meant for Ranks alone, of all who hear its subject
	Ranks       RankSet // when Some; want: the ranks of this process that need the body
	CollectSome bool    // only answers of Collect carry a body, the others are an acknowledgement alone
	Collect     RankSet
	NoData      bool   // the rank is called with the metadata alone
	Inline      uint32 // the largest answer body that may travel in its frame

	Ref    Ref    // the body is elsewhere
	Offset uint64 // chunk, want, progress

	Rank   int            // answer, status, missing: who says it
	Gen    uint32         // the generation of that rank
	Gens   map[int]uint32 // call: generations the caller believes in, where they are not 0
	Code   Code           // answer: empty, or the kind of failure, whose Error is the body
	State  State          // status
	Queued time.Duration  // answer, status: how long the call waited
	Ran    time.Duration  // answer, status: how long it ran
}

// Envelope keys. A number never changes its meaning and is never used again.
const (
	keySession = 1 + iota
	keySeq
	keyAcked
	keyMethod
	keyObject
	keyTimeout
	keyAge
	keyCaller
	keyTrace
	keyMeta
	keyStream
	keyOrder
	keyPrev
	keyPrevs
	keyRanks
	keyCollect
	keyNoData
	keyInline
	keyRefOwner
	keyRefID
	keyRefLen
	keyOffset
	keyRank
	keyGen
	keyGens
	keyCode
	keyState
	keyQueued
	keyRan
)

// Frame is one message: magic, version, kind, envelope, body.
//
//	0   'T' 'p'          magic
//	2   major            of the wire
//	3   kind
//	4   uint32           length of the envelope, big-endian
//	8   envelope         a msgpack map with small integers as keys
//	…   body             the rest of the message, untouched
type Frame struct {
	Kind   Kind
	Header Header
	Body   []byte
}

const HeadSize = 8

// Append encodes the frame after dst.
func (f *Frame) Append(dst []byte) []byte {
	start := len(dst)
	dst = append(dst, 'T', 'p', Major, byte(f.Kind), 0, 0, 0, 0)
	dst = f.Header.append(dst, f.Kind.fromRank())
	binary.BigEndian.PutUint32(dst[start+4:], uint32(len(dst)-start-HeadSize))
	return append(dst, f.Body...)
}

// FrameReader reads frames and remembers the names in them, which repeat from one to the next, so that a short frame is
// read without allocation. It belongs to one goroutine. The zero FrameReader is ready.
type FrameReader struct {
	names map[string]string
	last  [lastNames]string // by field: mostly it is the one before, which is found without a map
}

// The fields of an envelope whose names are remembered.
const (
	lastSession = iota
	lastMethod
	lastObject
	lastCaller
	lastStream
	lastOwner
	lastCode
	lastNames
)

const maxNames = 4096 // a reader that has seen so many starts to remember anew

// Parse is ParseFrame.
func (r *FrameReader) Parse(msg []byte) (f Frame, err error) {
	err = r.ParseInto(&f, msg)
	return f, err
}

// ParseInto is ParseFrame into a frame that is there already. After an error nothing in it counts.
func (r *FrameReader) ParseInto(f *Frame, msg []byte) error {
	if r.names == nil || len(r.names) > maxNames {
		r.names = map[string]string{}
	}
	return f.Parse(msg, r)
}

// ParseFrame reads a frame. Body and the byte fields of the envelope are views of msg.
func ParseFrame(msg []byte) (Frame, error) {
	var f Frame
	if err := f.Parse(msg, nil); err != nil {
		return Frame{}, err
	}
	return f, nil
}

// Parse reads one message into f, whose views of msg are valid as long as msg is. r may be nil.
func (f *Frame) Parse(msg []byte, r *FrameReader) error {
	if len(msg) < HeadSize || msg[0] != 'T' || msg[1] != 'p' {
		return Errorf(CodeMalformed, "not a frame of ours: %d bytes without the magic", len(msg))
	}
	if msg[2] != Major {
		return Errorf(CodeVersion, "the peer speaks version %d of the wire, this side version %d; run the same major version on both", msg[2], Major)
	}
	n := int64(binary.BigEndian.Uint32(msg[4:]))
	if n > int64(len(msg)-HeadSize) {
		return Errorf(CodeMalformed, "the envelope claims %d bytes of a message of %d", n, len(msg))
	}
	f.Kind, f.Body = Kind(msg[3]), msg[HeadSize+n:]
	return f.Header.parse(msg[HeadSize:HeadSize+n], r)
}

// fromRank reports whether frames of this kind say which rank they come from.
func (k Kind) fromRank() bool {
	return k == KindAnswer || k == KindStatus || k == KindMissing
}

// append writes the fields that are not zero. The map's length is patched in at the end.
func (h *Header) append(b []byte, fromRank bool) []byte {
	at := len(b)
	b = append(b, 0xde, 0, 0)
	n := 0
	str := func(key byte, v string) {
		if v != "" {
			b, n = packStr(append(b, key), v), n+1
		}
	}
	num := func(key byte, v uint64) {
		if v != 0 {
			b, n = packUint(append(b, key), v), n+1
		}
	}
	bin := func(key byte, set bool, v []byte) {
		if set {
			b, n = packBin(append(b, key), v), n+1
		}
	}
	str(keySession, h.Session)
	num(keySeq, h.Seq)
	num(keyAcked, h.Acked)
	str(keyMethod, h.Method)
	str(keyObject, h.Object)
	num(keyTimeout, micros(h.Timeout))
	num(keyAge, micros(h.Age))
	str(keyCaller, h.Caller)
	str(keyTrace, h.Trace)
	bin(keyMeta, len(h.Meta) > 0, h.Meta)
	str(keyStream, h.Stream)
	num(keyOrder, h.Order)
	num(keyPrev, h.Prev)
	if len(h.Prevs) > 0 {
		b, n = packRankMap(append(b, keyPrevs), h.Prevs), n+1
	}
	bin(keyRanks, h.Some, h.Ranks.bits)
	bin(keyCollect, h.CollectSome, h.Collect.bits)
	num(keyNoData, flag(h.NoData))
	num(keyInline, uint64(h.Inline))
	str(keyRefOwner, h.Ref.Owner)
	num(keyRefID, h.Ref.ID)
	num(keyRefLen, uint64(h.Ref.Len))
	num(keyOffset, h.Offset)
	if fromRank {
		b, n = packUint(append(b, keyRank), uint64(h.Rank)), n+1
	}
	num(keyGen, uint64(h.Gen))
	if len(h.Gens) > 0 {
		b, n = packRankMap(append(b, keyGens), h.Gens), n+1
	}
	str(keyCode, string(h.Code))
	num(keyState, uint64(h.State))
	num(keyQueued, micros(h.Queued))
	num(keyRan, micros(h.Ran))
	binary.BigEndian.PutUint16(b[at+1:], uint16(n))
	return b
}

func (h *Header) parse(b []byte, r *FrameReader) error {
	u := unpacker{b: b, reader: r}
	*h = Header{}
	for n := u.mapLen(); n > 0 && !u.bad; n-- {
		h.field(&u, u.uint())
	}
	if u.bad || len(u.b) > 0 {
		return Errorf(CodeMalformed, "the envelope is not the msgpack map it should be")
	}
	return nil
}

func (h *Header) field(u *unpacker, key uint64) {
	switch key {
	case keySession:
		h.Session = u.name(lastSession)
	case keySeq:
		h.Seq = u.uint()
	case keyAcked:
		h.Acked = u.uint()
	case keyMethod:
		h.Method = u.name(lastMethod)
	case keyObject:
		h.Object = u.name(lastObject)
	case keyTimeout:
		h.Timeout = u.micros()
	case keyAge:
		h.Age = u.micros()
	case keyCaller:
		h.Caller = u.name(lastCaller)
	case keyTrace:
		h.Trace = u.str()
	case keyMeta:
		h.Meta = u.bin()
	case keyStream:
		h.Stream = u.name(lastStream)
	case keyOrder:
		h.Order = u.uint()
	case keyPrev:
		h.Prev = u.uint()
	case keyPrevs:
		h.Prevs = unpackRankMap[uint64](u)
	case keyRanks:
		h.Ranks, h.Some = RankSet{bits: u.bin()}, true
	case keyCollect:
		h.Collect, h.CollectSome = RankSet{bits: u.bin()}, true
	case keyNoData:
		h.NoData = u.uint() != 0
	case keyInline:
		h.Inline = u.uint32()
	case keyRefOwner:
		h.Ref.Owner = u.name(lastOwner)
	case keyRefID:
		h.Ref.ID = u.uint()
	case keyRefLen:
		h.Ref.Len = int64(u.uint() &^ (1 << 63))
	case keyOffset:
		h.Offset = u.uint()
	case keyRank:
		h.Rank = u.int()
	case keyGen:
		h.Gen = u.uint32()
	case keyGens:
		h.Gens = unpackRankMap[uint32](u)
	case keyCode:
		h.Code = Code(u.name(lastCode))
	case keyState:
		h.State = State(u.upTo(math.MaxUint8))
	case keyQueued:
		h.Queued = u.micros()
	case keyRan:
		h.Ran = u.micros()
	default:
		u.skip()
	}
}

// micros never rounds a duration that is there down to none.
func micros(d time.Duration) uint64 {
	if d <= 0 {
		return 0
	}
	return uint64((d + time.Microsecond - 1) / time.Microsecond)
}

const maxMicros = uint64(1<<63-1) / uint64(time.Microsecond)

func (u *unpacker) micros() time.Duration {
	return time.Duration(min(u.uint(), maxMicros)) * time.Microsecond
}

func flag(set bool) uint64 {
	if set {
		return 1
	}
	return 0
}

func packRankMap[V uint32 | uint64](b []byte, m map[int]V) []byte {
	b = packMapLen(b, len(m))
	for r, v := range m {
		b = packUint(packUint(b, uint64(r)), uint64(v))
	}
	return b
}

// unpackRankMap grows with what is there, never with what the length claims.
func unpackRankMap[V uint32 | uint64](u *unpacker) map[int]V {
	m := map[int]V{}
	for n := u.mapLen(); n > 0 && !u.bad; n-- {
		r := u.int()
		m[r] = V(u.upTo(uint64(^V(0))))
	}
	return m
}

// Collected reports whether the answer of that rank carries a body.
func (h *Header) Collected(rank int) bool { return !h.CollectSome || h.Collect.Has(rank) }

// For reports whether the frame is meant for that rank, if the rank hears its subject.
func (h *Header) For(rank int) bool { return !h.Some || h.Ranks.Has(rank) }

// PrevFor is the place of the call before this one for that rank.
func (h *Header) PrevFor(rank int) uint64 {
	if p, ok := h.Prevs[rank]; ok {
		return p
	}
	return h.Prev
}

// OrderedBy is the session of whoever gave the call its place.
func (h *Header) OrderedBy() string {
	if h.Stream != "" {
		return h.Stream
	}
	return h.Session
}

// AppendRouted encodes a frame with the subject it is to be published on, for a sequencer.
func AppendRouted(dst []byte, subject string, f *Frame) []byte {
	return packBin(packStr(dst, subject), f.Append(nil))
}

// ReadRouted reads what AppendRouted wrote at the start of b, and returns what follows it.
func ReadRouted(b []byte) (subject string, f Frame, rest []byte, err error) {
	u := unpacker{b: b}
	subject = u.str()
	msg := u.bin()
	if u.bad {
		return "", Frame{}, nil, Errorf(CodeMalformed, "a routed frame is cut off")
	}
	f, err = ParseFrame(msg)
	return subject, f, u.b, err
}
