package values

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
)

const (
	answerKept  = 30 * time.Second // for a requester that has not pulled a long answer
	answersMost = 256 << 20        // bytes of long answers that are not pulled yet
	slowestLink = 128 << 10        // bytes a second that a long request is expected to make at least
)

// Exchange sends requests and answers of any size in one namespace. One that does not fit into a message is a body, which the other side
// pulls. The session for that is opened when the first long message is sent or received, and ends with the bus. It is safe for concurrent use.
type Exchange struct {
	bus       *bus.Bus
	namespace string

	mu      sync.Mutex // guards what follows
	store   *Store
	answers int // bytes of long answers that are not pulled yet
}

// NewExchange makes an exchange; it sends nothing.
func NewExchange(b *bus.Bus, namespace string) *Exchange {
	return &Exchange{bus: b, namespace: namespace}
}

// Store is the store of the exchange's session.
func (x *Exchange) Store() (*Store, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.store == nil {
		store, err := Open(x.bus, x.namespace)
		if err != nil {
			return nil, err
		}
		store.uploads.next = rand.Uint64() >> 16 // an agent's session may have the name of an earlier one
		x.store = store
	}
	return x.store, nil
}

// Close ends the session, with the transfers that are on their way. It may be called more than once.
func (x *Exchange) Close() {
	x.mu.Lock()
	store := x.store
	x.mu.Unlock()
	if store != nil {
		store.session.Close()
	}
}

func (x *Exchange) isLong(data []byte) bool { return len(data) > x.bus.MaxPayload()-bus.MaxEnvelope }

// Request sends a request and returns the data of the answer. try bounds the wait for the answer of a request that fits into a message; a longer
// request, and the transfer of a long answer, may take longer.
func (x *Exchange) Request(ctx context.Context, subject string, data []byte, try time.Duration) ([]byte, error) {
	if x.isLong(data) {
		store, err := x.Store()
		if err != nil {
			return nil, err
		}
		try += time.Duration(len(data)/slowestLink) * time.Second
		ref := store.Offer(data, wire.RankSet{}, "", nil)
		defer store.Withdraw(ref)
		data = longMessage(ref)
	}
	once, cancel := context.WithTimeout(ctx, try)
	defer cancel()
	m, err := x.bus.Request(once, subject, data)
	if err != nil {
		return nil, err
	}
	return x.Read(ctx, m)
}

// Read is the data of a request or an answer. It waits while a long one is pulled.
func (x *Exchange) Read(ctx context.Context, m *bus.Msg) ([]byte, error) {
	ref, long := readLong(m.Data)
	if !long {
		return m.Data, nil
	}
	store, err := x.Store()
	if err != nil {
		return nil, err
	}
	return store.Pull(ctx, ref)
}

// Respond sends an answer. A long one is kept until the requester has pulled it.
func (x *Exchange) Respond(m *bus.Msg, data []byte) error {
	if !x.isLong(data) {
		return x.bus.Respond(m, data)
	}
	store, err := x.Store()
	if err != nil {
		return err
	}
	x.mu.Lock()
	full := x.answers+len(data) > answersMost
	if !full {
		x.answers += len(data)
	}
	x.mu.Unlock()
	if full {
		return bus.Errorf(bus.CodeBusy, "an answer of %d bytes exceeds the %d bytes for answers that are not pulled yet; request less or repeat later", len(data), answersMost)
	}
	ref := store.Offer(data, wire.RankSet{}, "", func() {
		x.mu.Lock()
		defer x.mu.Unlock()
		x.answers -= len(data)
	})
	time.AfterFunc(answerKept, bus.Guard(func() { store.withdrawIdle(ref, answerKept) }))
	return x.bus.Respond(m, longMessage(ref))
}

func longMessage(ref wire.BodyRef) []byte {
	return (&wire.Frame{Kind: wire.KindLong, Header: wire.Header{Ref: ref}}).Append(nil)
}

// readLong is the body that a message names. No value of msgpack or JSON begins as a frame does.
func readLong(data []byte) (wire.BodyRef, bool) {
	f, err := wire.ParseFrame(data)
	if err != nil || f.Kind != wire.KindLong || f.Header.Ref.Owner == "" {
		return wire.BodyRef{}, false
	}
	return f.Header.Ref, true
}
