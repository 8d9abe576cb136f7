package weights

import (
	"context"
	"time"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
)

const (
	largest     = 256 << 10 // bytes of a request or an answer in its message; a longer one is a value that its receiver takes
	takeLimit   = 30 * time.Second
	keepAnswers = time.Minute // how long a long answer is kept for the process that asked
)

// message is a request, or an answer.
type message struct {
	Session string        `msgpack:"session,omitempty"` // of a request: the process that asks
	Name    string        `msgpack:"name,omitempty"`    // of the weights
	Member  string        `msgpack:"member,omitempty"`
	Wait    time.Duration `msgpack:"wait,omitempty"` // that the answer may take
	Body    wire.Raw      `msgpack:"body,omitempty"`
	Owner   string        `msgpack:"owner,omitempty"` // with ID the value that is the body
	ID      uint64        `msgpack:"id,omitempty"`
	Err     *bus.Error    `msgpack:"err,omitempty"`
}

// encode puts a value into a message, or makes a value of it that release frees.
func (m *message) encode(refs *values.References, v any) (release func(), err error) {
	body, err := wire.Marshal(v)
	if err != nil {
		return nil, err
	}
	if len(body) <= largest {
		m.Body = body
		return func() {}, nil
	}
	ref, err := refs.Put(body, nil, nil)
	if err != nil {
		return nil, err
	}
	m.Owner, m.ID = ref.Owner, ref.ID
	return func() { refs.Release(ref) }, nil
}

// decode reads the body of a message. It blocks if the body is a value.
func (m *message) decode(ctx context.Context, refs *values.References, into any) error {
	if err := m.fetch(ctx, refs); err != nil {
		return err
	}
	return wire.Unmarshal(m.Body, into)
}

// fetch makes the body of a message one that is here.
func (m *message) fetch(ctx context.Context, refs *values.References) error {
	if m.Owner == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, takeLimit)
	defer cancel()
	ref := wire.Reference{Owner: m.Owner, ID: m.ID}
	refs.Retain(ref)
	defer refs.Release(ref)
	v, err := get(ctx, refs, ref, values.BodySource{}, nil)
	m.Body, m.Owner = v, ""
	return err
}

// get waits for a value. Its body is allocated from memory, which may be nil.
func get(ctx context.Context, refs *values.References, ref wire.Reference, at values.BodySource, memory values.Memory) ([]byte, error) {
	type result struct {
		body []byte
		err  error
	}
	ch := make(chan result, 1)
	cancel := refs.GetFrom(ref, at, memory, func(v values.Value, err error) { ch <- result{v.Body, err} })
	select {
	case r := <-ch:
		return r.body, r.err
	case <-ctx.Done():
	}
	cancel()
	select {
	case r := <-ch: // it came meanwhile
		values.FreeBody(memory, r.body)
	default:
	}
	return nil, bus.Errorf(bus.CodeOf(context.Cause(ctx)), "take a value of session %s: %w", ref.Owner, context.Cause(ctx))
}
