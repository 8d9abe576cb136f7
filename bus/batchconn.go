package bus

import (
	"errors"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	lazyDelay   = 100 * time.Microsecond // delay of a lazy flush, to collect more messages
	lazyTicks   = 20                     // idle ticks before the lazy flusher sleeps
	writeFull   = 64 << 10               // size at which buffered bytes are flushed
	backlogMost = 32 << 20               // bytes that wait for a slow server
	natsMost    = backlogMost + 1<<20    // the same with NATS's own, beside what is being written: beyond that its writes wait
	writeWithin = time.Minute            // then the connection is closed
)

// batchConn is a connection with three kinds of writers: NATS, whose goroutine flushes published messages; the bus, which
// may buffer messages (see BatchWrites) and flush them from the goroutine that published them; and transfers, which
// write large bodies without a copy.
//
// What always holds:
//   - One goroutine at a time writes to the socket (busy). It begins with all of out, and either writes all that it
//     took, puts the rest back at the front of out (the socket is full), or closes the connection. So the socket always
//     continues with out: out may begin in the middle of an operation, and whatever else is added to it is whole.
//   - Bytes in out are flushed by the end of a batch, and otherwise by the active writer when its write is over, by the
//     goroutine behind a full socket, or by a body that waits for the active writer.
//   - Every change for which a goroutine waits (busy, out, closed) is followed by a Broadcast of room.
//
// It also saves write deadlines. NATS sets a deadline before each write and clears it afterwards, which costs two
// timers for every message. batchConn keeps a deadline that is far enough ahead: a write that hangs ends at its
// deadline, or up to an eighth of its time sooner.
type batchConn struct {
	net.Conn
	raw   syscall.RawConn // nil: not a socket
	tried rawWrite        // of the active writer

	beforeRead *atomic.Pointer[func()] // of the bus

	bodies sync.Mutex // locked before mu, while a body waits and is written: bodies take turns

	mu       sync.Mutex // guards what follows; never held during a write
	room     sync.Cond  // a write is over, or the connection has ended
	out      []byte     // buffered and not flushed
	spare    []byte
	busy     bool // a writer is active; it also flushes bytes buffered meanwhile
	bodyNext bool // a body waits for the active writer; it also flushes out
	behind   bool // a goroutine waits for the socket
	batches  int
	closed   bool
	unpushed int           // batches since the last push whose flush could wait
	single   bool          // there was one such batch before the last push
	ticks    chan struct{} // wakes the lazy flusher; nil: it was never started
	asleep   bool          // the lazy flusher sleeps

	deadline sync.Mutex
	armed    time.Time // the current deadline; zero: none
}

func newBatchConn(c net.Conn) *batchConn {
	w := &batchConn{Conn: c, beforeRead: new(atomic.Pointer[func()])}
	w.room.L = &w.mu
	if s, ok := c.(syscall.Conn); ok {
		w.raw, _ = s.SyscallConn() // without it, every write may block
		w.tried.do = w.tried.write
	}
	return w
}

func (w *batchConn) Read(p []byte) (int, error) {
	if do := w.beforeRead.Load(); do != nil {
		(*do)()
	}
	return w.Conn.Read(p)
}

// Write is called by NATS, with the lock of its connection held: a server that hangs must not hold up the other goroutines that need that lock.
// So it returns when the bytes are written or buffered, and waits only beyond natsMost.
func (w *batchConn) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for !w.closed && len(w.out) > natsMost {
		w.room.Wait()
	}
	if w.closed {
		return 0, net.ErrClosed
	}
	w.out = append(w.out, p...)
	if w.raw == nil {
		return len(p), w.sendLocked(w.wait)
	}
	w.pushLocked() // a failure closes the connection, which NATS reads from
	return len(p), nil
}

// writeBody writes one message, whose data are head and body, without a copy: the kernel reads body where it lies. It
// returns when the socket has accepted all bytes, or fails. done is false if the connection had ended before.
func (w *batchConn) writeBody(subject string, head, body []byte) (done bool, err error) {
	start := append(appendPub(nil, subject, "", len(head)+len(body)), head...)
	w.bodies.Lock()
	defer w.bodies.Unlock()
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.busy && !w.closed {
		w.bodyNext = true
		w.room.Wait()
	}
	w.bodyNext = false
	if w.closed {
		return false, nil
	}
	err = w.writeLocked(func(out []byte) (int, error) {
		_ = w.SetWriteDeadline(time.Now().Add(writeWithin)) // fails only on a closed connection, as the write does
		n, err := (&net.Buffers{out, start, body, []byte("\r\n")}).WriteTo(w.Conn)
		return int(n), err
	})
	if err == nil {
		w.pushLocked()
	}
	return true, err
}

// takenLocked reports whether another goroutine writes the buffer.
func (w *batchConn) takenLocked() bool { return w.busy || w.bodyNext }

// breakLocked closes a connection on which an operation may be half written. NATS, which reads from it, reconnects.
func (w *batchConn) breakLocked() {
	w.closed = true
	_ = w.Conn.Close() // broken anyway
}

// publish buffers one message, if a batch is open. It never blocks.
func (w *batchConn) publish(subject, reply string, data []byte) (done bool, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.batches == 0 || w.closed {
		return false, nil
	}
	if len(w.out)+len(data) > backlogMost {
		return true, Errorf(CodeUnavailable, "publish: %d MiB already wait for the server, which reads too slowly or not at all; check that it runs", len(w.out)>>20)
	}
	w.out = append(append(appendPub(w.out, subject, reply, len(data)), data...), "\r\n"...)
	return true, nil
}

// appendPub appends the first line of a message of size bytes.
func appendPub(b []byte, subject, reply string, size int) []byte {
	b = append(append(b, "PUB "...), subject...)
	if reply != "" {
		b = append(append(b, ' '), reply...)
	}
	b = strconv.AppendInt(append(b, ' '), int64(size), 10)
	return append(b, "\r\n"...)
}

func (w *batchConn) hold() {
	w.mu.Lock()
	w.batches++
	w.mu.Unlock()
}

// release ends a batch. The last one flushes: now, without waiting for a full socket, or a moment later, together with
// later messages.
func (w *batchConn) release(now bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.batches--
	switch {
	case w.batches > 0 || len(w.out) == 0 || w.closed:
	case now || len(w.out) >= writeFull:
		w.pushLocked()
	default:
		w.unpushed++
		if w.single && w.unpushed == 1 {
			w.pushLocked()
		} else {
			w.laterLocked()
		}
	}
}

// push flushes the buffer.
func (w *batchConn) push() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.unpushed > 0 {
		w.single, w.unpushed = w.unpushed == 1, 0
	}
	if w.batches == 0 && len(w.out) > 0 && !w.closed {
		w.pushLocked()
	}
}

// pushLocked writes as much as the socket accepts at once; a goroutine writes the rest.
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

var errFull = errors.New("the socket's buffer is full")

// try writes without blocking.
func (w *batchConn) try(p []byte) (n int, err error) {
	if w.raw == nil {
		return w.wait(p)
	}
	_ = w.SetWriteDeadline(time.Now().Add(writeWithin)) // an expired deadline would fail this write too
	t := &w.tried
	t.p, t.n, t.err = p, 0, nil
	outer := w.raw.Write(t.do)
	n, err, t.p = t.n, t.err, nil
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

// rawWrite is a write that does not block. One serves all writes of a connection, because a function for each would be allocated.
type rawWrite struct {
	p   []byte
	n   int
	err error
	do  func(fd uintptr) bool
}

func (t *rawWrite) write(fd uintptr) bool {
	t.n, t.err = syscall.Write(int(fd), t.p)
	return true
}

func (w *batchConn) wait(p []byte) (int, error) {
	_ = w.SetWriteDeadline(time.Now().Add(writeWithin)) // fails only on a closed connection, as the write does
	return w.Conn.Write(p)
}

// sendLocked writes the buffer, unless another goroutine does.
func (w *batchConn) sendLocked(write func([]byte) (int, error)) error {
	for !w.takenLocked() && !w.closed && len(w.out) > 0 {
		if err := w.writeLocked(write); err != nil {
			return err
		}
	}
	return nil
}

// writeLocked takes the buffer and calls write with it, without the lock and as the only writer. write returns how many
// bytes were written, and errFull if it writes the buffer alone and the socket did not accept all of it.
func (w *batchConn) writeLocked(write func(out []byte) (int, error)) error {
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
	default:
		w.breakLocked()
	}
	w.room.Broadcast()
	return err
}

func keepSmall(buf []byte) []byte {
	if cap(buf) > 1<<20 {
		return nil
	}
	return buf[:0]
}

// laterLocked makes the lazy flusher flush soon. The flusher stays awake during traffic: a wake-up for each message
// would cost more than the message.
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
		if w.batches == 0 && len(w.out) > 0 && !w.closed {
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
	if t.IsZero() { // no write is active; the next one sets another deadline
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

// SetDeadline sets the read and the write deadline.
func (w *batchConn) SetDeadline(t time.Time) error {
	w.deadline.Lock()
	defer w.deadline.Unlock()
	w.armed = t
	return w.Conn.SetDeadline(t)
}

// WriteBatch buffers the messages published on a connection until Flush, so that one write sends them.
type WriteBatch struct{ w *batchConn }

// BatchWrites buffers the messages of every endpoint of this bus until Flush. Around a few quick calls it saves the
// wake-up of NATS's flushing goroutine: the goroutine that ends the last batch writes. Where the connection is not a
// plain socket (TLS, a WebSocket, the server in this process) it does nothing.
func (b *Bus) BatchWrites() WriteBatch {
	w := b.wire.Load()
	if w != nil {
		w.hold()
	}
	return WriteBatch{w}
}

// Flush ends the batch. now: the messages are written before Flush returns, as far as the socket accepts them without
// blocking; otherwise within a tenth of a millisecond, together with later messages, or at the next Push. They are also written now if the
// batch before was the only one before its Push: its sender waits for each answer, and should not be slower than one that says so.
func (c WriteBatch) Flush(now bool) {
	if c.w != nil {
		c.w.release(now)
	}
}

// Push flushes the buffered messages.
func (b *Bus) Push() {
	if w := b.wire.Load(); w != nil {
		w.push()
	}
}

// BeforeRead registers a function that the connection's reader calls whenever it waits for the server again: all messages that have
// arrived are with their subscriptions then. It must not block. It is never called if another function is registered, nor on a
// connection without a socket, to a server in this process.
func (b *Bus) BeforeRead(do func()) (remove func()) {
	b.beforeRead.CompareAndSwap(nil, &do)
	return func() { b.beforeRead.CompareAndSwap(&do, nil) }
}

// adopt enables batches on the connection that NATS has just made, if the bus can write the NATS protocol to it.
func (b *Bus) adopt(nc *nats.Conn) {
	w := b.dialled.Load() // below TLS, if there is any; TLSConnectionState is not safe for concurrent use
	if nc.Opts.Secure || nc.TLSRequired() || strings.HasPrefix(nc.ConnectedUrl(), "ws") {
		w = nil
	}
	b.wire.Store(w)
}

// publish sends one message. Bytes in NATS's own buffer go first: they may contain the subscription for an answer.
func (b *Bus) publish(subject, reply string, data []byte) error {
	if err := CheckSubject(subject, reply); err != nil {
		return err
	}
	if !b.Connected() {
		return b.downError("publish")
	}
	if w := b.wire.Load(); w != nil && len(data) <= b.MaxPayload() {
		if n, err := b.Conn().Buffered(); n == 0 && err == nil {
			if done, err := w.publish(subject, reply, data); done {
				return err
			}
		}
	}
	var err error
	if reply == "" {
		err = b.Conn().Publish(subject, data)
	} else {
		err = b.Conn().PublishRequest(subject, reply, data)
	}
	if err != nil {
		return b.natsError("publish", err)
	}
	return nil
}

// publishBody sends one message, whose data are head and body. Where the bus may write to the socket, body is not copied.
func (b *Bus) publishBody(subject string, head, body []byte) error {
	if err := CheckSubject(subject, ""); err != nil {
		return err
	}
	if !b.Connected() {
		return b.downError("publish")
	}
	if w := b.wire.Load(); w != nil && len(head)+len(body) <= b.MaxPayload() {
		if done, err := w.writeBody(subject, head, body); err != nil {
			return Errorf(CodeUnavailable, "publish: the connection to the server was lost (%w)", err)
		} else if done {
			return nil
		}
	}
	return b.publish(subject, "", slices.Concat(head, body))
}
