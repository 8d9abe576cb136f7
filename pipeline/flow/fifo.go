package flow

import "slices"

// fifo is a queue. The zero value is empty.
type fifo[T any] struct {
	items []T
	head  int
}

func (q *fifo[T]) len() int { return len(q.items) - q.head }

func (q *fifo[T]) push(v T) { q.items = append(q.items, v) }

func (q *fifo[T]) pushFront(v T) {
	if q.head > 0 {
		q.head--
		q.items[q.head] = v
		return
	}
	q.items = slices.Insert(q.items, 0, v)
}

// front returns the next element; the queue must not be empty.
func (q *fifo[T]) front() T { return q.items[q.head] }

func (q *fifo[T]) pop() (v T, ok bool) {
	if q.len() == 0 {
		return v, false
	}
	v = q.items[q.head]
	var zero T
	q.items[q.head] = zero
	q.head++
	if q.head == len(q.items) {
		q.items, q.head = q.items[:0], 0
	} else if q.head > 1024 && q.head > len(q.items)/2 {
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
	return v, true
}

// all returns the elements, oldest first. It is valid until the next change.
func (q *fifo[T]) all() []T { return q.items[q.head:] }

// remove removes the elements for which gone returns true.
func (q *fifo[T]) remove(gone func(T) bool) {
	q.items = slices.DeleteFunc(slices.Clone(q.all()), gone)
	q.head = 0
}

// takeIf calls take with the elements that fit, in order, and removes those taken, until take reports that it wants no
// more.
func (q *fifo[T]) takeIf(fits func(T) bool, take func(T) (taken, more bool)) {
	all := q.all()
	left := all[:0]
	for i, v := range all {
		if !fits(v) {
			left = append(left, v)
			continue
		}
		taken, more := take(v)
		if !taken {
			left = append(left, v)
		}
		if !more {
			left = append(left, all[i+1:]...)
			break
		}
	}
	clear(all[len(left):])
	q.items = q.items[:q.head+len(left)]
}
