package actors

import (
	"context"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/recorder"
)

// callContext is the context of one call. It allocates its channel only when Done is called, and ends with the
// deadline, with a cancellation or when the method returns. It is separate from the call, because code
// that the method started may keep the context longer than the call and its body live.
type callContext struct {
	worker   *Worker
	deadline instant // 0: none

	mu     sync.Mutex
	call   *call         // nil once the method has returned
	doneCh chan struct{} // nil until Done is called
	err    error
	timer  *time.Timer
	after  map[*func()]struct{} // functions of AfterFunc
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
	switch key.(type) {
	case callKey, recorder.ScopeKey:
		return c
	}
	return nil
}

// RecorderScope is the call for the flight recorder.
func (c *callContext) RecorderScope() recorder.Scope {
	s := &c.worker.spec
	scope := recorder.Scope{Namespace: s.Address.Namespace, Role: s.Address.Role, Rank: s.Rank}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.call != nil {
		scope.Call = recorder.ID{Session: c.call.header.Session, Seq: c.call.header.Seq}
		scope.Trace = recorder.RunTrace(c.call.header.Trace, scope.Call, scope.Role, scope.Rank)
	}
	return scope
}

// AfterFunc implements the interface that package context looks for: derived contexts need no goroutine.
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

// begin starts the timer of the deadline, before the method runs.
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
	if c.err == nil { // a cancelled context needs no timer
		c.timer = time.AfterFunc(left, func() { defer bus.Recover(); c.cancel(context.DeadlineExceeded) })
	}
}

// end cancels the context and detaches it from the call, after the method has returned.
func (c *callContext) end() {
	c.cancel(context.Canceled)
	c.mu.Lock()
	c.call = nil
	c.mu.Unlock()
}

// cancel ends the context; only the first error counts.
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

// CallInfo describes the current call to its method.
type CallInfo struct {
	Session string // the caller's id
	Caller  string // the caller's name in messages
	Seq     uint64
	Method  string
	Role    bus.Address
	Rank    int
	NoData  bool   // the rank gets the metadata without rows
	Meta    []byte // metadata of the dispatch mode, msgpack
	Trace   string
	Queued  time.Duration
	// OnDevice: tensors of the answer may stay on their device.
	OnDevice bool
	Host     *Host // for calls from inside the method
}

// Current describes the call that ctx belongs to. ok is false outside a method. After the method has returned, only
// Role, Rank and Host are set.
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
		info.OnDevice = h.OnDevice
		info.Queued = c.call.started.sub(c.call.arrived)
	}
	return info, true
}
