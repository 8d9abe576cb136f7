package bus

import (
	"context"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

// onPanic handles a panic in a goroutine of Troupe; nil: the panic ends the program.
var onPanic atomic.Pointer[func(p any, stack []byte)]

// OnPanic sets the handler of a panic in any goroutine of this package and of the packages above it. It is for a
// program that must survive a bug, such as an interpreter that has loaded Troupe as a library. After a panic handle
// must give up everything that uses Troupe, because locks may be held for ever. It runs on the goroutine that panicked,
// and must not block. nil: a panic ends the program.
func OnPanic(handle func(p any, stack []byte)) {
	if handle == nil {
		onPanic.Store(nil)
		return
	}
	onPanic.Store(&handle)
}

// Recover is deferred by every goroutine, and by every function that another package calls on its goroutine. A test in
// the repository finds those that do not.
func Recover() {
	handle := onPanic.Load()
	if handle == nil {
		return
	}
	if p := recover(); p != nil {
		(*handle)(p, debug.Stack())
	}
}

// Go runs do in a goroutine.
func Go(do func()) {
	go func() {
		defer Recover()
		do()
	}()
}

// Guard is do with Recover, for goroutines that other packages start: those of wait groups and timers.
func Guard(do func()) func() {
	return func() {
		defer Recover()
		do()
	}
}

// GuardMsg is Guard for the handlers of subscriptions.
func GuardMsg(hear nats.MsgHandler) nats.MsgHandler {
	return func(m *nats.Msg) {
		defer Recover()
		hear(m)
	}
}

// Sleep waits for d, or returns the cause when ctx ends first.
func Sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}
