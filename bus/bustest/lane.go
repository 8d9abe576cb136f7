package bustest

import (
	"bytes"
	"errors"
	"net"
	"os"
	"slices"
	"sync"
	"time"
)

// intake is the number of bytes that a lane buffers, like a socket.
const intake = 1 << 20

// lane carries one direction of a link. It has two goroutines: the reader buffers bytes; the worker parses messages,
// applies the rule, and writes. A write to a pipe waits for its reader, so with one goroutine two peers could block
// each other.
//
// The last bytes of each side arrive: after the end of its source a lane writes its buffer before it closes the link,
// and a lane that cannot write any more continues to read until its source has ended, so that it does not block the
// other lane.
type lane struct {
	link     *link
	toward   Direction
	src, dst net.Conn

	mu     sync.Mutex // guards fresh and ended
	fresh  []byte     // from the reader to the worker
	ended  bool       // the source has ended
	moreCh chan struct{}
	roomCh chan struct{}

	writingCh chan struct{} // holds one while a write to dst is under way

	// The worker's own.
	in   []byte // received and not processed; begins with a whole or partial element
	n    int    // messages seen
	held []byte // delayed by Swap
	late []lateMessage
}

type lateMessage struct {
	due   time.Time
	bytes []byte
}

func newLane(l *link, toward Direction, src, dst net.Conn) *lane {
	signal := func() chan struct{} { return make(chan struct{}, 1) }
	return &lane{link: l, toward: toward, src: src, dst: dst, moreCh: signal(), roomCh: signal(), writingCh: signal()}
}

func (l *lane) run() {
	go l.read()
	go l.work()
}

func (l *lane) read() {
	buf := make([]byte, 64<<10)
	for {
		n, err := l.src.Read(buf)
		for !l.put(buf[:n], err != nil) {
			<-l.roomCh
		}
		if err != nil {
			return
		}
	}
}

func (l *lane) put(b []byte, ended bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.fresh) >= intake {
		return false
	}
	l.fresh, l.ended = append(l.fresh, b...), ended
	wake(l.moreCh)
	return true
}

// get moves received bytes to l.in and reports whether the source has ended.
func (l *lane) get() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.in, l.fresh = append(l.in, l.fresh...), l.fresh[:0]
	wake(l.roomCh)
	return l.ended
}

func wake(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

func (l *lane) work() {
	defer l.link.close()
	for ended := false; !ended; {
		var dueCh <-chan time.Time
		if len(l.late) > 0 {
			dueCh = time.After(time.Until(l.late[0].due))
		}
		select {
		case <-l.moreCh:
			ended = l.get()
		case <-dueCh:
		}
		err := l.judgeAll()
		if err == nil {
			err = l.emitDue()
		}
		for err != nil && !ended {
			<-l.moreCh
			ended = l.get()
			l.in = l.in[:0]
		}
		if err != nil {
			return
		}
	}
	_ = l.write(l.in) // half a message, if anything; the link ends anyway
}

// judgeAll processes the complete messages of in. Consecutive messages that pass are written together.
func (l *lane) judgeAll() error {
	run, at, need := 0, 0, 0 // in[run:at] passed and is to be written
	for at < len(l.in) {
		e := scan(l.in[at:], l.toward)
		if e.size == 0 {
			need = e.need
			break
		}
		var err error
		if run, err = l.apply(l.judge(e), run, at, at+e.size, e.message); err != nil {
			return err
		}
		at += e.size
	}
	if err := l.write(l.in[run:at]); err != nil {
		return err
	}
	if at > 0 {
		l.in = l.in[:copy(l.in, l.in[at:])]
	}
	l.in = slices.Grow(l.in, max(0, need-len(l.in)))
	return nil
}

func (l *lane) judge(e element) Verdict {
	if !e.message {
		return Pass
	}
	l.n++
	rule := l.link.faults.rule.Load()
	if rule == nil {
		return Pass
	}
	return (*rule)(Message{
		Toward: l.toward, Conn: l.link.number, N: l.n,
		Subject: string(e.subject), Reply: string(e.reply), Header: e.header, Payload: e.payload,
	})
}

// apply executes the verdict on in[at:end], after in[run:at], which is to be written. It returns the new run.
func (l *lane) apply(v Verdict, run, at, end int, message bool) (int, error) {
	switch v.do {
	case doDrop:
		return end, l.write(l.in[run:at])
	case doDelay:
		l.later(v.wait, l.in[at:end])
		return end, l.write(l.in[run:at])
	case doSwap:
		if l.held == nil {
			l.held = bytes.Clone(l.in[at:end])
			return end, l.write(l.in[run:at])
		}
	case doDouble:
		if err := l.write(l.in[run:end]); err != nil {
			return run, err
		}
		run = at
	}
	if !message || l.held == nil {
		return run, nil
	}
	if err := l.write(l.in[run:end]); err != nil {
		return run, err
	}
	return end, l.release()
}

// release writes the message that Swap delayed, after another message has passed.
func (l *lane) release() error {
	held := l.held
	l.held = nil
	return l.write(held)
}

func (l *lane) later(d time.Duration, b []byte) {
	due := time.Now().Add(d)
	at := len(l.late)
	for at > 0 && l.late[at-1].due.After(due) {
		at--
	}
	l.late = slices.Insert(l.late, at, lateMessage{due: due, bytes: bytes.Clone(b)})
}

func (l *lane) emitDue() error {
	for len(l.late) > 0 && time.Until(l.late[0].due) <= 0 {
		b := l.late[0].bytes
		l.late = slices.Delete(l.late, 0, 1)
		if err := errors.Join(l.write(b), l.release()); err != nil {
			return err
		}
	}
	return nil
}

// write returns when all of b is written; a freeze can interrupt it anywhere.
func (l *lane) write(b []byte) error {
	for len(b) > 0 {
		if thaw := l.link.faults.frozen(); thaw != nil {
			select {
			case <-thaw:
				continue
			case <-l.link.gone:
				return net.ErrClosed
			}
		}
		l.writingCh <- struct{}{}
		n, err := l.dst.Write(b)
		<-l.writingCh
		b = b[n:]
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = l.dst.SetWriteDeadline(time.Time{}) // set by interrupt; then check for a freeze
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// interrupt ends an active write and waits for that. Only the worker clears the deadline, and checks for a freeze after
// that, so a write that was about to begin fails too.
func (l *lane) interrupt() {
	_ = l.dst.SetWriteDeadline(time.Unix(1, 0))
	l.writingCh <- struct{}{}
	<-l.writingCh
}
