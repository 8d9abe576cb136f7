package recorder

import (
	"os"
	"strconv"
	"sync"
	"sync/atomic"

	"troupe/internal/ab"
)

const (
	defaultSize = 8192
	maxSize     = 1 << 20
	shards      = 4
)

// Recorder is a ring of records in a few shards. A writer takes the first shard whose lock is free, and drops its record when
// none is: it never waits. A reader locks one shard at a time.
type Recorder struct {
	cursor  atomic.Uint32 // spreads writers over the shards
	dropped atomic.Uint64
	shards  [shards]shard
}

type shard struct {
	mu      sync.Mutex
	records []Record
	next    uint64 // number of records written so far
	_       [24]byte
}

// New is a recorder of at least size records.
func New(size int) *Recorder {
	r := &Recorder{}
	for i := range r.shards {
		r.shards[i].records = make([]Record, (size+shards-1)/shards)
	}
	return r
}

// Add records a copy of rec. It neither blocks nor allocates.
func (r *Recorder) Add(rec *Record) {
	at := r.cursor.Add(1)
	for i := range uint32(shards) {
		s := &r.shards[(at+i)%shards]
		if s.mu.TryLock() {
			s.records[s.next%uint64(len(s.records))] = *rec
			s.next++
			s.mu.Unlock()
			return
		}
	}
	r.dropped.Add(1)
}

// records are copies of the records that keep accepts, in no order. oldest is the end of the oldest record of the ring, or of the
// oldest shard that has overwritten records; 0 if nothing was overwritten.
func (r *Recorder) records(keep func(*Record) bool) (out []Record, oldest int64) {
	for i := range r.shards {
		s := &r.shards[i]
		s.mu.Lock()
		n := min(s.next, uint64(len(s.records)))
		for j := range n {
			if rec := &s.records[j]; keep(rec) {
				out = append(out, *rec)
			}
		}
		if s.next > n {
			oldest = max(oldest, s.records[s.next%uint64(len(s.records))].End)
		}
		s.mu.Unlock()
	}
	return out, oldest
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
	if size == 0 || !ab.On(ab.Recorder) {
		return nil
	}
	return New(min(size, maxSize))
}

// On reports whether the process records.
func On() bool { return process != nil }

// Add adds a record to the process's ring. It neither blocks nor allocates.
func Add(rec *Record) {
	if process != nil {
		process.Add(rec)
	}
}

// sources report what has begun and not ended.
var (
	sourcesMu sync.Mutex
	sources   = map[*Source]struct{}{}
)

// Source reports intervals that have begun and not ended, as open records of one namespace, to add. It must not block for long.
type Source func(namespace string, add func(Record))

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

func openRecords(namespace string, add func(Record)) {
	sourcesMu.Lock()
	all := make([]Source, 0, len(sources))
	for s := range sources {
		all = append(all, *s)
	}
	sourcesMu.Unlock()
	for _, s := range all {
		s(namespace, add)
	}
}
