package pipeline

// entry is an item in memory that lies in the log.
type entry struct {
	Item
	lane    *lane
	n       uint64 // its number in the lane, from 1
	seq     uint64 // where it lies in the log; 0 until it is known to
	aborted bool   // while it waited

	tries *tries // what has gone wrong with it, as the log has it; nil: nothing
	stash *stash // where its body lies, if that is apart
	size  int    // of a body that is not in memory yet
}

// weight is what an item counts against bounds in bytes. It must not change while the item is stored: its id may.
func weight(it *Item) int64 { return weigh(it, len(it.Body)) }

func weigh(it *Item, body int) int64 { return int64(body + len(it.Key) + len(it.Group) + 128) }

// lane is one stream at one priority: a numbered row of items. Its beginning is in memory, up to a window; the rest, if
// there is more, is only in the log until there is room.
//
//	1 … floor     floor+1 … loaded            loaded+1 … visible     … head
//	done          ready, in hand or done      only in the log        being committed
type lane struct {
	stream   *stream
	priority int
	shelf    *shelf

	head    uint64 // the last number given
	visible uint64 // the last number known to be in the log
	loaded  uint64 // the last number that has been in memory
	lastSeq uint64 // where that one lies; reading goes on behind it
	done    ordinals
	tried   map[uint64]*tries // of items that are not in memory yet, from before the start
	suspect uint64            // up to here, they were there when the engine before this one was killed

	ready      fifo[*entry]
	readyBytes int64
	loading    bool
	unread     bool       // it was taken over with items, and the first that is not done has not been read
	waits      uint64     // the scan of the queue that found a change with new items of this lane which cannot be stored yet,
	ends       uint64     // and the one that found a change of an ordered stage which ends items of it
	settled    uint64     // the floor as the log has it; done may be ahead of it by what is being committed
	marks      fifo[mark] // where numbers lie in the log, for letting go of what is done
	strays     fifo[stray]
	strayBytes int64
}

type mark struct{ n, seq, body uint64 }

// stray is an item that is done, and in the log, above the floor of its lane.
type stray struct {
	n, seq uint64
	at     place // of its body, if that is apart
	weight int64
}

func (l *lane) push(e *entry) {
	l.ready.push(e)
	l.readyBytes += weight(&e.Item)
}

func (l *lane) pop() (*entry, bool) {
	e, ok := l.ready.pop()
	if ok {
		l.readyBytes -= weight(&e.Item)
	}
	return e, ok
}

// room is how many more items may come into memory.
func (l *lane) room(w window) int {
	if l.readyBytes >= w.bytes {
		return 0
	}
	return w.items - l.ready.len()
}

// appear takes a new item that is in the log now. While more lies in the log than in memory, it stays there.
func (l *lane) appear(e *entry, w window) {
	l.visible = e.n
	if l.loading || l.loaded != e.n-1 || l.room(w) <= 0 {
		return
	}
	l.loaded, l.lastSeq = e.n, e.seq
	l.push(e)
}

// want is what should be read from the log now, if anything.
func (l *lane) want(w window) (from, to uint64, ok bool) {
	room := l.room(w)
	if l.loading || l.loaded >= l.visible || room < w.items/2 || l.readyBytes > w.bytes/2 {
		return 0, 0, false
	}
	return l.loaded + 1, min(l.visible, l.loaded+uint64(min(room, maxLoad))), true
}

// loaded is what was read of a lane.
type loaded struct {
	entries []*entry
	passed  []stray // items that are done and lie in the log all the same
	upTo    uint64  // all up to this number that is not done is among the entries
	last    uint64  // where the last of them lies
}

// arrived takes what was read. It reports whether there is something to let go of: an engine that was killed may have left what
// is done, and a server that was killed may have brought it back.
func (l *lane) arrived(got loaded) bool {
	l.loading = false
	first := len(got.entries) > 0 && l.unread
	for _, e := range got.entries {
		if e.n > l.loaded && e.n <= got.upTo && !l.done.has(e.n) {
			e.tries = l.tried[e.n]
			delete(l.tried, e.n)
			l.push(e)
		}
	}
	l.loaded, l.lastSeq = got.upTo, max(l.lastSeq, got.last)
	for _, s := range got.passed {
		if s.n > l.settled {
			l.addStray(s)
		}
	}
	if first {
		l.unread = false
		l.marks.pushFront(beforeFirst(got.entries))
	}
	return first || len(got.passed) > 0
}

// beforeFirst is the mark of what lies before the first items of a lane that are not done, and before their bodies.
func beforeFirst(entries []*entry) mark {
	m := mark{seq: entries[0].seq - 1}
	for _, e := range entries {
		if e.stash != nil {
			m.body = e.stash.at[0][0] - 1
			break
		}
	}
	return m
}

// passed is up to where in the log, and among the bodies, everything is done; zero: nothing new.
func (l *lane) passed() (m mark) {
	for l.marks.len() > 0 && l.marks.front().n <= l.settled {
		next, _ := l.marks.pop()
		m.seq, m.body = next.seq, max(m.body, next.body)
	}
	return m
}

// maxStrays is how many items may be done above the floor before they are let go of one by one, and maxStrayBytes how
// large: an item that takes an hour must not keep all on disk that has passed it.
const (
	maxStrays     = 8192
	maxStrayBytes = 32 << 20
)

// passedBy are items to let go of one by one, because one before them takes long.
func (l *lane) passedBy() (out []stray) {
	for l.strays.len() > 0 && l.strays.front().n <= l.settled {
		l.popStray()
	}
	if l.strays.len() <= maxStrays && l.strayBytes <= maxStrayBytes {
		return nil
	}
	for l.strays.len() > 3*maxStrays/4 || l.strayBytes > maxStrayBytes/2 {
		if s := l.popStray(); s.n > l.settled {
			out = append(out, s)
		}
	}
	return out
}

func (l *lane) pushStray(e *entry) {
	l.addStray(strayOf(e, len(e.Body)))
}

func (l *lane) addStray(s stray) {
	l.strays.push(s)
	l.strayBytes += s.weight
}

// strayOf is an item as a stray. Its body may not be in memory, and has so many bytes.
func strayOf(e *entry, size int) stray {
	s := stray{n: e.n, seq: e.seq, weight: weigh(&e.Item, size)}
	if e.stash != nil {
		s.at = e.stash.at
	}
	return s
}

func (l *lane) popStray() stray {
	s, _ := l.strays.pop()
	l.strayBytes -= s.weight
	return s
}

// maxLoad is how much is read at a time.
const maxLoad = 1024

// window bounds what of a lane is in memory, ready to be handed out.
type window struct {
	items int
	bytes int64
}

var defaultWindow = window{items: 4096, bytes: 32 << 20}
