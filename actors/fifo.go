package actors

// fifo is a queue that reuses its memory. The zero fifo is empty.
type fifo[T any] struct {
	items []T
	head  int
}

func (f *fifo[T]) len() int { return len(f.items) - f.head }

func (f *fifo[T]) push(v T) {
	if f.head > 0 && len(f.items) == cap(f.items) { // slide down instead of growing
		n := copy(f.items, f.items[f.head:])
		clear(f.items[n:])
		f.items, f.head = f.items[:n], 0
	}
	f.items = append(f.items, v)
}

// first is the oldest item; the queue must not be empty.
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

// all are the items, oldest first; a view.
func (f *fifo[T]) all() []T { return f.items[f.head:] }

// remove takes out the items that drop chooses.
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
