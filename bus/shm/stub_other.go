//go:build !linux

package shm

import "troupe/bus/wire"

// Arena is not available on this system.
type Arena struct{}

// Stats is what an arena has at the moment.
type Stats struct {
	Segments int
	Bytes    int64
	InUse    int
	Lent     int
	Readers  int
}

// MakeDir reports ErrUnsupported.
func (c Config) MakeDir() error { return ErrUnsupported }

// Open reports ErrUnsupported.
func Open(Config) (*Arena, error) { return nil, ErrUnsupported }

func (a *Arena) ID() string                  { return "" }
func (a *Arena) CloseUnused() (bool, error)  { return true, nil }
func (a *Arena) Close() error                { return nil }
func (a *Arena) Alloc(int) []byte            { return nil }
func (a *Arena) Locate([]byte) wire.Location { return wire.Location{} }
func (a *Arena) Free([]byte) bool            { return false }
func (a *Arena) Stats() Stats                { return Stats{} }

// Join finds no other process.
func (a *Arena) Join(_ *Reader, _ string, _ int64, _ func(), done func(*Fetch, []byte)) {
	done(nil, nil)
}

// Fetch is never made on this system.
type Fetch struct{}

func (f *Fetch) Room() []byte            { return nil }
func (f *Fetch) Moved()                  {}
func (f *Fetch) Whole(done func([]byte)) { done(nil) }
func (f *Fetch) Hold() func()            { return nil }
func (f *Fetch) End()                    {}

// Reader attaches nothing on this system.
type Reader struct{}

func NewReader(Config) *Reader { return &Reader{} }

func (r *Reader) Attach(_ wire.Location, _ int64, done func([]byte)) { done(nil) }
func (r *Reader) Detach([]byte, []Range) bool                        { return false }
func (r *Reader) Release([]byte) bool                                { return false }
func (r *Reader) Forking() (ended func())                            { return nil }
func (r *Reader) Attached() int                                      { return 0 }
func (r *Reader) Close()                                             {}
