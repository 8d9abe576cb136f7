package direct

import (
	"sync"
	"time"
)

// Arrived is which pieces of a body are there while it arrives: a Pull marks them, and a server that passes the body on waits for them. A piece that is
// there is not written again. It is safe for concurrent use.
type Arrived struct {
	length int

	mu        sync.Mutex // guards what follows
	there     []bool     // by piece
	first     int        // piece that is missing
	ended     bool
	changedCh chan struct{} // closed with the next change; nil: nothing waits
}

// NewArrived is for a body of that many bytes, of which none is there.
func NewArrived(length int) *Arrived {
	return &Arrived{length: length, there: make([]bool, (length+pieceSize-1)/pieceSize)}
}

// Fill records that the first n bytes are there.
func (a *Arrived) Fill(n int) { a.mark(0, n) }

// mark records that the bytes from a boundary of pieces up to end are there.
func (a *Arrived) mark(from, end int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := max(from/pieceSize, a.first); i < len(a.there) && min((i+1)*pieceSize, a.length) <= end; i++ {
		a.there[i] = true
	}
	for a.first < len(a.there) && a.there[a.first] {
		a.first++
	}
	a.changedLocked()
}

// End records that no more of the body comes.
func (a *Arrived) End() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ended = true
	a.changedLocked()
}

func (a *Arrived) changedLocked() {
	if a.changedCh != nil {
		close(a.changedCh)
		a.changedCh = nil
	}
}

// Prefix is how many bytes from the beginning are there.
func (a *Arrived) Prefix() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return min(a.first*pieceSize, a.length)
}

// Ended reports whether the body will never be whole.
func (a *Arrived) Ended() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.ended && a.first < len(a.there)
}

// missing is where the first piece begins that is not there, in a range that begins with a piece; to: all are there.
func (a *Arrived) missing(from, to int) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	for from < to && a.there[from/pieceSize] {
		from += pieceSize
	}
	return min(from, to)
}

// wait waits until a range is there, for a while at most. It reports whether it is there, or never will be.
func (a *Arrived) wait(from, to int, limit time.Duration) (there, never bool) {
	var timer *time.Timer
	for {
		a.mu.Lock()
		there = true
		for i := from / pieceSize; there && i*pieceSize < to; i++ {
			there = a.there[i]
		}
		if there || a.ended {
			a.mu.Unlock()
			return there, !there
		}
		if a.changedCh == nil {
			a.changedCh = make(chan struct{})
		}
		changedCh := a.changedCh
		a.mu.Unlock()
		if timer == nil {
			timer = time.NewTimer(limit)
			defer timer.Stop()
		}
		select {
		case <-changedCh:
		case <-timer.C:
			return false, false
		}
	}
}
