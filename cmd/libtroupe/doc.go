// Command libtroupe is the Go core as a C shared library: a dozen functions and one queue of completions, for programs in
// other languages. Python loads it with ctypes; see DESIGN.md for the border, and python/ for the other side of it.
//
//	go build -buildmode=c-shared -o libtroupe.so ./cmd/libtroupe
//
// What holds for every function:
//   - It returns soon. Whatever may wait is asked for with a token and answered by a completion; the caller waits on the
//     file descriptor of troupe_init, where signals and event loops can reach it. There are no callbacks.
//   - Pointers that are passed in belong to the caller and are not used after the function has returned. Memory that is
//     given out (troupe_alloc, large bodies in troupe_take) stays where it is until it is handed over or released.
//   - A panic is recovered and becomes an error code; troupe_error says more.
//   - It is safe to call from any thread, but not in a child of fork: the other threads of Go do not exist there.
package main
