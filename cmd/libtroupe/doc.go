// Command libtroupe is the Go core as a C shared library, for programs in other languages: a dozen functions and one queue
// of completions. Python loads it with ctypes; see DESIGN.md for the interface and python/ for its user.
//
//	go build -buildmode=c-shared -o libtroupe.so ./cmd/libtroupe
//
// Every function:
//   - returns soon. A request that may wait has a token and is answered by a completion; the caller waits on the file
//     descriptor of troupe_init, where signals and event loops work. There are no callbacks.
//   - does not use pointers of the caller after it has returned. Memory of troupe_alloc, and large bodies of troupe_take,
//     stays in place until it is handed over or released.
//   - recovers panics and returns an error code; troupe_error has the text.
//   - may be called from any thread, but not in a child of fork, which has none of Go's other threads.
package main
