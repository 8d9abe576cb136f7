package recorder

import (
	"maps"
	"math/bits"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
)

const (
	defaultSize = 8192
	maxSize     = 1 << 20
	shards      = 8
	callsFactor = 4 // size of a shard of calls, in shards of rare records: a processor alone fills one of them, not all eight
)

// Recorder is two rings of records, each in a few shards. Calls, parts and runs are frequent: their ring has entries without pointers. All
// other records, and those with texts that have no number, are in a ring that is allocated with its first record. A writer takes a shard
// whose lock is free, of calls the one that its processor prefers, and drops its record when none is: it never waits. A reader locks one
// shard at a time.
type Recorder struct {
	size    int // of a shard of rare records, a power of two
	texts   *interner
	dropped atomic.Uint64
	calls   [shards]shard[Entry]
	other   [shards]shard[Record]
}

// shard is a ring.
type shard[T any] struct {
	mu   sync.Mutex
	ring []T
	next uint64   // number of records written so far
	_    [64]byte // the locks of two shards are in different cache lines
}

// Entry is a record of a call, a part or a run, with its texts by number; see Record. It has the size of a cache line: a ring is written in
// order, and its lines are rarely in a cache.
type Entry struct {
	Begin, End, Queued         int64
	CallSeq, ParentSeq         uint64
	Rank, ToRank               int32
	Namespace, Role, Name, To  Text
	CallSession, ParentSession Text
	Kind                       Kind
	Failed                     bool
}

// numbered reports whether all texts have a number.
func (e *Entry) numbered() bool {
	return max(e.Namespace, e.Role, e.Name, e.To, e.CallSession, e.ParentSession) != noText
}

// New is a recorder of at least size rare records, and at least half as many calls, parts and runs of each processor.
func New(size int) *Recorder {
	r := &Recorder{size: 1 << bits.Len(uint(max(size-1, 0)/shards)), texts: newInterner()}
	for i := range r.calls {
		r.calls[i].ring = make([]Entry, callsFactor*r.size) // takes no memory before it is used
	}
	return r
}

// Add records a copy of rec. It does not block, and allocates only for the first record of the ring of rare records and for a new text.
func (r *Recorder) Add(rec *Record) {
	if rec.Kind <= Run {
		e := Entry{
			Begin: rec.Begin, End: rec.End, Queued: rec.Queued, CallSeq: rec.Call.Seq, ParentSeq: rec.Parent.Seq,
			Rank: rec.Rank, ToRank: rec.ToRank, Kind: rec.Kind, Failed: rec.Failed,
			Namespace: r.texts.number(rec.Namespace), Role: r.texts.number(rec.Role), Name: r.texts.number(rec.Name), To: r.texts.number(rec.To),
			CallSession: r.texts.number(rec.Call.Session), ParentSession: r.texts.number(rec.Parent.Session),
		}
		if e.numbered() {
			r.AddEntry(&e)
			return
		}
	}
	if s := lockOne(&r.other, rand.Uint32()); s != nil {
		if s.ring == nil {
			s.ring = make([]Record, r.size)
		}
		*s.slot() = *rec
		s.mu.Unlock()
		return
	}
	r.dropped.Add(1)
}

// AddEntry records a copy of an Entry whose texts are numbered. It neither blocks nor allocates.
func (r *Recorder) AddEntry(e *Entry) {
	if s := lockOne(&r.calls, preferredShard()); s != nil {
		*s.slot() = *e
		s.mu.Unlock()
		return
	}
	r.dropped.Add(1)
}

// addEntries records copies of entries.
func (r *Recorder) addEntries(all []Entry) {
	s := lockOne(&r.calls, preferredShard())
	if s == nil {
		r.dropped.Add(uint64(len(all)))
		return
	}
	for i := range all {
		*s.slot() = all[i]
	}
	s.mu.Unlock()
}

// preferred is the shard of calls that each processor prefers: a pool keeps a number for each. What one processor writes stays in its cache;
// with a shard at random, a record costs five times as much on two processors (BenchmarkAddEntryParallel).
var (
	preferred     = sync.Pool{New: func() any { n := lastPreferred.Add(1); return &n }}
	lastPreferred atomic.Uint32
)

func preferredShard() uint32 {
	own := preferred.Get().(*uint32)
	at := *own
	preferred.Put(own)
	return at
}

// lockOne locks a shard that is free, from the given one on; nil: none is.
func lockOne[T any](all *[shards]shard[T], at uint32) *shard[T] {
	for i := range uint32(shards) {
		if s := &all[(at+i)%shards]; s.mu.TryLock() {
			return s
		}
	}
	return nil
}

// slot is where the next record goes. The shard is locked.
func (s *shard[T]) slot() *T {
	at := &s.ring[s.next&uint64(len(s.ring)-1)]
	s.next++
	return at
}

// records are copies of the records that keep accepts, in no order. oldest is the end of the oldest record of the shards that have
// overwritten records; 0 if nothing was overwritten.
func (r *Recorder) records(keep func(*Record) bool) (out []Record, oldest int64) {
	add := func(rec *Record) {
		if keep(rec) {
			out = append(out, *rec)
		}
	}
	for i := range r.calls {
		oldest = max(oldest, r.readCalls(&r.calls[i], add))
	}
	for i := range r.other {
		oldest = max(oldest, readShard(&r.other[i], add, func(rec *Record) int64 { return rec.End }))
	}
	return out, oldest
}

func (r *Recorder) readCalls(s *shard[Entry], add func(*Record)) (oldest int64) {
	var copied []Entry
	oldest = readShard(s, func(e *Entry) { copied = append(copied, *e) }, func(e *Entry) int64 { return e.End })
	texts := r.texts.all() // after the entries: it has all of their texts
	for i := range copied {
		e := &copied[i]
		rec := Record{
			Kind: e.Kind, Failed: e.Failed, Rank: e.Rank, ToRank: e.ToRank, Begin: e.Begin, End: e.End, Queued: e.Queued,
			Namespace: texts[e.Namespace], Role: texts[e.Role], Name: texts[e.Name], To: texts[e.To],
			Call: ID{texts[e.CallSession], e.CallSeq}, Parent: ID{texts[e.ParentSession], e.ParentSeq},
		}
		add(&rec)
	}
	return oldest
}

// readShard calls add with every record while the shard is locked, and returns the end of the oldest if others were overwritten.
func readShard[T any](s *shard[T], add func(*T), end func(*T) int64) (oldest int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := min(s.next, uint64(len(s.ring)))
	for j := range n {
		add(&s.ring[j])
	}
	if s.next > n {
		oldest = end(&s.ring[s.next&uint64(len(s.ring)-1)])
	}
	return oldest
}

// process is the recorder of this process; nil: off.
var process = newProcess(os.Getenv("TROUPE_RECORDER"))

func newProcess(setting string) *Recorder {
	size, err := strconv.Atoi(setting)
	switch {
	case setting == "" || err != nil || size < 0:
		size = defaultSize
	case size == 1:
		size = defaultSize // "on"
	}
	if size == 0 {
		return nil
	}
	return New(min(size, maxSize))
}

// On reports whether the process records.
func On() bool { return process != nil }

// Add adds a record to a ring of the process; see Recorder.Add.
func Add(rec *Record) {
	if process != nil {
		process.Add(rec)
	}
}

// TextOf is the number of a text for entries of this process. Values that live long keep it.
func TextOf(s string) Text {
	if process == nil {
		return 0
	}
	return process.texts.number(s)
}

// AddEntry adds an entry to the ring of the process. False: a text of it has no number, and Add must be used.
func AddEntry(e *Entry) bool {
	if process == nil {
		return true
	}
	if !e.numbered() {
		return false
	}
	process.AddEntry(e)
	return true
}

var (
	sourcesMu sync.Mutex
	sources   = map[*Source]struct{}{}
)

// Source is what a snapshot has beside the rings. Its functions must not block for long.
type Source struct {
	OpenFunc  func(namespace string, add func(Record)) // reports intervals of a namespace that have begun and not ended, to add
	FlushFunc func()                                   // flushes the batches of the source; nil: it has none
}

// Register adds a source to all snapshots of this process until remove is called.
func Register(s Source) (remove func()) {
	sourcesMu.Lock()
	defer sourcesMu.Unlock()
	key := &s
	sources[key] = struct{}{}
	return func() {
		sourcesMu.Lock()
		defer sourcesMu.Unlock()
		delete(sources, key)
	}
}

func allSources() []*Source {
	sourcesMu.Lock()
	defer sourcesMu.Unlock()
	return slices.Collect(maps.Keys(sources))
}
