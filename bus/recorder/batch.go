package recorder

import "time"

const (
	batchSize = 8
	batchAge  = int64(time.Second) // between the ends of two entries of a batch
)

// Batch collects the entries of one writer, which has a lock of its own, and adds them to the ring of the process together. Most of the cost
// of adding an entry is the wait for its cache line; the lines of a batch are fetched at once.
type Batch struct {
	entries [batchSize]Entry
	n       int
}

// Add is AddEntry, but the entry is in no snapshot before Flush: see Source.FlushFunc.
func (b *Batch) Add(e *Entry) bool {
	if process == nil {
		return true
	}
	if !e.numbered() {
		return false
	}
	if b.n > 0 && e.End-b.entries[0].End > batchAge { // the ring is in the order of time, nearly
		b.Flush()
	}
	b.entries[b.n] = *e
	if b.n++; b.n == batchSize {
		b.Flush()
	}
	return true
}

// Flush adds the entries to the ring.
func (b *Batch) Flush() {
	if b.n > 0 {
		process.addEntries(b.entries[:b.n])
		b.n = 0
	}
}
