package main

import (
	"context"
	"errors"
	"sync"

	"troupe/bus"
	"troupe/roles"
	"troupe/weights"
)

// deviceMover has a thread of Python move the bytes of weights on devices: it implements weights.Device. The thread asks for one order
// after the other, each time with what became of the one before (weightsMove).
type deviceMover struct {
	orders chan *moveOrder
	ended  chan struct{} // closed when the runtime is

	mu    sync.Mutex // guards what follows
	last  uint64
	given map[uint64]*moveOrder // orders that are carried out
	known map[uint64]arenaKeys  // by binding, the arenas that Python knows
}

const maxKnown = 64

// arenaKeys are the names of the arenas of a binding by use: one that it packs, and one that it takes.
type arenaKeys map[moveKind]string

type moveKind string

const (
	movePack   moveKind = "pack"   // tensors to an arena whose buckets are lent
	moveTake   moveKind = "take"   // buckets to the arena of the binding
	moveUnpack moveKind = "unpack" // the arena of the binding to tensors
)

// moveOrder is an order and its outcome.
type moveOrder struct {
	Number  uint64         `msgpack:"number"`
	What    moveKind       `msgpack:"what"`
	Binding uint64         `msgpack:"binding"`
	Starts  []int64        `msgpack:"starts"` // of the buckets in the arena
	Sizes   []int64        `msgpack:"sizes"`
	Copies  []byte         `msgpack:"copies"` // of an arena that Python does not know: deviceCopy records
	Buckets []deviceBucket `msgpack:"buckets"`

	outcome chan moveOutcome
}

// deviceBucket is a bucket that is taken, or that was packed or taken.
type deviceBucket struct {
	Owner   string `msgpack:"owner"`
	ID      uint64 `msgpack:"id"`
	Bytes   int64  `msgpack:"bytes"`
	Digest  uint64 `msgpack:"digest"`
	Detail  []byte `msgpack:"detail"`
	Way     string `msgpack:"way"`
	Address uint64 `msgpack:"address"` // of the body in memory of the host; 0: there is none
}

type moveOutcome struct {
	buckets []deviceBucket
	err     error
}

func newDeviceMover() *deviceMover {
	return &deviceMover{orders: make(chan *moveOrder), ended: make(chan struct{}), given: map[uint64]*moveOrder{}, known: map[uint64]arenaKeys{}}
}

var errMoverEnded = bus.Errorf(bus.CodeClosed, "the session is closed, and nothing moves weights on its device")

// do gives an order to Python and waits for its outcome. An order that was given is not given up: it uses memory of the caller.
func (m *deviceMover) do(ctx context.Context, what moveKind, a weights.Arena, buckets []deviceBucket) ([]deviceBucket, error) {
	o := &moveOrder{What: what, Binding: a.Binding, Buckets: buckets, outcome: make(chan moveOutcome, 1)}
	for _, e := range a.Buckets {
		o.Starts, o.Sizes = append(o.Starts, e.Start), append(o.Sizes, e.Bytes)
	}
	of := what
	if what == moveUnpack {
		of = moveTake
	}
	m.mu.Lock()
	m.last++
	o.Number = m.last
	known := m.known[a.Binding][of] == a.Name
	m.mu.Unlock()
	if !known {
		for i := range a.Copies {
			o.Copies = append(o.Copies, bytesOf(&a.Copies[i])...)
		}
	}
	select {
	case m.orders <- o:
	case <-m.ended:
		return nil, errMoverEnded
	case <-ctx.Done():
		return nil, bus.Errorf(bus.CodeOf(ctx.Err()), "the device of this process moves other weights: %w", ctx.Err())
	}
	select {
	case out := <-o.outcome:
		m.mu.Lock()
		defer m.mu.Unlock()
		if len(m.known) >= maxKnown { // bindings come and go; the copies of those that stay are sent again
			clear(m.known)
		}
		if m.known[a.Binding] == nil {
			m.known[a.Binding] = arenaKeys{}
		}
		if m.known[a.Binding][of] = a.Name; out.err != nil {
			delete(m.known[a.Binding], of)
		}
		return out.buckets, out.err
	case <-m.ended:
		return nil, errMoverEnded
	}
}

func (m *deviceMover) Pack(ctx context.Context, a weights.Arena) ([]weights.DeviceBucket, error) {
	packed, err := m.do(ctx, movePack, a, nil)
	if err != nil {
		return nil, err
	}
	return fromDevice(packed), nil
}

func (m *deviceMover) Take(ctx context.Context, a weights.Arena, from []weights.DeviceBucket) ([]weights.DeviceBucket, error) {
	buckets := make([]deviceBucket, len(from))
	for i, k := range from {
		buckets[i] = deviceBucket{Owner: k.Owner, ID: k.ID, Bytes: k.Bytes, Detail: k.Detail}
		if len(k.Body) > 0 {
			buckets[i].Address = uint64(address(k.Body))
		}
	}
	taken, err := m.do(ctx, moveTake, a, buckets)
	if err != nil {
		return nil, err
	}
	return fromDevice(taken), nil
}

func (m *deviceMover) Unpack(ctx context.Context, a weights.Arena) error {
	_, err := m.do(ctx, moveUnpack, a, nil)
	return err
}

func fromDevice(buckets []deviceBucket) (out []weights.DeviceBucket) {
	for _, k := range buckets {
		out = append(out, weights.DeviceBucket{Owner: k.Owner, ID: k.ID, Bytes: k.Bytes, Digest: k.Digest, Detail: k.Detail, Way: k.Way})
	}
	return out
}

// weightsMoveRequest asks for the next order, and says what became of the one before.
type weightsMoveRequest struct {
	ofRuntime
	Number  uint64         `msgpack:"number"` // of the order before; 0: there was none
	Buckets []deviceBucket `msgpack:"buckets"`
	Failure string         `msgpack:"failure,omitempty"` // why it failed
}

func (c *core) weightsMove(ctx context.Context, _ *roles.Runtime, r weightsMoveRequest) (*moveOrder, error) {
	if _, err := c.weightsClient(r.Runtime); err != nil {
		return nil, err
	}
	c.mu.Lock()
	m := c.movers[r.Runtime]
	c.mu.Unlock()
	if m == nil {
		return nil, errMoverEnded
	}
	return m.next(ctx, r)
}

func (m *deviceMover) next(ctx context.Context, r weightsMoveRequest) (*moveOrder, error) {
	m.mu.Lock()
	done := m.given[r.Number]
	delete(m.given, r.Number)
	m.mu.Unlock()
	if done != nil {
		out := moveOutcome{buckets: r.Buckets}
		if r.Failure != "" {
			out.err = bus.Errorf(bus.CodeApplication, "%w", errors.New(r.Failure))
		}
		done.outcome <- out
	}
	select {
	case o := <-m.orders:
		m.mu.Lock()
		defer m.mu.Unlock()
		m.given[o.Number] = o
		return o, nil
	case <-m.ended:
		return nil, errMoverEnded
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
