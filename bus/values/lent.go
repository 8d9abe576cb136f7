package values

import (
	"troupe/bus/wire"
)

// Lending is how a lent value is made and ended. Both functions are called once at most with the number of the value, from any goroutine
// and with locks held: they must not block, nor call References.
type Lending struct {
	// WantedFunc is called when a process first requests the value's bytes. Fill follows.
	WantedFunc func(id uint64)
	// FreedFunc is called when nothing refers to the value any more, or the session has ended.
	FreedFunc func(id uint64)
}

// Lend makes a value of something that is not in this process's memory, a tensor on a device for instance, with one use. The value
// is there at once. Its bytes are made when they are requested; processes that reach the device never request them.
func (r *References) Lend(l Lending) (wire.Reference, error) {
	v := &ownedValue{state: valueLent, uses: 1, lending: l}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return wire.Reference{}, errReferencesClosed
	}
	r.addLocked(v)
	return r.nameOf(v), nil
}

// wantLocked requests the bytes of a lent value, once: it is pending until Fill.
func (r *References) wantLocked(v *ownedValue) {
	if v.state != valueLent {
		return
	}
	v.state = valuePending
	if want := v.lending.WantedFunc; want != nil {
		want(v.id)
	}
}

// Fill gives a lent value that was wanted its bytes, which belong to it from now on, or the error that prevents them. It reports false
// if the value was freed meanwhile: then the body still belongs to the caller.
func (r *References) Fill(id uint64, body []byte, memory Memory, failure error) bool {
	r.mu.Lock()
	v := r.owned[id]
	if v == nil || v.state != valuePending || r.closed {
		r.mu.Unlock()
		return false
	}
	var settle func()
	if failure != nil {
		settle = r.failLocked(v, failure)
	} else {
		r.bound.add(len(body))
		r.placeLocked(v, body, memory, nil)
		settle = r.settleLocked(v)
	}
	r.mu.Unlock()
	settle()
	return true
}

// CountLent and CountTaken count the bytes of a tensor that was lent, and of one of another process that was received from its device.
func (r *References) CountLent(n int64)  { r.store.CountSent(PathDevice, n) }
func (r *References) CountTaken(n int64) { r.store.CountReceived(PathDevice, n) }
