package recorder

import "time"

// Kind is what a record is about. A number never changes its meaning: snapshots are stored.
type Kind uint8

const (
	Call     Kind = 1 // a call as its caller sees it: from the publication until it is over
	Part     Kind = 2 // one rank's part of a call of several ranks: from the publication until the rank's answer
	Run      Kind = 3 // a call as its worker sees it: the run of the method, after Queued
	Upload   Kind = 4 // a large body that this process sends
	Download Kind = 5 // a large body that this process receives
	Restart  Kind = 6 // a restart of workers, in the process that carries it out
	Span     Kind = 7 // a section of a program, marked by its author
)

var kindNames = map[Kind]string{Call: "call", Part: "part", Run: "run", Upload: "upload", Download: "download", Restart: "restart", Span: "span"}

func (k Kind) String() string {
	if name, ok := kindNames[k]; ok {
		return name
	}
	return "unknown"
}

// ID names a call: the caller's session and its sequence. The zero ID names none.
type ID struct {
	Session string
	Seq     uint64
}

// Record is one interval. Times are those of Now, in nanoseconds.
type Record struct {
	Kind   Kind
	Open   bool // it has not ended; End is the time of the snapshot
	Failed bool
	Rank   int32 // of Role; -1: the record belongs to the process, not to a worker
	ToRank int32 // call, part: the called rank; -1: several

	Begin  int64
	End    int64
	Queued int64 // run: how long the call waited before Begin
	Bytes  int64 // upload, download

	Namespace string
	Role      string // of the worker that the record belongs to; empty: the process
	Name      string // method, span, or reason of a restart
	To        string // call, part, restart: the role

	Call   ID // call, part, run: the call; span: none
	Parent ID // the call in whose method it happened

	// Trace and ParentSpan are set for an exporter alone, and are not part of snapshots.
	Trace      Trace
	ParentSpan [8]byte
}

// Scope is the worker and the call in whose method code runs. The zero Scope, with Rank -1, is code outside of a method.
type Scope struct {
	Namespace string
	Role      string
	Rank      int
	Call      ID
	Trace     Trace // the span that is the parent of what happens here: of the run where records are exported, else of the call; zero: there is none
}

// Outside is the Scope of code outside of a method.
var Outside = Scope{Rank: -1}

// ScopeKey is the context key under which a context of a method gives its Scoper.
type ScopeKey struct{}

// Scoper is a context value that knows its Scope.
type Scoper interface{ RecorderScope() Scope }

// valuer is the part of context.Context that ScopeOf needs.
type valuer interface{ Value(key any) any }

// ScopeOf is the Scope of a context.
func ScopeOf(ctx valuer) Scope {
	if s, ok := ctx.Value(ScopeKey{}).(Scoper); ok {
		return s.RecorderScope()
	}
	return Outside
}

var clockStart = time.Now()

// Now is the time on the monotonic clock of this process, since its start.
func Now() int64 { return int64(time.Since(clockStart)) } // the wall clock is not read, which halves its cost

// At converts a time of time.Now.
func At(t time.Time) int64 { return int64(t.Sub(clockStart)) }
