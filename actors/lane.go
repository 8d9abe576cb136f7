package actors

import "troupe/bus"

// Lane is a queue of a worker. Calls start in order of arrival, at most Limit at a time.
type Lane struct {
	Name  string `msgpack:"name" json:"name"`
	Limit int    `msgpack:"limit" json:"limit"`
}

// Serial runs one call at a time. It is the default lane of methods.
var Serial = Lane{Name: "work", Limit: 1}

// Control is the lane of control calls, which run concurrently and never wait for work.
var Control = Lane{Name: "control", Limit: 64}

// Concurrent runs up to n calls at once.
func Concurrent(n int) Lane { return Lane{Name: "concurrent", Limit: n} }

func (l Lane) check() error {
	if err := bus.CheckName("lane", l.Name); err != nil {
		return err
	}
	for _, own := range []Lane{Serial, Control} {
		if l.Name == own.Name && l.Limit != own.Limit {
			return bus.Errorf(bus.CodeInvalid, "lane %q is built in, with limit %d, not %d; choose another name", l.Name, own.Limit, l.Limit)
		}
	}
	if l.Limit < 1 {
		return bus.Errorf(bus.CodeInvalid, "lane %q: the limit must be at least 1, not %d", l.Name, l.Limit)
	}
	return nil
}

// queue is one lane of one worker. The worker's mutex guards it.
type queue struct {
	lane    Lane
	waiting fifo[*call] // in order of arrival
	running int
}

// next removes and returns the first call if its body has arrived and a slot is free. A call without its body blocks
// those behind it: the order is that of the envelopes. A call that awaits the value of a reference blocks only those of its own
// caller (or sequencer): the value may be the result of a call that waits for another one in this lane.
func (q *queue) next() *call {
	if q.running >= q.lane.Limit || q.waiting.len() == 0 {
		return nil
	}
	if first := q.waiting.first(); first.ready() {
		q.running++
		return q.waiting.pop()
	} else if !first.awaitsValues() {
		return nil
	}
	c := q.nextOfOthers()
	if c != nil {
		q.running++
		q.waiting.remove(func(other *call) bool { return other == c })
	}
	return c
}

// nextOfOthers is the first call that may start although calls before it await values.
func (q *queue) nextOfOthers() *call {
	blocked := map[string]bool{}
	for _, c := range q.waiting.all() {
		switch by := c.header.OrderedBy(); {
		case blocked[by]:
		case c.ready():
			return c
		case !c.awaitsValues():
			return nil
		default:
			blocked[by] = true
		}
	}
	return nil
}

// fifo is a queue that reuses its array. The zero fifo is empty.
type fifo[T any] struct {
	items []T
	head  int
}

func (f *fifo[T]) len() int { return len(f.items) - f.head }

func (f *fifo[T]) push(v T) {
	if f.head > 0 && len(f.items) == cap(f.items) { // reuse the space before head instead of growing
		n := copy(f.items, f.items[f.head:])
		clear(f.items[n:])
		f.items, f.head = f.items[:n], 0
	}
	f.items = append(f.items, v)
}

// first returns the oldest item; the fifo must not be empty.
func (f *fifo[T]) first() T { return f.items[f.head] }

func (f *fifo[T]) pop() T {
	var zero T
	v := f.items[f.head]
	f.items[f.head] = zero
	f.head++
	if f.head == len(f.items) {
		f.items, f.head = f.items[:0], 0
	}
	return v
}

// all returns a view of the items, oldest first.
func (f *fifo[T]) all() []T { return f.items[f.head:] }

// remove removes the items for which drop is true.
func (f *fifo[T]) remove(drop func(T) bool) {
	kept := f.items[:f.head]
	for _, v := range f.items[f.head:] {
		if !drop(v) {
			kept = append(kept, v)
		}
	}
	clear(f.items[len(kept):])
	f.items = kept
}
