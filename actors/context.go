package actors

import (
	"context"
	"sync"
	"time"

	"troupe/bus"
)

// callContext is the context of one call. It costs next to nothing until somebody asks for its channel, and ends with
// the deadline, with a cancel, or when the method returns. A method may leave it to others who keep it for longer, so it
// is apart from the call, whose memory is used again.
type callContext struct {
	worker   *Worker
	deadline instant // 0: none

	mu     sync.Mutex
	call   *call         // nil when its method has returned
	doneCh chan struct{} // nil until asked for
	err    error
	timer  *time.Timer
	after  map[*func()]struct{} // of contexts derived from this one
}

var _ context.Context = (*callContext)(nil)

func (c *callContext) Deadline() (time.Time, bool) {
	if c.deadline == 0 {
		return time.Time{}, false
	}
	return c.deadline.time(), true
}

func (c *callContext) Done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.doneCh == nil {
		c.doneCh = make(chan struct{})
		if c.err != nil {
			close(c.doneCh)
		}
	}
	return c.doneCh
}

func (c *callContext) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

func (c *callContext) Value(key any) any {
	if _, ok := key.(callKey); ok {
		return c
	}
	return nil
}

// AfterFunc lets contexts that are derived from this one follow it without a goroutine each; package context looks for
// it.
func (c *callContext) AfterFunc(f func()) (stop func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		bus.Go(f)
		return func() bool { return false }
	}
	if c.after == nil {
		c.after = map[*func()]struct{}{}
	}
	key := &f
	c.after[key] = struct{}{}
	return func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		_, waiting := c.after[key]
		delete(c.after, key)
		return waiting
	}
}

// begin arms the deadline. It is called before the method runs.
func (c *callContext) begin() {
	if c.deadline == 0 {
		return
	}
	left := time.Until(c.deadline.time())
	if left <= 0 {
		c.cancel(context.DeadlineExceeded)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil { // else it was cancelled before it began
		c.timer = time.AfterFunc(left, func() { defer bus.Recover(); c.cancel(context.DeadlineExceeded) })
	}
}

// end is when the method has returned: the context knows no more of the call.
func (c *callContext) end() {
	c.cancel(context.Canceled)
	c.mu.Lock()
	c.call = nil
	c.mu.Unlock()
}

// cancel ends the context, once.
func (c *callContext) cancel(err error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	c.err = err
	if c.doneCh != nil {
		close(c.doneCh)
	}
	if c.timer != nil {
		c.timer.Stop()
	}
	after := c.after
	c.after = nil
	c.mu.Unlock()
	for f := range after {
		bus.Go(*f)
	}
}

type callKey struct{}

// CallInfo is what a method may know of the call it serves.
type CallInfo struct {
	Session string // who calls, for programs
	Caller  string // who calls, for people
	Seq     uint64
	Method  string
	Role    bus.Address
	Rank    int
	NoData  bool   // the rank was called with the metadata alone
	Meta    []byte // the dispatch mode's metadata, msgpack
	Trace   string
	Queued  time.Duration
	Host    *Host // to make calls from inside a method
}

// Current is the call that ctx belongs to. ok is false outside a method. When the method has returned, only its worker is
// known: Role, Rank and Host.
func Current(ctx context.Context) (info CallInfo, ok bool) {
	c, ok := ctx.Value(callKey{}).(*callContext)
	if !ok {
		return CallInfo{}, false
	}
	w := c.worker
	info = CallInfo{Role: w.spec.Address, Rank: w.spec.Rank, Host: w.host}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.call != nil {
		h := c.call.header
		info.Session, info.Caller, info.Seq, info.Method = h.Session, h.Caller, h.Seq, h.Method
		info.NoData, info.Meta, info.Trace = h.NoData, h.Meta, h.Trace
		info.Queued = c.call.started.sub(c.call.arrived)
	}
	return info, true
}
