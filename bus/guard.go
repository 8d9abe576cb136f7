package bus

import (
	"context"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

// onPanic is what the program wants done about a panic in a goroutine of ours; nil: what Go does, which is to end the program.
var onPanic atomic.Pointer[func(p any, stack []byte)]

// OnPanic has a panic in any goroutine of this package and of those above it told to handle instead of ending the program. It
// is for a program that must outlive a bug, an interpreter that has loaded us as a library; handle must then give up whatever
// stands on us, because locks may be held for ever. It is called on the goroutine that panicked, and must not block. nil:
// the program ends, as it does in any other.
func OnPanic(handle func(p any, stack []byte)) {
	if handle == nil {
		onPanic.Store(nil)
		return
	}
	onPanic.Store(&handle)
}

// Recover is deferred by every goroutine, and every function that somebody else calls on one of theirs. A test in the
// repository finds those that do not.
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

// Guard is do for goroutines that somebody else starts: those of a group, and timers.
func Guard(do func()) func() {
	return func() {
		defer Recover()
		do()
	}
}

// GuardMsg is hear for the goroutines of subscriptions.
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
