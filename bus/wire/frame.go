package wire

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"
)

// Major is the version of the wire. The answer to a frame of another major version is an error that names both.
const Major = 1

// Kind is the purpose of a frame. A number never changes its meaning.
type Kind uint8

const (
	KindCall     Kind = 1  // caller → worker: run a method
	KindAnswer   Kind = 2  // worker → caller: the result
	KindAsk      Kind = 3  // caller → worker, control: request for the status of a call
	KindStatus   Kind = 4  // worker → caller: queued, running since, never seen, outcome unknown
	KindCancel   Kind = 5  // caller → worker, control: the caller gave up
	KindWant     Kind = 6  // receiver → owner of a body: request for it, from this offset
	KindChunk    Kind = 7  // owner → receivers: a piece of a body
	KindProgress Kind = 8  // receiver → owner: this much has arrived; the next pieces may come
	KindDone     Kind = 9  // receiver → owner: all of it has arrived, or none of it is needed
	KindGone     Kind = 10 // owner → receiver: the owner does not have that body
	KindMissing  Kind = 11 // worker → caller or sequencer: something before this call has not arrived
	KindSkip     Kind = 12 // answer to missing: after Prev nothing more follows up to Order
	KindBeat     Kind = 13 // worker process: its ranks, and since when each is busy
	KindSequence Kind = 14 // caller → sequencer of an ordered role: the frames of one call, to be sent in order
	KindVersion  Kind = 15 // a peer of another major version could not read the frame
	KindBundle   Kind = 16 // several frames in one message, each after its length as a big-endian uint32
	KindResolve  Kind = 17 // process → owner of a value: request for it, or, with NoData, for the news that it is there
	KindResolved Kind = 18 // owner → process: the value, where its body lies, its error, or that it is pending (State)
	KindHold     Kind = 19 // process → owners: it refers to these values from now on
	KindDrop     Kind = 20 // process → owners: it does not refer to these values any more
	KindReport   Kind = 21 // process → owner: all values of this owner that it refers to
	KindFree     Kind = 22 // owner → process that keeps bodies for it: these are not needed any more
	KindKept     Kind = 23 // process → owner: bodies that it keeps for the owner, which knows them or has given them up
	KindHandOver Kind = 24 // process → owner: it ends; the owner must pull these bodies
	KindTaken    Kind = 25 // caller → worker, control: the references in the answer are held
	KindLong     Kind = 26 // a request or an answer that does not fit into a message: Ref names its bytes
	KindTicket   Kind = 27 // owner → receiver: where it reads a body past the bus
)

var kindNames = map[Kind]string{
	KindCall: "call", KindAnswer: "answer", KindAsk: "ask", KindStatus: "status", KindCancel: "cancel", KindWant: "want",
	KindChunk: "chunk", KindProgress: "progress", KindDone: "done", KindGone: "gone", KindMissing: "missing",
	KindSkip: "skip", KindBeat: "beat", KindSequence: "sequence", KindVersion: "version", KindBundle: "bundle",
	KindResolve: "resolve", KindResolved: "resolved", KindHold: "hold", KindDrop: "drop", KindReport: "report", KindFree: "free",
	KindKept: "kept", KindHandOver: "hand over", KindTaken: "taken", KindLong: "long", KindTicket: "ticket",
}

func (k Kind) String() string {
	if name, ok := kindNames[k]; ok {
		return name
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

// State is the status of a call at a worker.
type State uint8

const (
	StateNone    State = 0
	StateNever   State = 1 // the call has not arrived; send it again
	StateQueued  State = 2 // the call waits in a lane
	StateRunning State = 3 // the method runs
	StateUnknown State = 4 // the call ran or may have run, and its answer is no longer kept
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

// BodyRef names a body that does not travel in its frame: the owner's session, the owner's number for it, its length.
type BodyRef struct {
	Owner string
	ID    uint64
	Len   int64
}

// ForHost is what a receiver does with a body that several processes of its host may need.
type ForHost uint8

const (
	ForItself ForHost = 0 // it pulls the body for itself
	ForAll    ForHost = 1 // it pulls the body for all, and has subscribed to the body's subject
	ByAnother ForHost = 2 // another process of the host pulls it: nothing is to be sent to this one
)

// Header is the envelope: everything about a message that is not its body. One struct serves all kinds; a zero field
// does not travel. Comments name the kinds that use a field, unless all do.
type Header struct {
	Session string // the caller's session: with Seq the call's id, and the address of answers
	Seq     uint64
	Acked   uint64 // the caller has every answer up to this sequence
	Method  string
	Object  string        // named object in the worker; empty: the worker's own
	Timeout time.Duration // remaining time; clocks of nodes are never compared. 0: no deadline
	Age     time.Duration // how long ago the call was first sent; 0 for a first sending
	Caller  string        // name of the calling program, for messages to people
	Trace   string        // W3C traceparent
	Meta    []byte        // the dispatch mode's metadata, msgpack

	Stream string         // session of the sequencer that ordered the call; empty: the caller ordered it
	Order  uint64         // the call's position among the calls of that session; 0: unordered
	Prev   uint64         // the position of the call before it for the same rank
	Prevs  map[int]uint64 // ranks with another Prev

	Some        bool    // the frame is for Ranks alone, of all subscribers of its subject
	Ranks       RankSet // when Some; want: the ranks of this process that need the body
	CollectSome bool    // only answers of Collect carry a body, the others are acknowledgements
	Collect     RankSet
	NoData      bool   // the rank is called with the metadata alone
	Inline      uint32 // the largest answer body that may travel in its frame

	Ref BodyRef // the body is elsewhere
	// Location is where the body of Ref also lies, for processes of its owner's host.
	Location Location
	Offset   uint64  // chunk, want, progress
	ForHost  ForHost // want: for whom the receiver pulls the body. call: several ranks need it (ForAll), or one

	Rank   int            // answer, status, missing: the sender
	Gen    uint32         // the generation of that rank
	Gens   map[int]uint32 // call: expected generations, where they are not 0
	Code   Code           // answer: empty, or the code of the failure; then the body is the Error. cancel: timed_out after the caller's deadline
	State  State          // status
	Queued time.Duration  // answer, status: how long the call waited
	Ran    time.Duration  // answer, status: how long it ran

	Keep       bool        // call: a large answer stays with its worker, for the caller. answer: it does
	References []Reference // answer, resolved: the references inside the body
	Arguments  []Reference // call: the arguments that are references, and are replaced by their values before the method runs
	OnDevice   bool        // call: tensors of the answer may stay on their device; the body then has extension type 6 for them
}

// Envelope keys. A number never changes its meaning and is never reused.
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
	keyLocationOwner
	keyLocationSegment
	keyLocationOffset
	keyLocationGen
	keyKeep
	keyReferences
	keyArguments
	keyOnDevice
	keyForHost
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

// HeadSize is the length of what precedes the envelope.
const HeadSize = 8

// Append encodes the frame after dst.
func (f *Frame) Append(dst []byte) []byte {
	start := len(dst)
	dst = append(dst, 'T', 'p', Major, byte(f.Kind), 0, 0, 0, 0)
	dst = f.Header.append(dst, f.Kind.fromRank())
	binary.BigEndian.PutUint32(dst[start+4:], uint32(len(dst)-start-HeadSize))
	return append(dst, f.Body...)
}

// FrameReader parses frames and interns the names in them, which repeat from frame to frame, so that a short frame is
// parsed without allocation. It belongs to one goroutine. The zero FrameReader is ready for use.
type FrameReader struct {
	names map[string]string
	last  [lastNames]string // the previous name by field, which is mostly the next one too
}

// The fields of an envelope whose names are interned.
const (
	lastSession = iota
	lastMethod
	lastObject
	lastCaller
	lastStream
	lastOwner
	lastCode
	lastLocation
	lastNames
)

const maxNames = 4096 // at this size the table of names is emptied

// Parse is ParseFrame.
func (r *FrameReader) Parse(msg []byte) (f Frame, err error) {
	err = r.ParseInto(&f, msg)
	return f, err
}

// ParseInto is ParseFrame into an existing frame. After an error the content of f is undefined.
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
		return Errorf(CodeMalformed, "not a Troupe frame: %d bytes without the magic bytes \"Tp\"", len(msg))
	}
	if msg[2] != Major {
		return Errorf(CodeVersion, "the peer uses version %d of the wire, this process version %d; run the same major version on both", msg[2], Major)
	}
	n := int64(binary.BigEndian.Uint32(msg[4:]))
	if n > int64(len(msg)-HeadSize) {
		return Errorf(CodeMalformed, "the envelope claims %d bytes of a message of %d", n, len(msg))
	}
	f.Kind, f.Body = Kind(msg[3]), msg[HeadSize+n:]
	return f.Header.parse(msg[HeadSize:HeadSize+n], r)
}

// fromRank reports whether frames of this kind carry the rank of their sender.
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
			b, n = appendString(append(b, key), v), n+1
		}
	}
	num := func(key byte, v uint64) {
		if v != 0 {
			b, n = appendUint(append(b, key), v), n+1
		}
	}
	bin := func(key byte, set bool, v []byte) {
		if set {
			b, n = appendBytes(append(b, key), v), n+1
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
		b, n = appendRankMap(append(b, keyPrevs), h.Prevs), n+1
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
		b, n = appendUint(append(b, keyRank), uint64(h.Rank)), n+1
	}
	num(keyGen, uint64(h.Gen))
	if len(h.Gens) > 0 {
		b, n = appendRankMap(append(b, keyGens), h.Gens), n+1
	}
	str(keyCode, string(h.Code))
	num(keyState, uint64(h.State))
	num(keyQueued, micros(h.Queued))
	num(keyRan, micros(h.Ran))
	b, n = h.Location.append(b, n)
	num(keyKeep, flag(h.Keep))
	b, n = appendReferenceFields(b, n, h)
	num(keyOnDevice, flag(h.OnDevice))
	num(keyForHost, uint64(h.ForHost))
	binary.BigEndian.PutUint16(b[at+1:], uint16(n))
	return b
}

// appendReferenceFields adds the lists of references to an envelope of n fields, and returns how many it has then.
func appendReferenceFields(b []byte, n int, h *Header) ([]byte, int) {
	if len(h.References) > 0 {
		b, n = AppendReferences(append(b, keyReferences), h.References), n+1
	}
	if len(h.Arguments) > 0 {
		b, n = AppendReferences(append(b, keyArguments), h.Arguments), n+1
	}
	return b, n
}

func (h *Header) parse(b []byte, r *FrameReader) error {
	e := envelopeReader{reader: reader{b: b}, names: r}
	*h = Header{}
	for n := e.mapLen(); n > 0 && !e.bad; n-- {
		h.field(&e, e.uint())
	}
	if e.notName {
		return Errorf(CodeMalformed, "a session or an owner in the envelope is no name: 1 to %d characters out of A-Z, a-z, 0-9, _ and -", MaxName)
	}
	if e.bad || len(e.b) > 0 {
		return Errorf(CodeMalformed, "the envelope is not a msgpack map with integer keys")
	}
	return nil
}

func (h *Header) field(e *envelopeReader, key uint64) {
	switch key {
	case keySession:
		h.Session = e.name(lastSession)
	case keySeq:
		h.Seq = e.uint()
	case keyAcked:
		h.Acked = e.uint()
	case keyMethod:
		h.Method = e.text(lastMethod)
	case keyObject:
		h.Object = e.text(lastObject)
	case keyTimeout:
		h.Timeout = e.micros()
	case keyAge:
		h.Age = e.micros()
	case keyCaller:
		h.Caller = e.text(lastCaller)
	case keyTrace:
		h.Trace = e.str()
	case keyMeta:
		h.Meta = e.bin()
	case keyStream:
		h.Stream = e.name(lastStream)
	case keyOrder:
		h.Order = e.uint()
	case keyPrev:
		h.Prev = e.uint()
	case keyPrevs:
		h.Prevs = readRankMap[uint64](&e.reader)
	case keyRanks:
		h.Ranks, h.Some = RankSet{bits: e.bin()}, true
	case keyCollect:
		h.Collect, h.CollectSome = RankSet{bits: e.bin()}, true
	case keyNoData:
		h.NoData = e.uint() != 0
	case keyInline:
		h.Inline = uint32(e.upTo(math.MaxUint32))
	case keyRefOwner:
		h.Ref.Owner = e.name(lastOwner)
	case keyRefID:
		h.Ref.ID = e.uint()
	case keyRefLen:
		h.Ref.Len = int64(e.uint() &^ (1 << 63))
	case keyOffset:
		h.Offset = e.uint()
	case keyRank:
		h.Rank = int(e.upTo(math.MaxInt32))
	case keyGen:
		h.Gen = uint32(e.upTo(math.MaxUint32))
	case keyGens:
		h.Gens = readRankMap[uint32](&e.reader)
	case keyCode:
		h.Code = Code(e.text(lastCode))
	case keyState:
		h.State = State(e.upTo(math.MaxUint8))
	case keyQueued:
		h.Queued = e.micros()
	case keyRan:
		h.Ran = e.micros()
	case keyLocationOwner:
		h.Location.Owner = e.name(lastLocation)
	case keyLocationSegment:
		h.Location.Segment = e.uint()
	case keyLocationOffset:
		h.Location.Offset = e.uint()
	case keyLocationGen:
		h.Location.Gen = e.uint()
	case keyKeep:
		h.Keep = e.uint() != 0
	case keyReferences:
		h.References = e.references()
	case keyArguments:
		h.Arguments = e.references()
	case keyOnDevice:
		h.OnDevice = e.uint() != 0
	case keyForHost:
		h.ForHost = ForHost(e.uint())
	default:
		e.raw() // a field that a later minor version added
	}
}

// envelopeReader reads the fields of an envelope. names may be nil.
type envelopeReader struct {
	reader
	names   *FrameReader
	notName bool // a field that has to be a name is none
}

// name reads a string that must be a name.
func (e *envelopeReader) name(field int) string {
	b := e.reader.text()
	if e.isLast(field, b) {
		return e.names.last[field]
	}
	if !IsName(b, MaxName) {
		e.notName = e.notName || !e.bad
		e.fail()
		return ""
	}
	return e.intern(field, b)
}

// text reads any string.
func (e *envelopeReader) text(field int) string {
	b := e.reader.text()
	if e.isLast(field, b) {
		return e.names.last[field]
	}
	return e.intern(field, b)
}

// isLast reports whether b is the previous string in this field.
func (e *envelopeReader) isLast(field int, b []byte) bool {
	return e.names != nil && len(b) > 0 && e.names.last[field] == string(b)
}

// intern returns b as a string that was probably read before.
func (e *envelopeReader) intern(field int, b []byte) string {
	if e.names == nil || len(b) > 2*MaxName {
		return string(b)
	}
	s, seen := e.names.names[string(b)]
	if !seen {
		s = string(b)
		e.names.names[s] = s
	}
	e.names.last[field] = s
	return s
}

func (e *envelopeReader) micros() time.Duration {
	return time.Duration(min(e.uint(), maxMicros)) * time.Microsecond
}

// micros rounds up, so that a positive duration never becomes 0.
func micros(d time.Duration) uint64 {
	if d <= 0 {
		return 0
	}
	return uint64((d + time.Microsecond - 1) / time.Microsecond)
}

const maxMicros = uint64(1<<63-1) / uint64(time.Microsecond)

func flag(set bool) uint64 {
	if set {
		return 1
	}
	return 0
}

func appendRankMap[V uint32 | uint64](b []byte, m map[int]V) []byte {
	b = appendMapHead(b, len(m))
	for r, v := range m {
		b = appendUint(appendUint(b, uint64(r)), uint64(v))
	}
	return b
}

// readRankMap allocates for the entries that it has read, never for the length that the bytes claim.
func readRankMap[V uint32 | uint64](r *reader) map[int]V {
	m := map[int]V{}
	for n := r.mapLen(); n > 0 && !r.bad; n-- {
		rank := int(r.upTo(math.MaxInt32))
		m[rank] = V(r.upTo(uint64(^V(0))))
	}
	return m
}

// Collected reports whether the answer of that rank carries a body.
func (h *Header) Collected(rank int) bool { return !h.CollectSome || h.Collect.Has(rank) }

// For reports whether the frame is for that rank, given that the rank subscribes to its subject.
func (h *Header) For(rank int) bool { return !h.Some || h.Ranks.Has(rank) }

// PrevFor is the position of the call before this one for that rank.
func (h *Header) PrevFor(rank int) uint64 {
	if p, ok := h.Prevs[rank]; ok {
		return p
	}
	return h.Prev
}

// OrderedBy is the session that gave the call its position: the sequencer's, or the caller's.
func (h *Header) OrderedBy() string {
	if h.Stream != "" {
		return h.Stream
	}
	return h.Session
}

// AppendRouted encodes a frame and the subject on which a sequencer is to publish it.
func AppendRouted(dst []byte, subject string, f *Frame) []byte {
	return appendBytes(appendString(dst, subject), f.Append(nil))
}

// ReadRouted reads the result of AppendRouted at the start of b, and returns the bytes after it.
func ReadRouted(b []byte) (subject string, f Frame, rest []byte, err error) {
	r := reader{b: b}
	subject = r.str()
	msg := r.bin()
	if r.bad {
		return "", Frame{}, nil, Errorf(CodeMalformed, "a routed frame is cut off")
	}
	f, err = ParseFrame(msg)
	return subject, f, r.b, err
}

// AppendAnswerHead appends an answer without its body. It is Frame.Append for the fields of an answer alone, without
// allocation: every rank calls it for every call.
func AppendAnswerHead(b []byte, h *Header) []byte {
	b = append(b, 'T', 'p', Major, byte(KindAnswer), 0, 0, 0, 0, 0xde, 0, 0)
	n := 2
	b = appendUint(append(b, keySeq), h.Seq)
	if h.Ref.Owner != "" {
		b = appendString(append(b, keyRefOwner), h.Ref.Owner)
		b = appendUint(append(b, keyRefID), h.Ref.ID)
		b = appendUint(append(b, keyRefLen), uint64(h.Ref.Len))
		n += 3
	}
	b = appendUint(append(b, keyRank), uint64(h.Rank))
	num := func(key byte, v uint64) {
		if v != 0 {
			b, n = appendUint(append(b, key), v), n+1
		}
	}
	num(keyGen, uint64(h.Gen))
	if h.Code != "" {
		b, n = appendString(append(b, keyCode), string(h.Code)), n+1
	}
	num(keyQueued, micros(h.Queued))
	num(keyRan, micros(h.Ran))
	b, n = h.Location.append(b, n)
	num(keyKeep, flag(h.Keep))
	b, n = appendReferenceFields(b, n, h)
	b[HeadSize+2] = byte(n)
	binary.BigEndian.PutUint32(b[4:], uint32(len(b)-HeadSize))
	return b
}
