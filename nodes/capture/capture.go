package capture

import (
	"context"
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"troupe/bus"
)

const (
	pipeSize     = 256 << 10              // bytes that a process may print before it blocks
	readPause    = 100 * time.Millisecond // between two reads of a process that prints all the time, so that one read gets many lines
	drainMost    = 8 << 20                // bytes read from a pipe that a process of the tree keeps filling
	drainTimeout = 10 * time.Second       // how long an exit waits for the last lines on an overloaded machine, or for a slow disk of logs
)

// Sink takes what a process prints on one of its streams, from one goroutine.
type Sink struct {
	Lines func([]string) // the lines of one read
	Raw   func([]byte)   // all bytes of one read; nil: not wanted. It may block, and must not keep them
}

// Capture reads the output of a process. End of file on a pipe is no sign of exit: a forked process may keep the pipe open, or
// close it early.
type Capture struct {
	Stdout, Stderr *os.File // write ends, for the process
	readers        []*pipeReader
	group          sync.WaitGroup
}

// pipeReader reads one pipe; its goroutine owns all fields but the channels.
type pipeReader struct {
	fd        int // does not block
	poller    *Poller
	splitter  splitter
	sink      Sink
	afterRead func()
	readAt    time.Time          // of the last read
	readyCh   chan struct{}      // holds one: the pipe can be read
	wakeCh    chan struct{}      // holds one: the rest between two reads is over
	exitedCh  chan struct{}      // closed by ProcessExited
	closedCh  chan struct{}      // closed by Close
	drainedCh chan struct{}      // closed when the bytes that were in the pipe at the exit have been read
	flushCh   chan chan struct{} // holds one: a channel to close when the bytes now in the pipe have been read
}

// New makes the pipes and starts reading. One goroutine per pipe calls its sink with what it reads, and then afterRead.
func New(poller *Poller, stdout, stderr Sink, afterRead func()) (*Capture, error) {
	c := &Capture{}
	for _, s := range []struct {
		sink Sink
		end  **os.File
	}{{stdout, &c.Stdout}, {stderr, &c.Stderr}} {
		r, w, err := newPipeReader(poller)
		if err != nil {
			c.CloseWriteEnds()
			c.Close()
			return nil, err
		}
		*s.end, r.sink, r.afterRead = w, s.sink, afterRead
		c.readers = append(c.readers, r)
		c.group.Go(bus.Guard(r.run))
	}
	return c, nil
}

// newPipeReader makes a pipe. Its write end blocks, as programs expect of their output.
func newPipeReader(poller *Poller) (*pipeReader, *os.File, error) {
	var fds [2]int
	if err := syscall.Pipe2(fds[:], syscall.O_CLOEXEC); err != nil {
		return nil, nil, os.NewSyscallError("pipe2", err)
	}
	const setPipeSize = 1031
	_, _, _ = syscall.Syscall(syscall.SYS_FCNTL, uintptr(fds[1]), setPipeSize, pipeSize) // best effort
	w := os.NewFile(uintptr(fds[1]), "output")
	r := &pipeReader{
		fd: fds[0], poller: poller, readyCh: make(chan struct{}, 1), wakeCh: make(chan struct{}, 1), exitedCh: make(chan struct{}), closedCh: make(chan struct{}),
		drainedCh: make(chan struct{}), flushCh: make(chan chan struct{}, 1),
	}
	err := os.NewSyscallError("fcntl", syscall.SetNonblock(r.fd, true))
	if err == nil {
		err = poller.add(r)
	}
	if err != nil {
		_, _ = w.Close(), syscall.Close(r.fd)
		return nil, nil, err
	}
	return r, w, nil
}

// CloseWriteEnds closes this process's copies of the write ends, after the fork.
func (c *Capture) CloseWriteEnds() {
	for _, w := range []*os.File{c.Stdout, c.Stderr} {
		if w != nil {
			_ = w.Close()
		}
	}
}

// ProcessExited reads what the process had printed before its exit, and returns when the sinks have it.
func (c *Capture) ProcessExited() {
	late := time.After(drainTimeout)
	for _, r := range c.readers {
		close(r.exitedCh)
		wake(r.wakeCh)
	}
	for _, r := range c.readers {
		select {
		case <-r.drainedCh:
		case <-late:
			return
		}
	}
}

// Close reads the rest and ends the reading, even if another process has the write end open.
func (c *Capture) Close() {
	for _, r := range c.readers {
		close(r.closedCh)
		wake(r.wakeCh)
	}
	c.group.Wait()
}

// Flush returns when the sinks have all that the process has printed so far, or ctx has ended.
func (c *Capture) Flush(ctx context.Context) error {
	for _, r := range c.readers {
		doneCh := make(chan struct{})
		select {
		case r.flushCh <- doneCh:
		case <-r.drainedCh:
			continue
		case <-ctx.Done():
			return ctx.Err()
		}
		wake(r.wakeCh)
		select {
		case <-doneCh:
		case <-r.drainedCh:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// run reads until Close.
func (r *pipeReader) run() {
	defer r.closePipe()
	buf := make([]byte, 32<<10)
	exitedCh, drained, open := r.exitedCh, false, true
	for {
		if open {
			open = r.poller.arm(r) == nil // fails only if the poller is closed
		}
		var doneCh chan struct{}
		var exited, ended bool
		select {
		case <-r.readyCh:
			open = r.readSome(buf)
		case doneCh = <-r.flushCh:
			_, open = r.drain(buf, drainMost)
		case <-exitedCh:
			exitedCh, exited = nil, true
			_, open = r.drain(buf, drainMost)
		case <-r.closedCh:
			ended = true
			r.drain(buf, drainMost)
		}
		if exited || ended || !open {
			r.emitLines(r.splitter.rest()) // the end of the line never comes
			r.afterRead()
		}
		if doneCh != nil {
			close(doneCh)
		}
		if !drained && (exited || ended || !open) {
			drained = true
			close(r.drainedCh)
		}
		if ended {
			return
		}
	}
}

// readSome reads what is in the pipe, and then waits a moment if the process prints all the time and its pipe does not fill up,
// so that the next read gets many lines.
func (r *pipeReader) readSome(buf []byte) (open bool) {
	taken, open := r.drain(buf, pipeSize)
	now := time.Now()
	often := now.Sub(r.readAt) < 2*readPause
	r.readAt = now
	if !often || taken > pipeSize/4 {
		return open
	}
	t := time.NewTimer(readPause)
	defer t.Stop()
	select {
	case <-t.C:
	case <-r.wakeCh:
	}
	return open
}

// closePipe gives processes that still print a broken pipe.
func (r *pipeReader) closePipe() {
	r.poller.remove(r)
	_ = syscall.Close(r.fd)
}

// drain reads what is in the pipe now, about limit bytes at most. It returns their number, and whether the pipe is open.
func (r *pipeReader) drain(buf []byte, limit int) (taken int, open bool) {
	defer r.afterRead()
	for taken < limit {
		n, err := syscall.Read(r.fd, buf)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if n <= 0 {
			return taken, errors.Is(err, syscall.EAGAIN)
		}
		if r.sink.Raw != nil {
			r.sink.Raw(buf[:n])
		}
		r.emitLines(r.splitter.split(buf[:n]))
		if taken += n; n < len(buf) {
			break // the pipe was empty
		}
	}
	return taken, true
}

func (r *pipeReader) emitLines(lines []string) {
	if len(lines) > 0 {
		r.sink.Lines(lines)
	}
}

// wake wakes the receiver of a channel that holds one.
func wake(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}
