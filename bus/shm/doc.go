// Package shm shares large bodies between the processes of one host without copying them to each receiver.
//
// A process that sends has an Arena: memfd segments, sealed against shrinking and growing, from which it takes one region per body.
// A process that receives has a Reader: it claims a region from the arena's process over a Unix socket, maps the segment once,
// privately, and uses the body in place.
//
//	arena, err := shm.Open(shm.Config{})       // in the sender
//	body := arena.Alloc(64 << 20)              // nil: no shared memory is left; use other memory
//	fill(body)
//	location := arena.Locate(body)             // travels to the receiver
//	arena.Free(body)                           // when it need not be claimed any more; readers keep it
//
//	reader := shm.NewReader(shm.Config{})      // in the receiver
//	reader.Attach(location, 64<<20, func(body []byte) { … }) // nil: take the body another way
//	reader.Release(body)
//
// Nothing here is needed for a call to succeed: every refusal means that the body is pulled over the bus instead.
package shm
