package recorder

import (
	"encoding/hex"
	"hash/fnv"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync/atomic"
)

// exporter receives records as they end; nil: there is none.
var exporter atomic.Pointer[func(Record)]

// Export has every record passed to take as it ends, beside the ring; nil ends it. take must not block. While it is set, calls have trace
// contexts of their own.
func Export(take func(Record)) {
	if take == nil {
		exporter.Store(nil)
		return
	}
	exporter.Store(&take)
}

// Exporting reports whether records are exported.
func Exporting() bool { return exporter.Load() != nil }

// ExportRecord passes a record to the exporter.
func ExportRecord(r Record) {
	if take := exporter.Load(); take != nil {
		(*take)(r)
	}
}

// Trace is a W3C trace context: the trace and one span of it. The zero Trace is none.
type Trace struct {
	ID      [16]byte
	Span    [8]byte
	Sampled bool
}

// IsZero reports whether it is none.
func (t Trace) IsZero() bool { return t.ID == [16]byte{} }

// ParseTrace reads a traceparent; anything else is the zero Trace.
func ParseTrace(s string) (t Trace) {
	parts := strings.Split(s, "-")
	if len(parts) < 4 || len(parts[0]) != 2 || parts[0] == "ff" || len(parts[1]) != 32 || len(parts[2]) != 16 || len(parts[3]) != 2 {
		return Trace{}
	}
	flags, err := strconv.ParseUint(parts[3], 16, 8)
	_, errID := hex.Decode(t.ID[:], []byte(parts[1]))
	_, errSpan := hex.Decode(t.Span[:], []byte(parts[2]))
	if err != nil || errID != nil || errSpan != nil || t.Span == [8]byte{} {
		return Trace{}
	}
	t.Sampled = flags&1 != 0
	return t
}

// String is the traceparent.
func (t Trace) String() string {
	if t.IsZero() {
		return ""
	}
	flags := "-00"
	if t.Sampled {
		flags = "-01"
	}
	return "00-" + hex.EncodeToString(t.ID[:]) + "-" + hex.EncodeToString(t.Span[:]) + flags
}

// Child is a new span of the trace, or of a new trace if t is zero.
func (t Trace) Child() Trace {
	if t.IsZero() {
		t.Sampled = true
		for !t.hasID() {
			putRandom(t.ID[:8])
			putRandom(t.ID[8:])
		}
	}
	t.Span = [8]byte{}
	for t.Span == [8]byte{} {
		putRandom(t.Span[:])
	}
	return t
}

func (t Trace) hasID() bool { return t.ID != [16]byte{} }

func putRandom(b []byte) {
	n := rand.Uint64()
	for i := range b {
		b[i] = byte(n >> (8 * i))
	}
}

// RunTrace is the span of a rank's run of a call, whose traceparent the call's frame has. It is the same whenever it is asked for. In a
// process that exports nothing the run is no span: it is that of the call.
func RunTrace(traceparent string, call ID, role string, rank int) Trace {
	if traceparent == "" {
		return Trace{}
	}
	t := ParseTrace(traceparent)
	if t.IsZero() || !Exporting() {
		return t
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(call.Session + "/" + strconv.FormatUint(call.Seq, 10) + "/" + role + "/" + strconv.Itoa(rank))) // it never fails
	copy(t.Span[:], h.Sum(nil))
	return t
}
