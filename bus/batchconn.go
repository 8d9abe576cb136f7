package bus

import (
	"errors"
	"net"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// dialer makes connections that are cheap to write to.
type dialer struct {
	net.Dialer
	made func(*batchConn)
}

func (d *dialer) Dial(network, address string) (net.Conn, error) {
	c, err := d.Dialer.Dial(network, address)
	if err != nil {
		return nil, err
	}
	w := newBatchConn(c)
	d.made(w)
	return w, nil
}

const (
	lazyDelay   = 100 * time.Microsecond // how long what is sent lazily may wait for company
	lazyTicks   = 20                     // so often the one who sends it looks in vain before it sleeps
	writeFull   = 64 << 10               // what is kept back is sent at this size
	backlogMost = 32 << 20               // what waits behind a server that takes nothing
	writeWithin = time.Minute            // then the connection is given up
)

// batchConn is a connection's stream of bytes. Two write to it, each a whole operation at a time: NATS, which has a goroutine of its own
// send what was said a moment ago, and the bus, which may hold back what it says and send it together (see Cork), from the
// goroutine that said it.
//
// It also spares the deadlines of writes. NATS sets one before each write and takes it back afterwards, which costs two timers
// for every message. Here a deadline is left in place as long as it lies far enough ahead: a write that hangs ends after its
// time, or up to an eighth of it sooner.
type batchConn struct {
	net.Conn
	raw syscall.RawConn // nil: this is no socket

	mu     sync.Mutex // guards what follows; never held during a write
	room   sync.Cond  // there is less in out, or an end
	out    []byte     // said, and not sent
	spare  []byte
	busy   bool // somebody is sending; he also sends what comes meanwhile
	behind bool // there is one who waits for the socket
	corks  int
	closed bool
	ticks  chan struct{} // wakes who sends what is lazy; nil: nobody has been yet
	asleep bool          // he is

	deadline sync.Mutex
	armed    time.Time // the deadline that is set; zero: none
}

func newBatchConn(c net.Conn) *batchConn {
	w := &batchConn{Conn: c}
	w.room.L = &w.mu
	if s, ok := c.(syscall.Conn); ok {
		w.raw, _ = s.SyscallConn() // without it, a write is one that waits
	}
	return w
}

// Write is NATS's: it returns when the bytes are sent, or are in the hands of somebody who sends.
func (w *batchConn) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.busy && !w.closed && len(w.out)+len(p) > writeFull {
		w.room.Wait()
	}
	if w.closed {
		return 0, net.ErrClosed
	}
	if w.busy || len(w.out) > 0 {
		w.out = append(w.out, p...)
		return len(p), w.sendLocked(w.Conn.Write)
	}
	w.busy = true
	w.mu.Unlock()
	n, err := w.Conn.Write(p)
	w.mu.Lock()
	w.busy = false
	if err != nil {
		w.breakLocked()
	}
	w.room.Broadcast()
	if err == nil {
		err = w.sendLocked(w.Conn.Write)
	}
	return n, err
}

// breakLocked ends a connection on which half an operation may have gone out. NATS, which reads from it, finds out and
// connects anew.
func (w *batchConn) breakLocked() {
	w.closed = true
	_ = w.Conn.Close() // it is broken
}

// publish holds one message back, if there is a cork in. It never waits.
func (w *batchConn) publish(subject, reply string, data []byte) (done bool, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.corks == 0 || w.closed {
		return false, nil
	}
	if len(w.out)+len(data) > backlogMost {
		return true, Errorf(CodeUnavailable, "publish: %d MiB already wait for the server, which takes them too slowly or not at all; see whether it runs", len(w.out)>>20)
	}
	w.out = appendPub(w.out, subject, reply, data)
	return true, nil
}

func appendPub(b []byte, subject, reply string, data []byte) []byte {
	b = append(append(b, "PUB "...), subject...)
	if reply != "" {
		b = append(append(b, ' '), reply...)
	}
	b = strconv.AppendInt(append(b, ' '), int64(len(data)), 10)
	b = append(append(b, "\r\n"...), data...)
	return append(b, "\r\n"...)
}

func (w *batchConn) hold() {
	w.mu.Lock()
	w.corks++
	w.mu.Unlock()
}

// release takes a cork out. The last one sends what was held back: now, without waiting for a socket that is full, or a
// moment later, with what comes until then.
func (w *batchConn) release(now bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.corks--
	switch {
	case w.corks > 0 || len(w.out) == 0 || w.closed:
	case now || len(w.out) >= writeFull:
		w.pushLocked()
	default:
		w.laterLocked()
	}
}

// push sends what is held back.
func (w *batchConn) push() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.corks == 0 && len(w.out) > 0 && !w.closed {
		w.pushLocked()
	}
}

// pushLocked sends as much as the socket takes at once; a goroutine sends the rest.
func (w *batchConn) pushLocked() {
	if w.behind || w.sendLocked(w.try) != errFull {
		return
	}
	w.behind = true
	Go(func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		_ = w.sendLocked(w.wait) // a failure closes the connection
		w.behind = false
	})
}

var errFull = errors.New("the socket takes no more now")

// try writes without waiting.
func (w *batchConn) try(p []byte) (n int, err error) {
	if w.raw == nil {
		return w.wait(p)
	}
	_ = w.SetWriteDeadline(time.Now().Add(writeWithin)) // one that has passed would fail even this
	outer := w.raw.Write(func(fd uintptr) bool {
		n, err = syscall.Write(int(fd), p)
		return true
	})
	switch {
	case outer != nil:
		return max(n, 0), outer
	case err == syscall.EAGAIN || err == syscall.EINTR:
		return max(n, 0), errFull
	case err == nil && n < len(p):
		return n, errFull
	}
	return max(n, 0), err
}

func (w *batchConn) wait(p []byte) (int, error) {
	_ = w.SetWriteDeadline(time.Now().Add(writeWithin)) // fails only on a closed connection, as the write does
	return w.Conn.Write(p)
}

// sendLocked sends all there is, unless somebody does.
func (w *batchConn) sendLocked(write func([]byte) (int, error)) error {
	for !w.busy && !w.closed && len(w.out) > 0 {
		buf := w.out
		w.out, w.spare, w.busy = w.spare[:0], nil, true
		w.mu.Unlock()
		n, err := write(buf)
		w.mu.Lock()
		w.busy = false
		switch {
		case err == nil:
			w.spare = keepSmall(buf)
		case err == errFull && !w.closed:
			w.out = append(buf[n:], w.out...)
			return err
		default:
			w.breakLocked()
		}
		w.room.Broadcast()
		if err != nil {
			return err
		}
	}
	return nil
}

func keepSmall(buf []byte) []byte {
	if cap(buf) > 1<<20 {
		return nil
	}
	return buf[:0]
}

// laterLocked has what is held back sent in a moment. Whoever does that stays awake while there is such traffic: to be woken for
// each message would cost more than the message.
func (w *batchConn) laterLocked() {
	if w.ticks == nil {
		w.ticks = make(chan struct{}, 1)
		Go(w.tick)
		return
	}
	if w.asleep {
		w.asleep = false
		w.ticks <- struct{}{}
	}
}

func (w *batchConn) tick() {
	for idle := 0; ; {
		time.Sleep(lazyDelay)
		w.mu.Lock()
		idle++
		if w.corks == 0 && len(w.out) > 0 && !w.closed {
			w.pushLocked()
			idle = 0
		}
		if w.closed {
			w.mu.Unlock()
			return
		}
		w.asleep = idle > lazyTicks
		sleep := w.asleep
		w.mu.Unlock()
		if sleep {
			if _, open := <-w.ticks; !open {
				return
			}
			idle = 0
		}
	}
}

func (w *batchConn) Close() error {
	w.mu.Lock()
	w.closed = true
	w.room.Broadcast()
	if w.ticks != nil && w.asleep {
		w.asleep = false
		close(w.ticks)
	}
	w.mu.Unlock()
	return w.Conn.Close()
}

func (w *batchConn) SetWriteDeadline(t time.Time) error {
	if t.IsZero() { // nothing is being written; the next write sets another
		return nil
	}
	w.deadline.Lock()
	defer w.deadline.Unlock()
	if left := time.Until(t); !w.armed.IsZero() && t.Sub(w.armed) < left/8 && !t.Before(w.armed) {
		return nil
	}
	w.armed = t
	return w.Conn.SetWriteDeadline(t)
}

// SetDeadline sets both, as it says.
func (w *batchConn) SetDeadline(t time.Time) error {
	w.deadline.Lock()
	defer w.deadline.Unlock()
	w.armed = t
	return w.Conn.SetDeadline(t)
}
