package bus

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"troupe/bus/wire"
)

// Msg and Header are NATS's own, so that a message is not copied on its way to a handler. Packages above
// bus use them under these names and do not import NATS.
type (
	Msg    = nats.Msg
	Header = nats.Header
)

// ErrNoResponders is the error of a request that no subscriber heard: the server said so at once.
var ErrNoResponders = &Error{Code: CodeUnavailable, AppCode: "no_responders", Message: "no process serves this subject", Rank: -1}

// Subscribe calls handle for each message on the subject, one at a time, from a goroutine of the subscription. A panic of
// handle is reported like any other of the process.
func (b *Bus) Subscribe(subject string, handle func(*Msg)) (*Subscription, error) {
	return b.subscribe(&Subscription{subject: subject, handle: oneByOne(handle)})
}

// oneByOne calls handle for one message at a time, also while the subscription moves to another connection.
func oneByOne(handle func(*Msg)) nats.MsgHandler {
	var turn sync.Mutex
	return func(m *Msg) {
		turn.Lock()
		defer turn.Unlock()
		handle(m)
	}
}

// SubscribeChan sends each message on the subject to ch, and drops messages while ch is full (see Dropped).
func (b *Bus) SubscribeChan(subject string, ch chan *Msg) (*Subscription, error) {
	return b.subscribe(&Subscription{subject: subject, ch: ch})
}

// Publish sends one message. The message may be lost with the connection.
func (b *Bus) Publish(subject string, data []byte) error { return b.publish(subject, "", data) }

// PublishRequest is Publish with a subject for the answers.
func (b *Bus) PublishRequest(subject, reply string, data []byte) error {
	return b.publish(subject, reply, data)
}

// Request sends one message and waits for the first answer. The error is ErrNoResponders when nothing serves the subject.
func (b *Bus) Request(ctx context.Context, subject string, data []byte) (*Msg, error) {
	if err := CheckSubject(subject, ""); err != nil {
		return nil, err
	}
	m, err := b.Conn().RequestWithContext(ctx, subject, data)
	if err != nil {
		return nil, b.natsError("request "+subject, err)
	}
	return m, nil
}

// RequestWithin is Request of a process with the head's token to one that may have a team's credential, which may answer in its namespace alone.
func (b *Bus) RequestWithin(ctx context.Context, namespace, subject string, data []byte) (*Msg, error) {
	reply := ReplySubject(namespace, NewID(), "answer")
	if c, ok := ReadCredential(b.cfg.Token); ok {
		reply = ReplySubject(namespace, c.ID, NewID()) // an agent's credential permits it this alone
	}
	if err := CheckSubject(subject, reply); err != nil {
		return nil, err
	}
	nc := b.Conn()
	sub, err := nc.SubscribeSync(reply)
	if err != nil {
		return nil, b.natsError("request "+subject, err)
	}
	defer func() { _ = sub.Unsubscribe() }() // fails only on a closed connection
	if err := nc.PublishRequest(subject, reply, data); err != nil {
		return nil, b.natsError("request "+subject, err)
	}
	m, err := sub.NextMsgWithContext(ctx)
	if err == nil && len(m.Data) == 0 && m.Header.Get("Status") == "503" {
		err = nats.ErrNoResponders
	}
	if err != nil {
		return nil, b.natsError("request "+subject, err)
	}
	return m, nil
}

// Respond sends an answer to the sender of m. The answer may be lost with the connection. The sender chooses where the answer goes, and may have
// fewer rights than this process: a subject that is no inbox is refused and counted.
func (b *Bus) Respond(m *Msg, data []byte) error {
	if m.Reply != "" && !isInbox(m.Reply) {
		err := Errorf(CodeRefused, "the answer to %s is to go to %q, which is no inbox", wire.Clip(m.Subject), wire.Clip(m.Reply))
		b.Malformed("a request", err)
		return err
	}
	return b.publish(m.Reply, "", data)
}

// isInbox reports whether a subject is an inbox of NATS or of a session.
func isInbox(subject string) bool {
	words := strings.SplitN(subject, ".", 4)
	return strings.HasPrefix(words[0], "_") || len(words) == 4 && words[0] == tokenRoot && words[2] == tokenReply
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
	if err := b.Respond(m, data); err != nil {
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
	return Retry(ctx, Backoff{}, func() error { return b.AskOnce(ctx, subject, data, result) })
}

// AskOnce is Ask without a repetition.
func (b *Bus) AskOnce(ctx context.Context, subject string, data []byte, result any) error {
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
	if err := b.Conn().FlushWithContext(ctx); err != nil {
		return b.natsError("flush", err)
	}
	return nil
}

// NewInbox is a subject for answers that no other process uses.
func (b *Bus) NewInbox() string { return b.Conn().NewInbox() }
