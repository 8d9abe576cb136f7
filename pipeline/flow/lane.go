package flow

import (
	"troupe/pipeline/spec"
)

// Entry is an item in memory that is in the log or about to be committed.
type Entry struct {
	spec.Item
	Lane    *Lane
	Ordinal uint64 // number in its lane, from 1
	Seq     uint64 // sequence in the log; 0: not committed
	aborted bool   // aborted while it waited

	Retries  *RetryState  // as stored in the log; nil: no failed attempt
	BodyRef  *PendingBody // location of a large body; nil: the body is in the item's message
	BodySize int          // size of a large body that is not in memory
}

// Weight is what an item counts against bounds in bytes. It leaves out the id, which may be set after the item is
// counted.
func Weight(it *spec.Item) int64 { return weightWith(it, len(it.Body)) }

func weightWith(it *spec.Item, body int) int64 {
	return int64(body + len(it.Key) + len(it.Group) + 128)
}

// Lane is the part of a stream with one priority. Items have ordinals from 1. The first ones are in memory, up to a
// window; the rest is only in the log until there is room.
//
//	1 … floor     floor+1 … loaded             loaded+1 … visible     … head
//	completed     ready, running or completed  only in the log        being committed
type Lane struct {
	stream   *StreamState
	Priority int
	Bodies   *BodyStream

	head        uint64 // last ordinal assigned
	visible     uint64 // last ordinal known to be committed
	loaded      uint64 // last ordinal that has been in memory
	lastSeq     uint64 // sequence of that item; reads start after it
	done        OrdinalSet
	retries     map[uint64]*RetryState // of items that are not in memory yet, from before the start
	suspectUpTo uint64                 // items up to this ordinal existed when the previous engine was killed

	ready          fifo[*Entry]
	readyBytes     int64
	loading        bool
	firstUnread    bool             // the lane was restored with items, and the first one that is not completed has not been read
	blockedScan    uint64           // last scan that found a blocked change with new items of this lane
	endedScan      uint64           // last scan that found a blocked change that completes items of this lane in order
	committedFloor uint64           // floor in the last committed checkpoint; done may be ahead of it
	purgePoints    fifo[PurgePoint] // which sequences may be purged once the floor reaches an ordinal
	completed      fifo[CompletedItem]
	completedBytes int64
}

type PurgePoint struct{ ordinal, Seq, BodySeq uint64 }

// CompletedItem is an item above the floor of its lane that is completed and still in the log.
type CompletedItem struct {
	ordinal, Seq uint64
	Body         SeqRanges // sequences of a large body
	weight       int64
}

func (l *Lane) push(e *Entry) {
	l.ready.push(e)
	l.readyBytes += Weight(&e.Item)
}

func (l *Lane) pop() (*Entry, bool) {
	e, ok := l.ready.pop()
	if ok {
		l.readyBytes -= Weight(&e.Item)
	}
	return e, ok
}

// room is how many more items may be loaded into memory.
func (l *Lane) room(w memoryWindow) int {
	if l.readyBytes >= w.bytes {
		return 0
	}
	return w.items - l.ready.len()
}

// committed makes a newly committed item ready. While older items are only in the log, it stays there too.
func (l *Lane) committed(e *Entry, w memoryWindow) {
	l.visible = e.Ordinal
	if l.loading || l.loaded != e.Ordinal-1 || l.room(w) <= 0 {
		return
	}
	l.loaded, l.lastSeq = e.Ordinal, e.Seq
	l.push(e)
}

// nextRead returns the range of ordinals to read from the log now, if any.
func (l *Lane) nextRead(w memoryWindow) (from, to uint64, ok bool) {
	room := l.room(w)
	if l.loading || l.loaded >= l.visible || room < w.items/2 || l.readyBytes > w.bytes/2 {
		return 0, 0, false
	}
	return l.loaded + 1, min(l.visible, l.loaded+uint64(min(room, maxRead))), true
}

// ReadResult is what was read of a lane.
type ReadResult struct {
	Entries   []*Entry
	Completed []CompletedItem // completed items that are still in the log
	UpTo      uint64          // Entries has every item up to this ordinal that is not completed
	LastSeq   uint64          // sequence of the last item read
}

// ReadDone takes what was read. It reports whether messages can be purged: a killed engine may have left completed
// items in the log, and a killed server may have restored some.
func (l *Lane) ReadDone(got ReadResult) bool {
	l.loading = false
	first := len(got.Entries) > 0 && l.firstUnread
	for _, e := range got.Entries {
		if e.Ordinal > l.loaded && e.Ordinal <= got.UpTo && !l.done.Contains(e.Ordinal) {
			e.Retries = l.retries[e.Ordinal]
			delete(l.retries, e.Ordinal)
			l.push(e)
		}
	}
	l.loaded, l.lastSeq = got.UpTo, max(l.lastSeq, got.LastSeq)
	for _, s := range got.Completed {
		if s.ordinal > l.committedFloor {
			l.addCompleted(s)
		}
	}
	if first {
		l.firstUnread = false
		l.purgePoints.pushFront(purgePointBefore(got.Entries))
	}
	return first || len(got.Completed) > 0
}

// purgePointBefore is the purge point before the first items of a lane that are not completed, and before their bodies.
func purgePointBefore(entries []*Entry) PurgePoint {
	m := PurgePoint{Seq: entries[0].Seq - 1}
	for _, e := range entries {
		if e.BodyRef != nil {
			m.BodySeq = e.BodyRef.Seqs[0][0] - 1
			break
		}
	}
	return m
}

// TakePurgePoint returns the highest purge point that the committed floor has reached; zero: none new.
func (l *Lane) TakePurgePoint() (m PurgePoint) {
	for l.purgePoints.len() > 0 && l.purgePoints.front().ordinal <= l.committedFloor {
		next, _ := l.purgePoints.pop()
		m.Seq, m.BodySeq = next.Seq, max(m.BodySeq, next.BodySeq)
	}
	return m
}

// maxCompleted and maxCompletedBytes bound the completed items above the floor. Beyond them, items are deleted one by
// one: one item that takes an hour must not keep all later items on disk.
const (
	maxCompleted      = 8192
	maxCompletedBytes = 32 << 20
)

// TakeCompleted returns items to delete one by one, because an older item is still running.
func (l *Lane) TakeCompleted() (out []CompletedItem) {
	for l.completed.len() > 0 && l.completed.front().ordinal <= l.committedFloor {
		l.popCompleted()
	}
	if l.completed.len() <= maxCompleted && l.completedBytes <= maxCompletedBytes {
		return nil
	}
	for l.completed.len() > 3*maxCompleted/4 || l.completedBytes > maxCompletedBytes/2 {
		if s := l.popCompleted(); s.ordinal > l.committedFloor {
			out = append(out, s)
		}
	}
	return out
}

func (l *Lane) pushCompleted(e *Entry) {
	l.addCompleted(NewCompletedItem(e, len(e.Body)))
}

func (l *Lane) addCompleted(s CompletedItem) {
	l.completed.push(s)
	l.completedBytes += s.weight
}

// NewCompletedItem makes a CompletedItem of an entry whose body has size bytes and may not be in memory.
func NewCompletedItem(e *Entry, size int) CompletedItem {
	s := CompletedItem{ordinal: e.Ordinal, Seq: e.Seq, weight: weightWith(&e.Item, size)}
	if e.BodyRef != nil {
		s.Body = e.BodyRef.Seqs
	}
	return s
}

func (l *Lane) popCompleted() CompletedItem {
	s, _ := l.completed.pop()
	l.completedBytes -= s.weight
	return s
}

// maxRead bounds the items of one read.
const maxRead = 1024

// memoryWindow bounds the ready items of a lane in memory.
type memoryWindow struct {
	items int
	bytes int64
}

var defaultWindow = memoryWindow{items: 4096, bytes: 32 << 20}

// StreamName is the name of the lane's stream.
func (l *Lane) StreamName() string { return l.stream.spec.Name }

// IsDone reports whether an item is completed.
func (l *Lane) IsDone(n uint64) bool { return l.done.Contains(n) }

// RestoreRetries sets the retry state of an item, as read from the log.
func (l *Lane) RestoreRetries(n uint64, t *RetryState) { l.retries[n] = t }

// AddPurgePoint notes that all items assigned so far are at or before this sequence, and their bodies at or before
// body.
func (l *Lane) AddPurgePoint(seq, body uint64) { l.purgePoints.push(PurgePoint{l.head, seq, body}) }
