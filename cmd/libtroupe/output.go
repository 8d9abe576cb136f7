package main

import (
	"os"
	"sync"
	"syscall"
	"time"

	"troupe/bus"
	"troupe/nodes"
	"troupe/roles"
	"troupe/roles/display"
)

// Kinds of records in the output pipe.
const (
	outputEnd     uint32 = 0 // no text: a session has ended, and its output is before the record
	outputStdout  uint32 = 1
	outputStderr  uint32 = 2
	outputFlushed uint32 = 3 // no text: the output that a flush waited for is before the record
)

const (
	outputTimeout = 2 * time.Second // for a reader that does not read, at a flush and at the end of a session
	flushTimeout  = time.Second     // for the agents to send the output of a flush
)

// outputPipe carries the workers' output to a thread of Python, apart from completions, so that no call waits for it, as
// records (outputHead). A reader that does not read blocks the sink of the
// runtime, which refuses more output from agents then.
type outputPipe struct {
	mu    sync.Mutex // held while a record is written
	read  int        // -1: not opened
	write *os.File
}

// open makes the pipe, if there is none, and returns its end for reading, which blocks.
func (p *outputPipe) open() (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.write != nil {
		return p.read, nil
	}
	var fds [2]int
	if err := syscall.Pipe(fds[:]); err != nil {
		return -1, bus.Errorf(bus.CodeUnavailable, "make a pipe for the workers' output: %w", err)
	}
	syscall.CloseOnExec(fds[0])
	syscall.CloseOnExec(fds[1])
	if err := syscall.SetNonblock(fds[1], true); err != nil {
		return -1, bus.Errorf(bus.CodeUnavailable, "make a pipe for the workers' output: %w", err)
	}
	p.read, p.write = fds[0], os.NewFile(uintptr(fds[1]), "output")
	return p.read, nil
}

// show writes a text. It blocks while the pipe is full.
func (p *outputPipe) show(t display.Text) {
	kind := outputStdout
	if t.Stream == nodes.Stderr {
		kind = outputStderr
	}
	p.put(kind, t.Text)
}

func (p *outputPipe) put(kind uint32, text []byte) {
	record := append(appendRecord(nil, outputHead{kind, uint32(len(text))}), text...)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.write != nil {
		_, _ = p.write.Write(record) // fails only if Python has closed its end
	}
}

// mark writes a record without text. It gives up if the reader does not read.
func (p *outputPipe) mark(kind uint32) {
	doneCh := make(chan struct{})
	bus.Go(func() {
		defer close(doneCh)
		p.put(kind, nil)
	})
	select {
	case <-doneCh:
	case <-time.After(outputTimeout):
	}
}

// outputRequest is what the driver wants to see of its workers' output.
type outputRequest struct {
	Mode     nodes.OutputMode `msgpack:"mode"` // empty: nothing is shown
	Terminal bool             `msgpack:"terminal"`
	Color    bool             `msgpack:"color"`
}

// apply sets the output of a runtime.
func (r outputRequest) apply(p *outputPipe, cfg *roles.Config) {
	if r.Mode != nodes.OutputUnset {
		cfg.OutputFunc, cfg.OutputMode, cfg.OutputTerminal, cfg.OutputColor = p.show, r.Mode, r.Terminal, r.Color
	}
}
