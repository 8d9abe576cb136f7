package nodes

import (
	"errors"
	"io"
	"os"
	"sync"
	"syscall"
	"time"
)

const (
	pipeSize  = 256 << 10              // bytes that a worker may print before it waits for its agent
	drainMost = 8 << 20                // bytes that are taken from a pipe which a process of the tree goes on filling
	drainTime = 200 * time.Millisecond // how long an exit waits for the last lines
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
	diedCh chan struct{} // closed by died, with a deadline on the pipe
	goneCh chan struct{} // closed by close, with a deadline on the pipe
	heldCh chan struct{} // closed when all that was in the pipe at the death is out of it
}

// newCapture makes the pipes and begins to read. sink is called with each line, by one goroutine for each stream.
func newCapture(sink func(Stream, string)) (*capture, error) {
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
		rd := &reader{pipe: r, emit: func(line string) { sink(s, line) }, diedCh: make(chan struct{}), goneCh: make(chan struct{}), heldCh: make(chan struct{})}
		c.readers = append(c.readers, rd)
		c.group.Go(rd.run)
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

func (r *reader) run() {
	defer r.pipe.Close()
	buf := make([]byte, 32<<10)
	died := r.diedCh
	for {
		n, err := r.pipe.Read(buf)
		r.split.write(buf[:n], r.emit)
		if err == nil {
			continue
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			break // everybody has closed it
		}
		r.drain(buf)
		select {
		case <-r.goneCh:
			if died != nil {
				close(r.heldCh)
			}
			r.split.flush(r.emit)
			return
		default:
		}
		if died != nil {
			r.split.flush(r.emit) // the worker will not go on with it
			close(r.heldCh)
			died = nil
		}
		_ = r.pipe.SetReadDeadline(time.Time{})
		select {
		case <-r.goneCh: // said in between
			_ = r.pipe.SetReadDeadline(time.Now())
		default:
		}
	}
	r.split.flush(r.emit)
	if died != nil {
		close(r.heldCh)
	}
	<-r.goneCh
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
