package bus

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go"

	"troupe/bus/wire"
)

// Msg, Header and Subscription are NATS's own, so that a message is not copied on its way to a handler. Packages above
// bus use them under these names and do not import NATS.
type (
	Msg          = nats.Msg
	Header       = nats.Header
	Subscription = nats.Subscription
)

// ErrNoResponders is the error of a request that no subscriber heard: the server said so at once.
var ErrNoResponders = &Error{Code: CodeUnavailable, AppCode: "no_responders", Message: "no process serves this subject", Rank: -1}

// Subscribe calls handle for each message on the subject, one at a time, from a goroutine of the subscription. A panic of
// handle is reported like any other of the process.
func (b *Bus) Subscribe(subject string, handle func(*Msg)) (*Subscription, error) {
	sub, err := b.nc.Subscribe(subject, GuardMsg(handle))
	if err != nil {
		return nil, natsError("subscribe to "+subject, err)
	}
	return sub, nil
}

// SubscribeChan sends each message on the subject to ch, and drops messages while ch is full (see Dropped).
func (b *Bus) SubscribeChan(subject string, ch chan *Msg) (*Subscription, error) {
	sub, err := b.nc.ChanSubscribe(subject, ch)
	if err != nil {
		return nil, natsError("subscribe to "+subject, err)
	}
	return sub, nil
}

// Publish sends one message. The message may be lost with the connection.
func (b *Bus) Publish(subject string, data []byte) error { return b.publish(subject, "", data) }

// PublishRequest is Publish with a subject for the answers.
func (b *Bus) PublishRequest(subject, reply string, data []byte) error {
	return b.publish(subject, reply, data)
}

// Request sends one message and waits for the first answer. The error is ErrNoResponders when nothing serves the subject.
func (b *Bus) Request(ctx context.Context, subject string, data []byte) (*Msg, error) {
	m, err := b.nc.RequestWithContext(ctx, subject, data)
	if err != nil {
		return nil, natsError("request "+subject, err)
	}
	return m, nil
}

// Serve answers each request on the subject with the result of handle, or with its error, as msgpack. The goroutine of
// the subscription calls handle, so handle must not block.
func (b *Bus) Serve(subject string, handle func(m *Msg) (any, error)) (*Subscription, error) {
	return b.Subscribe(subject, func(m *Msg) {
		if m.Reply != "" {
			b.Answer(m, handle)
		}
	})
}

// Answer calls handle and sends its result to the sender of m, from the calling goroutine. When an answer is lost, Ask
// repeats the request.
func (b *Bus) Answer(m *Msg, handle func(m *Msg) (any, error)) {
	var out reply
	value, err := handle(m)
	if err == nil {
		out.Value, err = wire.Marshal(value)
	}
	if err != nil {
		out.Err = AsError(err)
	}
	data, err := wire.MarshalRecord(&out)
	if err != nil {
		b.Logger().Error("bus: an answer cannot be encoded", "subject", m.Subject, "error", err)
		return
	}
	if err := m.Respond(data); err != nil {
		b.Logger().Debug("bus: an answer is lost; the peer repeats its request", "subject", m.Subject, "error", err)
	}
}

// reply is the answer of Serve to Ask.
type reply struct {
	Value wire.Raw `msgpack:"value,omitempty"`
	Err   *Error   `msgpack:"err,omitempty"`
}

// Ask sends a value to the process that serves the subject and decodes its answer into result, which may be nil. While
// the connection is down or nothing serves the subject it repeats the request until ctx ends, so the request may arrive
// twice.
func (b *Bus) Ask(ctx context.Context, subject string, request, result any) error {
	data, err := wire.Marshal(request)
	if err != nil {
		return err
	}
	return Retry(ctx, Backoff{}, func() error { return b.askOnce(ctx, subject, data, result) })
}

func (b *Bus) askOnce(ctx context.Context, subject string, data []byte, result any) error {
	m, err := b.Request(ctx, subject, data)
	switch {
	case errors.Is(err, ErrUnavailable):
		return err
	case err != nil:
		return Permanent(err)
	}
	var got reply
	if err := wire.UnmarshalRecord(m.Data, &got); err != nil {
		return Permanent(Errorf(CodeMalformed, "the answer on %s is malformed: %w", subject, err))
	}
	if got.Err != nil {
		return Permanent(got.Err)
	}
	if result == nil {
		return nil
	}
	return Permanent(wire.Unmarshal(got.Value, result))
}

// flushLimit bounds every flush.
const flushLimit = 5 * time.Second

// Flush returns when the server has everything that was published or subscribed before.
func (b *Bus) Flush(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, flushLimit)
	defer cancel()
	if err := b.nc.FlushWithContext(ctx); err != nil {
		return natsError("flush", err)
	}
	return nil
}

// NewInbox is a subject for answers that no other process uses.
func (b *Bus) NewInbox() string { return b.nc.NewInbox() }
