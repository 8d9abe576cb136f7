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
	pipeSize  = 256 << 10       // bytes that a worker may print before it waits for its agent
	drainMost = 8 << 20         // bytes that are taken from a pipe which a process of the tree goes on filling
	drainTime = 2 * time.Second // how long an exit waits for the last lines, on a machine that is overloaded
)

// capture reads what a worker prints. The end of a pipe means nothing here: a process that the worker forked may keep it
// open for ever, or close it early.
type capture struct {
	stdout, stderr *os.File // the worker's ends
	readers        []*reader
	group          sync.WaitGroup
}

// reader is one stream; its goroutine owns all but the channels.
type reader struct {
	pipe   *os.File
	split  splitter
	emit   func(string)
	pause  func()
	diedCh chan struct{}      // closed by died, with a deadline on the pipe
	goneCh chan struct{}      // closed by close, with a deadline on the pipe
	heldCh chan struct{}      // closed when all that was in the pipe at the death is out of it
	askCh  chan chan struct{} // holds one: to be closed when all that is in the pipe is out of it
}

// newCapture makes the pipes and begins to read. sink is called with each line, by one goroutine for each stream, and pause
// by the same when there are no more for now.
func newCapture(sink func(Stream, string), pause func()) (*capture, error) {
	c := &capture{}
	for _, s := range []Stream{Stdout, Stderr} {
		r, w, err := os.Pipe()
		if err != nil {
			c.started()
			c.close()
			return nil, err
		}
		if raw, err := w.SyscallConn(); err == nil {
			const setPipeSize = 1031
			_ = raw.Control(func(fd uintptr) { _, _, _ = syscall.Syscall(syscall.SYS_FCNTL, fd, setPipeSize, pipeSize) }) // a wish
		}
		if s == Stdout {
			c.stdout = w
		} else {
			c.stderr = w
		}
		rd := &reader{pipe: r, emit: func(line string) { sink(s, line) }, pause: pause, diedCh: make(chan struct{}), goneCh: make(chan struct{}), heldCh: make(chan struct{}), askCh: make(chan chan struct{}, 1)}
		c.readers = append(c.readers, rd)
		c.group.Go(bus.Guard(rd.run))
	}
	return c, nil
}

// started closes our copies of the worker's ends, once it has its own or will not get them.
func (c *capture) started() {
	for _, w := range []*os.File{c.stdout, c.stderr} {
		if w != nil {
			_ = w.Close() // only a number
		}
	}
}

// died takes out what the worker had printed when it died, and returns when it has been given to the sink.
func (c *capture) died() {
	late := time.After(drainTime)
	for _, r := range c.readers {
		close(r.diedCh)
		_ = r.pipe.SetReadDeadline(time.Now()) // pipes have deadlines
	}
	for _, r := range c.readers {
		select {
		case <-r.heldCh:
		case <-late:
			return
		}
	}
}

// close takes out what is left, whoever still has the other end, and ends the reading.
func (c *capture) close() {
	for _, r := range c.readers {
		close(r.goneCh)
		_ = r.pipe.SetReadDeadline(time.Now())
	}
	c.group.Wait()
}

// flush returns when all that the worker has printed so far has been given to the sink, or ctx has ended.
func (c *capture) flush(ctx context.Context) error {
	for _, r := range c.readers {
		doneCh := make(chan struct{})
		select {
		case r.askCh <- doneCh:
		case <-r.heldCh:
			continue
		case <-ctx.Done():
			return ctx.Err()
		}
		_ = r.pipe.SetReadDeadline(time.Now())
		select {
		case <-doneCh:
		case <-r.heldCh:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// run reads until it is closed. What interrupts the reading is a deadline in the past, set by who wants something.
func (r *reader) run() {
	defer func() { _ = r.pipe.Close() }() // it was only read
	buf := make([]byte, 32<<10)
	for held := false; ; {
		n, err := r.pipe.Read(buf)
		r.split.write(buf[:n], r.emit)
		if err == nil {
			r.pause()
			continue
		}
		open := errors.Is(err, os.ErrDeadlineExceeded) // otherwise everybody has closed it
		asked, died, gone := r.wanted()
		if open {
			r.drain(buf)
		}
		if died || gone || !open {
			r.split.flush(r.emit) // nobody will go on with it
		}
		r.pause()
		if asked != nil {
			close(asked)
		}
		if !held && (died || gone || !open) {
			held = true
			close(r.heldCh)
		}
		if gone {
			return
		}
		if !open {
			<-r.goneCh
			return
		}
		r.resume(held)
	}
}

// wanted says why the reading was interrupted. It is asked before the pipe is emptied.
func (r *reader) wanted() (asked chan struct{}, died, gone bool) {
	select {
	case asked = <-r.askCh:
	default:
	}
	return asked, closed(r.diedCh), closed(r.goneCh)
}

// resume takes the deadline away, unless something was wanted meanwhile.
func (r *reader) resume(held bool) {
	_ = r.pipe.SetReadDeadline(time.Time{})
	if len(r.askCh) > 0 || closed(r.goneCh) || !held && closed(r.diedCh) {
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

// drain takes out what is in the pipe now, without waiting for more.
func (r *reader) drain(buf []byte) {
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
		r.split.write(buf[:n], r.emit)
		taken += n
	}
}
