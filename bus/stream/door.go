package stream

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"

	"troupe/bus"
	"troupe/bus/wire"
)

// A process with the credential of a team or an agent has no rights to JetStream. It asks the head, at the door "streams", for what it may have, and
// sends what it stores to the door "append", message by message: a batch is stored when the last one is there.
const (
	door       = "streams"
	appendDoor = "append"
	doorTry    = 10 * time.Second       // for one request and its answer
	doorWait   = 30 * time.Second       // for an answer, if the caller sets no limit
	doorPoll   = 500 * time.Millisecond // between two requests that follow a stream
	doorPuts   = 3                      // attempts to store an object

	headerTo   = "Troupe-To"   // of a message at the door "append": its subject,
	headerPart = "Troupe-Part" // and of a batch its id, its number and how many there are

	doorCreate = "create"
	doorFind   = "find"
	doorNames  = "names"
	doorDelete = "delete"
	doorState  = "state"
	doorRead   = "read"
	doorGet    = "get"
	doorRemove = "remove"
	doorPurge  = "purge"
	doorSize   = "object size"
	doorObject = "object"
	doorPut    = "put object"
)

type doorRequest struct {
	Op     string  `msgpack:"op"`
	Name   string  `msgpack:"name"`             // of the stream or the object store, or how names begin
	Config *Config `msgpack:"config,omitempty"` // of the stream that is created

	Subject     string    `msgpack:"subject,omitempty"`
	Seq         uint64    `msgpack:"seq,omitempty"` // of a message, or the first that is read or kept
	Since       time.Time `msgpack:"since"`
	HeadersOnly bool      `msgpack:"headers_only,omitempty"`
	N           int       `msgpack:"n,omitempty"` // messages that are read, at most
	Seqs        []uint64  `msgpack:"seqs,omitempty"`

	Object string `msgpack:"object,omitempty"`
	Offset int64  `msgpack:"offset,omitempty"` // of what is read or written of a message or an object
	Data   []byte `msgpack:"data,omitempty"`
	ID     string `msgpack:"id,omitempty"`   // of the upload
	Last   bool   `msgpack:"last,omitempty"` // the upload is complete
}

type doorReply struct {
	Err      *bus.Error    `msgpack:"err,omitempty"`
	Names    []string      `msgpack:"names,omitempty"`
	State    State         `msgpack:"state"`
	Messages []doorMessage `msgpack:"messages,omitempty"`
	Size     int64         `msgpack:"size,omitempty"` // of the object
	Data     []byte        `msgpack:"data,omitempty"`
	Next     uint64        `msgpack:"next,omitempty"` // of an object: the message where its next part begins
}

// doorMessage is a message, or the first part of one that is too large for an answer.
type doorMessage struct {
	Subject string              `msgpack:"subject"`
	Header  map[string][]string `msgpack:"header,omitempty"`
	Data    []byte              `msgpack:"data"`
	Size    int                 `msgpack:"size"` // of all of its data
	Seq     uint64              `msgpack:"seq"`
	Time    time.Time           `msgpack:"time"`
}

// clientDoor is the head's door, as a process with a credential sees it.
type clientDoor struct {
	b      *bus.Bus
	caller bus.Credential
}

// doorOf is the door through which this process reaches streams; nil: it has rights to them.
func doorOf(b *bus.Bus) *clientDoor {
	if caller, ok := b.AtDoors(); ok {
		return &clientDoor{b, caller}
	}
	return nil
}

// ask asks the head, and repeats that until it answers or ctx ends: each request may arrive twice.
func (d *clientDoor) ask(ctx context.Context, q doorRequest) (r doorReply, err error) {
	doing := q.Op + " " + q.Name
	data, err := wire.Marshal(q)
	if err != nil {
		return r, err
	}
	ctx, cancel := context.WithTimeout(ctx, doorWait)
	defer cancel()
	err = bus.Retry(ctx, bus.Backoff{}, func() error {
		try, cancel := d.b.Attempt(ctx, doorTry)
		defer cancel()
		m, err := d.b.Request(try, d.caller.DoorSubject(door), data)
		switch {
		case err != nil && d.b.Closed():
			return bus.Permanent(bus.Errorf(bus.CodeClosed, "%s: %w", doing, err))
		case err != nil:
			return bus.Errorf(bus.CodeUnavailable, "%s: the head does not answer: %w", doing, err)
		}
		r = doorReply{}
		if err := wire.Unmarshal(m.Data, &r); err != nil {
			return bus.Permanent(err)
		}
		if r.Err != nil && r.Err.Code == bus.CodeBusy {
			return r.Err
		}
		return nil
	})
	if err == nil && r.Err != nil {
		err = r.Err
	}
	return r, err
}

// wrap makes messages for the door "append" of those that are to be stored.
func (d *clientDoor) wrap(msgs []*bus.Msg, id, reply string) []*bus.Msg {
	out := make([]*bus.Msg, len(msgs))
	for i, m := range msgs {
		h := make(bus.Header, len(m.Header)+2)
		for name, values := range m.Header {
			h[name] = values
		}
		h[headerTo] = []string{m.Subject}
		if len(msgs) > 1 {
			h[headerPart] = []string{id + " " + strconv.Itoa(i) + " " + strconv.Itoa(len(msgs))}
		}
		out[i] = &bus.Msg{Subject: d.caller.DoorSubject(appendDoor), Header: h, Data: m.Data}
	}
	out[len(out)-1].Reply = reply
	return out
}

// stream is a stream behind the door.
func (d *clientDoor) stream(ctx context.Context, q doorRequest) (*Stream, error) {
	if _, err := d.ask(ctx, q); err != nil {
		return nil, err
	}
	return &Stream{b: d.b, name: q.Name, door: d}, nil
}

// whole reads what is missing of a message.
func (d *clientDoor) whole(ctx context.Context, stream string, m doorMessage) (Message, error) {
	out := Message{Subject: m.Subject, Header: m.Header, Data: m.Data, Seq: m.Seq, Time: m.Time}
	for len(out.Data) < m.Size {
		r, err := d.ask(ctx, doorRequest{Op: doorGet, Name: stream, Seq: m.Seq, Offset: int64(len(out.Data))})
		if err != nil {
			return out, err
		}
		if len(r.Messages) != 1 || len(r.Messages[0].Data) == 0 {
			return out, bus.Errorf(bus.CodeMalformed, "read stream %s: message %d has %d bytes of %d", stream, m.Seq, len(out.Data), m.Size)
		}
		out.Data = append(out.Data, r.Messages[0].Data...)
	}
	return out, nil
}

func (s *Stream) getAtDoor(ctx context.Context, seq uint64, subject string) (Message, error) {
	r, err := s.door.ask(ctx, doorRequest{Op: doorGet, Name: s.name, Seq: seq, Subject: subject})
	if err == nil && len(r.Messages) != 1 {
		err = bus.Errorf(bus.CodeMalformed, "read stream %s: the head's answer has %d messages", s.name, len(r.Messages))
	}
	if err != nil {
		return Message{}, err
	}
	return s.door.whole(ctx, s.name, r.Messages[0])
}

// nextAtDoor is Next.
func (r *Reader) nextAtDoor(ctx context.Context, n int) (out []Message, err error) {
	q := doorRequest{Op: doorRead, Name: r.s.name, Subject: r.o.Subject, Seq: r.o.From, Since: r.o.Since, HeadersOnly: r.o.HeadersOnly, N: n}
	if r.highest > 0 {
		q.Seq, q.Since = r.highest+1, time.Time{}
	}
	got, err := r.s.door.ask(ctx, q)
	if err != nil {
		return nil, err
	}
	for _, m := range got.Messages {
		if r.o.HeadersOnly {
			m.Size = len(m.Data)
		}
		one, err := r.s.door.whole(ctx, r.s.name, m)
		if errors.Is(err, bus.ErrNotFound) {
			r.highest = m.Seq // it was deleted meanwhile
			continue
		}
		if err != nil {
			return nil, err
		}
		r.highest = m.Seq
		out = append(out, one)
	}
	if len(out) == 0 && len(got.Messages) > 0 {
		return r.nextAtDoor(ctx, n)
	}
	return out, nil
}

// followAtDoor is Follow: it asks again and again.
func (s *Stream) followAtDoor(ctx context.Context, o ReadOptions, do func(Message) error) error {
	r := &Reader{s: s, o: o}
	for {
		msgs, err := r.nextAtDoor(ctx, fetchSize)
		if err != nil {
			return err
		}
		for _, m := range msgs {
			if err := do(m); err != nil {
				return err
			}
		}
		if len(msgs) == 0 && bus.Sleep(ctx, doorPoll) != nil {
			return ctx.Err()
		}
	}
}

// putAtDoor sends an object in parts, and again if another head takes over meanwhile.
func (s *ObjectStore) putAtDoor(ctx context.Context, name string, data []byte) (err error) {
	for range doorPuts {
		if err = s.sendObject(ctx, name, data); !errors.Is(err, bus.ErrUnavailable) || ctx.Err() != nil {
			break
		}
	}
	return err
}

// sendObject sends the parts, one after the other.
func (s *ObjectStore) sendObject(ctx context.Context, name string, data []byte) error {
	q := doorRequest{Op: doorPut, Name: s.cfg.Name, Object: name, ID: bus.NewID()}
	for !q.Last {
		n := min(len(data), s.b.MaxPayload()/2)
		q.Data, data = data[:n], data[n:]
		q.Last = len(data) == 0
		if _, err := s.door.ask(ctx, q); err != nil {
			return err
		}
		q.Offset += int64(n)
	}
	return nil
}

func (s *ObjectStore) getAtDoor(ctx context.Context, name string) (data []byte, err error) {
	for next := uint64(0); ; {
		r, err := s.door.ask(ctx, doorRequest{Op: doorObject, Name: s.cfg.Name, Object: name, Offset: int64(len(data)), Seq: next})
		if err != nil {
			return nil, err
		}
		data, next = append(data, r.Data...), r.Next
		switch {
		case int64(len(data)) == r.Size:
			return data, nil
		case len(r.Data) == 0 || int64(len(data)) > r.Size:
			return nil, bus.Errorf(bus.CodeMalformed, "read object %s in %s: %d bytes of %d", name, s.cfg.Name, len(data), r.Size)
		}
	}
}

// appendAtDoor is Append.
func (d *clientDoor) append(ctx context.Context, msgs []*bus.Msg, id string) (Ack, error) {
	msgs = d.wrap(msgs, id, "")
	last := len(msgs) - 1
	for _, m := range msgs[:last] {
		if err := d.b.Conn().PublishMsg(m); err != nil {
			return Ack{}, coded(d.b, "append", err)
		}
	}
	m, err := d.b.Conn().RequestMsgWithContext(ctx, msgs[last])
	if errors.Is(err, nats.ErrNoResponders) {
		return Ack{}, bus.Errorf(bus.CodeUnavailable, "append: no head serves it: %w", err)
	}
	if err != nil {
		return Ack{}, coded(d.b, "append", err)
	}
	return ParseAck(m)
}
