package nodes

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"troupe/bus"
)

const (
	pipeSize     = 256 << 10             // bytes that a worker may print before it blocks on its agent
	readPause    = 10 * time.Millisecond // between two reads of a worker that prints all the time, so that one read gets many lines
	drainMost    = 8 << 20               // bytes read from a pipe that a process of the tree keeps filling
	drainTimeout = 2 * time.Second       // how long an exit waits for the last lines on an overloaded machine
)

// outputCapture reads the output of a worker. End of file on a pipe is no sign of exit: a forked process may keep the pipe
// open, or close it early.
type outputCapture struct {
	stdout, stderr *os.File // write ends, for the worker
	readers        []*pipeReader
	group          sync.WaitGroup
}

// pipeReader reads one pipe; its goroutine owns all fields but the channels.
type pipeReader struct {
	pipe      *os.File
	split     splitter
	emit      func(string)
	raw       func([]byte) // nil: not wanted. It may block, and must not keep the bytes
	pause     func()
	wakeCh    chan struct{}      // holds one: the pause between two reads is over
	readAt    time.Time          // of the last read
	exitedCh  chan struct{}      // closed by died, with a deadline on the pipe
	closedCh  chan struct{}      // closed by close, with a deadline on the pipe
	drainedCh chan struct{}      // closed when the bytes that were in the pipe at the exit have been read
	flushCh   chan chan struct{} // holds one: a channel to close when the bytes now in the pipe have been read
}

// newCapture makes the pipes and starts reading. One goroutine per pipe calls sink with each line, raw, if it is set, with all
// bytes, and pause when no more lines are ready.
func newCapture(sink func(OutputStream, string), raw func(OutputStream, []byte), pause func()) (*outputCapture, error) {
	c := &outputCapture{}
	for _, s := range []OutputStream{Stdout, Stderr} {
		r, w, err := os.Pipe()
		if err != nil {
			c.closeWriteEnds()
			c.close()
			return nil, err
		}
		if raw, err := w.SyscallConn(); err == nil {
			const setPipeSize = 1031
			_ = raw.Control(func(fd uintptr) { _, _, _ = syscall.Syscall(syscall.SYS_FCNTL, fd, setPipeSize, pipeSize) }) // best effort
		}
		if s == Stdout {
			c.stdout = w
		} else {
			c.stderr = w
		}
		rd := &pipeReader{pipe: r, emit: func(line string) { sink(s, line) }, pause: pause, exitedCh: make(chan struct{}), closedCh: make(chan struct{}), drainedCh: make(chan struct{}), flushCh: make(chan chan struct{}, 1), wakeCh: make(chan struct{}, 1)}
		if raw != nil {
			rd.raw = func(p []byte) { raw(s, p) }
		}
		c.readers = append(c.readers, rd)
		c.group.Go(bus.Guard(rd.run))
	}
	return c, nil
}

// closeWriteEnds closes the agent's copies of the write ends, after the fork.
func (c *outputCapture) closeWriteEnds() {
	for _, w := range []*os.File{c.stdout, c.stderr} {
		if w != nil {
			_ = w.Close()
		}
	}
}

// processExited reads what the worker had printed before its exit, and returns when sink has got it.
func (c *outputCapture) processExited() {
	late := time.After(drainTimeout)
	for _, r := range c.readers {
		close(r.exitedCh)
		r.interrupt()
	}
	for _, r := range c.readers {
		select {
		case <-r.drainedCh:
		case <-late:
			return
		}
	}
}

// close reads the rest and ends the reading, even if another process has the write end open.
func (c *outputCapture) close() {
	for _, r := range c.readers {
		close(r.closedCh)
		r.interrupt()
	}
	c.group.Wait()
}

// flush returns when sink has got all that the worker has printed so far, or ctx has ended.
func (c *outputCapture) flush(ctx context.Context) error {
	for _, r := range c.readers {
		doneCh := make(chan struct{})
		select {
		case r.flushCh <- doneCh:
		case <-r.drainedCh:
			continue
		case <-ctx.Done():
			return ctx.Err()
		}
		r.interrupt()
		select {
		case <-doneCh:
		case <-r.drainedCh:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// interrupt ends a read or the pause between two.
func (r *pipeReader) interrupt() {
	_ = r.pipe.SetReadDeadline(time.Now())
	wake(r.wakeCh)
}

// read passes on what was read.
func (r *pipeReader) read(p []byte) {
	if r.raw != nil && len(p) > 0 {
		r.raw(p)
	}
	r.split.write(p, r.emit)
}

// rest waits a moment if the worker prints all the time and its pipe is not filling up.
func (r *pipeReader) rest(n int) {
	now := time.Now()
	often := now.Sub(r.readAt) < 2*readPause
	r.readAt = now
	if !often || n > pipeSize/16 {
		return
	}
	t := time.NewTimer(readPause)
	defer t.Stop()
	select {
	case <-t.C:
	case <-r.wakeCh:
	}
}

// run reads until close. A deadline in the past interrupts the reading when died, flush or close wants something.
func (r *pipeReader) run() {
	defer func() { _ = r.pipe.Close() }()
	buf := make([]byte, 32<<10)
	for held := false; ; {
		n, err := r.pipe.Read(buf)
		r.read(buf[:n])
		if err == nil {
			r.pause()
			r.rest(n)
			continue
		}
		open := errors.Is(err, os.ErrDeadlineExceeded) // otherwise: end of file
		asked, died, gone := r.wanted()
		if open {
			r.drain(buf)
		}
		if died || gone || !open {
			r.split.flush(r.emit) // the rest of the line never comes
		}
		r.pause()
		if asked != nil {
			close(asked)
		}
		if !held && (died || gone || !open) {
			held = true
			close(r.drainedCh)
		}
		if gone {
			return
		}
		if !open {
			<-r.closedCh
			return
		}
		r.resume(held)
	}
}

// wanted is why the reading was interrupted. It is called before the pipe is drained.
func (r *pipeReader) wanted() (asked chan struct{}, died, gone bool) {
	select {
	case asked = <-r.flushCh:
	default:
	}
	return asked, closed(r.exitedCh), closed(r.closedCh)
}

// resume clears the deadline, unless another interruption came meanwhile.
func (r *pipeReader) resume(held bool) {
	_ = r.pipe.SetReadDeadline(time.Time{})
	if len(r.flushCh) > 0 || closed(r.closedCh) || !held && closed(r.exitedCh) {
		_ = r.pipe.SetReadDeadline(time.Now())
	}
}

func closed(ch chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// drain reads what is in the pipe now, without blocking.
func (r *pipeReader) drain(buf []byte) {
	raw, err := r.pipe.SyscallConn()
	if err != nil {
		return
	}
	for taken := 0; taken < drainMost; {
		n, err := 0, error(nil)
		if raw.Control(func(fd uintptr) { n, err = syscall.Read(int(fd), buf) }) != nil {
			return
		}
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if n <= 0 || err != nil && !errors.Is(err, io.EOF) {
			return
		}
		r.read(buf[:n])
		taken += n
	}
}
