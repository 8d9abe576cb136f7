package flow

import (
	"troupe/pipeline/spec"
)

// entry is an item in memory that lies in the log.
type Entry struct {
	spec.Item
	Lane    *Lane
	Ordinal uint64 // its number in the lane, from 1
	Seq     uint64 // where it lies in the log; 0 until it is known to
	aborted bool   // while it waited

	Retries  *RetryState  // what has gone wrong with it, as the log has it; nil: nothing
	BodyRef  *PendingBody // where its body lies, if that is apart
	BodySize int          // of a body that is not in memory yet
}

// weight is what an item counts against bounds in bytes. It must not change while the item is stored: its id may.
func Weight(it *spec.Item) int64 { return weightWith(it, len(it.Body)) }

func weightWith(it *spec.Item, body int) int64 {
	return int64(body + len(it.Key) + len(it.Group) + 128)
}

// lane is one stream at one priority: a numbered row of items. Its beginning is in memory, up to a window; the rest, if
// there is more, is only in the log until there is room.
//
//	1 … floor     floor+1 … loaded            loaded+1 … visible     … head
//	done          ready, in hand or done      only in the log        being committed
type Lane struct {
	stream   *StreamState
	Priority int
	Bodies   *BodyStream

	head        uint64 // the last number given
	visible     uint64 // the last number known to be in the log
	loaded      uint64 // the last number that has been in memory
	lastSeq     uint64 // where that one lies; reading goes on behind it
	done        OrdinalSet
	retries     map[uint64]*RetryState // of items that are not in memory yet, from before the start
	suspectUpTo uint64                 // up to here, they were there when the engine before this one was killed

	ready          fifo[*Entry]
	readyBytes     int64
	loading        bool
	firstUnread    bool             // it was taken over with items, and the first that is not done has not been read
	blockedScan    uint64           // the scan of the queue that found a change with new items of this lane which cannot be stored yet,
	endedScan      uint64           // and the one that found a change of an ordered stage which ends items of it
	committedFloor uint64           // the floor as the log has it; done may be ahead of it by what is being committed
	purgePoints    fifo[PurgePoint] // where numbers lie in the log, for letting go of what is done
	completed      fifo[CompletedItem]
	completedBytes int64
}

type PurgePoint struct{ ordinal, Seq, BodySeq uint64 }

// stray is an item that is done, and in the log, above the floor of its lane.
type CompletedItem struct {
	ordinal, Seq uint64
	Body         SeqRanges // of its body, if that is apart
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

// room is how many more items may come into memory.
func (l *Lane) room(w memoryWindow) int {
	if l.readyBytes >= w.bytes {
		return 0
	}
	return w.items - l.ready.len()
}

// appear takes a new item that is in the log now. While more lies in the log than in memory, it stays there.
func (l *Lane) committed(e *Entry, w memoryWindow) {
	l.visible = e.Ordinal
	if l.loading || l.loaded != e.Ordinal-1 || l.room(w) <= 0 {
		return
	}
	l.loaded, l.lastSeq = e.Ordinal, e.Seq
	l.push(e)
}

// want is what should be read from the log now, if anything.
func (l *Lane) nextRead(w memoryWindow) (from, to uint64, ok bool) {
	room := l.room(w)
	if l.loading || l.loaded >= l.visible || room < w.items/2 || l.readyBytes > w.bytes/2 {
		return 0, 0, false
	}
	return l.loaded + 1, min(l.visible, l.loaded+uint64(min(room, maxRead))), true
}

// loaded is what was read of a lane.
type ReadResult struct {
	Entries   []*Entry
	Completed []CompletedItem // items that are done and lie in the log all the same
	UpTo      uint64          // all up to this number that is not done is among the entries
	LastSeq   uint64          // where the last of them lies
}

// arrived takes what was read. It reports whether there is something to let go of: an engine that was killed may have left what
// is done, and a server that was killed may have brought it back.
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

// beforeFirst is the mark of what lies before the first items of a lane that are not done, and before their bodies.
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

// passed is up to where in the log, and among the bodies, everything is done; zero: nothing new.
func (l *Lane) TakePurgePoint() (m PurgePoint) {
	for l.purgePoints.len() > 0 && l.purgePoints.front().ordinal <= l.committedFloor {
		next, _ := l.purgePoints.pop()
		m.Seq, m.BodySeq = next.Seq, max(m.BodySeq, next.BodySeq)
	}
	return m
}

// maxStrays is how many items may be done above the floor before they are let go of one by one, and maxStrayBytes how
// large: an item that takes an hour must not keep all on disk that has passed it.
const (
	maxCompleted      = 8192
	maxCompletedBytes = 32 << 20
)

// passedBy are items to let go of one by one, because one before them takes long.
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

// strayOf is an item as a stray. Its body may not be in memory, and has so many bytes.
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

// maxLoad is how much is read at a time.
const maxRead = 1024

// window bounds what of a lane is in memory, ready to be handed out.
type memoryWindow struct {
	items int
	bytes int64
}

var defaultWindow = memoryWindow{items: 4096, bytes: 32 << 20}

// name is the stream's.
func (l *Lane) StreamName() string { return l.stream.spec.Name }

// isDone says that an item is dealt with.
func (l *Lane) IsDone(n uint64) bool { return l.done.Contains(n) }

// restoreTries takes in what the log says has gone wrong with an item.
func (l *Lane) RestoreRetries(n uint64, t *RetryState) { l.retries[n] = t }

// addMark notes that all items up to the newest lie up to there in the log, and their bodies in the shelf.
func (l *Lane) AddPurgePoint(seq, body uint64) { l.purgePoints.push(PurgePoint{l.head, seq, body}) }
