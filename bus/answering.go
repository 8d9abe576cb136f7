package bus

import (
	"context"
	"sync"
	"time"
)

const (
	answerEvery = 500 * time.Millisecond  // between two round trips to the server
	answerLimit = 2500 * time.Millisecond // a last answer that is older than this means that the server does not answer
	answerIdle  = time.Minute             // nobody has wanted to know for so long: the round trips pause until somebody does
)

// answering is since when the server has answered without interruption. A server that hangs keeps its connections for a while, so
// that a connection alone proves nothing: only round trips do. They also reveal that this process itself was suspended.
type answering struct {
	once  sync.Once     // starts the round trips
	askCh chan struct{} // holds one: a round trip is wanted now

	mu         sync.Mutex // guards what follows
	wanted     time.Time  // when somebody last wanted to know
	paused     bool       // the round trips, because nobody has wanted to know
	asked      time.Time  // when the last request that was answered was sent
	last       time.Time  // of the last answer; zero: none yet
	since      time.Time
	reconnects uint64 // of the connection at the last answer
}

// Answering is since when the server has answered this connection without interruption, and when it did so last. since is zero while
// it does not answer, and before its first answer, also the first after a pause: without a caller for a minute the server is not asked.
// What others failed to say while the server did not answer is no proof against them.
func (b *Bus) Answering() (since, last time.Time) {
	b.startAnswering()
	return b.answering.read(time.Now(), b.reconnects(), b.Connected())
}

// AnsweredSince reports whether the server has answered a request that was sent after a moment, so that this connection has received
// everything that was for it at that moment. If it has not, the server is asked, and a later call knows more.
func (b *Bus) AnsweredSince(moment time.Time) bool {
	b.Answering()
	b.answering.mu.Lock()
	defer b.answering.mu.Unlock()
	if b.answering.asked.After(moment) {
		return true
	}
	b.answering.ask()
	return false
}

// ask has the server asked now.
func (a *answering) ask() {
	select {
	case a.askCh <- struct{}{}:
	default:
	}
}

// pause reports whether the round trips pause, because nobody has wanted to know for a while.
func (a *answering) pause(now time.Time) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.paused = now.Sub(a.wanted) > answerIdle
	return a.paused
}

func (b *Bus) reconnects() uint64 { return b.link.connects.Load() }

func (b *Bus) startAnswering() { b.answering.once.Do(func() { Go(b.checkAnswers) }) }

// checkAnswers makes round trips to the server until the bus is closed.
func (b *Bus) checkAnswers() {
	for {
		reconnects, asked := b.reconnects(), time.Now()
		if b.roundTrip() {
			b.answering.answered(asked, time.Now(), reconnects)
		}
		every := answerEvery
		if b.several.Load() {
			every = hangCheck
		}
		next := time.NewTimer(time.Until(asked.Add(every)))
		if !b.several.Load() && b.answering.pause(asked) {
			next.Stop()
		}
		select {
		case <-b.Done():
			next.Stop()
			return
		case <-next.C:
		case <-b.answering.askCh:
			next.Stop()
		}
	}
}

// roundTrip reports whether the server answered in time.
func (b *Bus) roundTrip() bool {
	ctx, cancel := context.WithTimeout(context.Background(), answerLimit)
	defer cancel()
	answeredCh := make(chan bool, 1)
	Go(func() { answeredCh <- b.Flush(ctx) == nil })
	for {
		late := time.NewTimer(hangAfter)
		began := time.Now()
		select {
		case answered := <-answeredCh:
			late.Stop()
			return answered
		case <-late.C:
			b.cutIfSilent(time.Since(began) - hangAfter)
		}
	}
}

// answered records an answer of the server. One that comes late, or on another connection, begins a new period.
func (a *answering) answered(asked, now time.Time, reconnects uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.last.IsZero() || now.Sub(a.last) > answerLimit || reconnects != a.reconnects {
		a.since = now
	}
	a.asked, a.last, a.reconnects = asked, now, reconnects
}

func (a *answering) read(now time.Time, reconnects uint64, connected bool) (since, last time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.wanted = now; a.paused {
		a.ask()
	}
	if !connected || a.last.IsZero() || now.Sub(a.last) > answerLimit || reconnects != a.reconnects {
		return time.Time{}, a.last
	}
	return a.since, a.last
}
