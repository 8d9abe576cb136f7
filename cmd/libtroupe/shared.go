package main

/*
#include <stdlib.h>
*/
import "C"

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"sync"
	"time"
	"unsafe"

	"troupe/bus"
	"troupe/bus/shm"
	"troupe/bus/values"
	"troupe/bus/wire"
)

// The environment of shared memory.
const (
	shmVariable      = "TROUPE_SHM"       // 0: every body travels over the bus
	shmDirVariable   = "TROUPE_SHM_DIR"   // shm.Config.Dir
	shmLimitVariable = "TROUPE_SHM_LIMIT" // shm.Config.HostLimit, in bytes
	shmKeepVariable  = "TROUPE_SHM_KEEP"  // shm.Config.Keep, in seconds
)

// sharedMemory is the memory that this process shares with others of its host. It is opened when it is first needed; a process that
// cannot open it says so once, and its bodies travel over the bus.
type sharedMemory struct {
	cfg    shm.Config
	off    bool
	reader *shm.Reader

	mu    sync.Mutex // guards what follows
	arena *shm.Arena
	err   error // why there is none
	// forks that are about to happen, by number
	forks    map[uint64]func()
	lastFork uint64
}

func newSharedMemory() *sharedMemory {
	s := &sharedMemory{forks: map[uint64]func(){}}
	s.cfg, s.err = sharedConfig(processEnv)
	s.off = processEnv(shmVariable) == "0"
	if s.err != nil {
		s.report(s.err)
	}
	s.reader = shm.NewReader(s.cfg)
	return s
}

// processEnv is a variable of the process as it is now. In a library os.Getenv has the variables with which the process started.
func processEnv(name string) string {
	text := C.CString(name)
	defer C.free(unsafe.Pointer(text))
	return C.GoString(C.getenv(text))
}

// sharedConfig reads the environment.
func sharedConfig(getenv func(string) string) (shm.Config, error) {
	cfg := shm.Config{Dir: getenv(shmDirVariable), GoFunc: bus.Go, Logger: stderrLog(slog.LevelError)}
	limit, err := positive(getenv, shmLimitVariable, "bytes")
	keep, err2 := positive(getenv, shmKeepVariable, "seconds")
	cfg.HostLimit, cfg.Keep = limit, time.Duration(keep)*time.Second
	return cfg, errors.Join(err, err2)
}

// positive is the number in a variable; 0: it is not set.
func positive(getenv func(string) string, name, unit string) (int64, error) {
	text := getenv(name)
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n <= 0 {
		return 0, fmt.Errorf("%s is %q; give a number of %s", name, text, unit)
	}
	return n, nil
}

func stderrLog(level slog.Level) *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
}

func (s *sharedMemory) report(err error) {
	s.cfg.Logger.Error("troupe: shared memory is not available, and large values travel over the bus; "+shmVariable+"=0 chooses that without this message", "error", err)
}

// open is the arena; nil: there is none.
func (s *sharedMemory) open() *shm.Arena {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.arena == nil && s.err == nil && !s.off {
		if s.arena, s.err = shm.Open(s.cfg); s.err != nil {
			s.report(s.err)
		}
	}
	return s.arena
}

func (s *sharedMemory) opened() *shm.Arena {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.arena
}

// alloc is shared memory for a large body; nil: there is none.
func (s *sharedMemory) alloc(n int) []byte {
	if n <= values.MaxInline {
		return nil
	}
	arena := s.open()
	if arena == nil {
		return nil
	}
	return arena.Alloc(n)
}

func (s *sharedMemory) free(body []byte) {
	if arena := s.opened(); arena != nil {
		arena.Free(body)
	}
}

func (s *sharedMemory) locate(body []byte) wire.Location {
	if arena := s.opened(); arena != nil {
		return arena.Locate(body)
	}
	return wire.Location{}
}

func (s *sharedMemory) attach(at wire.Location, n int64, done func([]byte)) {
	if s.off {
		done(nil)
		return
	}
	s.reader.Attach(at, n, done)
}

func (s *sharedMemory) join(name string, n int64, waits func(), done func(*shm.Fetch, []byte)) {
	var arena *shm.Arena
	if n >= shm.LeastFetch {
		arena = s.open()
	}
	if arena == nil {
		done(nil, nil)
		return
	}
	arena.Join(s.reader, name, n, waits, done)
}

// closeUnused ends the arena of a process that has no session any more, unless a body of it is still in use.
func (s *sharedMemory) closeUnused() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.arena == nil {
		return
	}
	closed, err := s.arena.CloseUnused()
	if err != nil {
		s.cfg.Logger.Error("troupe: leave the directory of shared memory", "error", err)
	}
	if closed {
		s.arena = nil
	}
}

// forking notes that this process is about to fork, under a number; 0: it has no body of another process that the child could read.
func (s *sharedMemory) forking() uint64 {
	ended := s.reader.Forking()
	if ended == nil {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lastFork++
	s.forks[s.lastFork] = ended
	return s.lastFork
}

// forked has the bodies of that moment kept until the pipe's other end is closed: the child has ended, or has executed another program.
func (s *sharedMemory) forked(number uint64, fd int) {
	s.mu.Lock()
	ended := s.forks[number]
	delete(s.forks, number)
	s.mu.Unlock()
	pipe := os.NewFile(uintptr(fd), "fork")
	if ended == nil || pipe == nil {
		return
	}
	bus.Go(func() {
		defer func() { _ = pipe.Close() }() // nothing was written to it
		_, _ = io.Copy(io.Discard, pipe)    // an error ends it as well
		ended()
	})
}
