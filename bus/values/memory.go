package values

import (
	"troupe/bus/wire"
)

// MaxInline is the largest body that may travel in its frame. Receivers pull larger ones.
const MaxInline = 64 << 10

// Memory allocates bodies over MaxInline outside Go's heap, for use by another language without a copy. A body has one
// owner at a time, which frees it once. Readers report when they are done (Part.DoneFunc).
type Memory interface {
	// Make allocates a body, which need not be zeroed; nil: no memory is available.
	Make(n int) []byte
	// Free releases a body that is not used any more. It ignores bodies that Make did not allocate.
	Free(body []byte)
}

// Sharing is a Memory whose bodies other processes of the host can use in place.
type Sharing interface {
	Memory
	// Locate returns where a body of this memory lies for other processes; zero: it is not shared. A body that has been located is
	// claimed by receivers until it is freed.
	Locate(body []byte) wire.Location
	// Attach obtains the body of n bytes at a location of another process. It calls done once, before it returns or later from another
	// goroutine, with a body that is freed like one of Make, or with nil: then the body is pulled over the bus. It does not block.
	Attach(at wire.Location, n int64, done func(body []byte))
	// Join is for a body of n bytes that several processes of the host may need under the same name. It calls done once, before it
	// returns or later from another goroutine: with a HostFetch, if this process is to pull the body for all; with the body, if
	// another process has pulled it; or with neither: then this process pulls it for itself. waits is called before, if another
	// process is found to pull it. Join does not block, and neither do waits and done.
	Join(name string, n int64, waits func(), done func(f HostFetch, body []byte))
}

// HostFetch is a body that this process pulls for all processes of its host. It ends with Whole or End.
type HostFetch interface {
	// Room is where the body is written.
	Room() []byte
	// Moved reports progress to the processes that wait for the body. Without it they stop waiting soon.
	Moved()
	// Whole reports that the body is whole. It calls done once with this process's own body, which is freed like one of Make; nil: there
	// is none, and Room is valid until done returns.
	Whole(done func(body []byte))
	// Hold keeps what is in Room, also after Whole and End, until release is called; nil: it has ended.
	Hold() (release func())
	// End gives the body up: another process begins anew.
	End()
}

// Locate returns where a body of m lies for other processes of the host; zero: nowhere. m may be nil.
func Locate(m Memory, body []byte) wire.Location {
	if s, ok := m.(Sharing); ok && len(body) > MaxInline {
		return s.Locate(body)
	}
	return wire.Location{}
}

// FreeBody frees a body that m may have allocated; m may be nil.
func FreeBody(m Memory, body []byte) {
	if m != nil && len(body) > MaxInline {
		m.Free(body)
	}
}

// makeBody allocates a body; nil: no memory is available.
func makeBody(m Memory, n int) []byte {
	if m != nil && n > MaxInline {
		return m.Make(n)
	}
	return make([]byte, n)
}
