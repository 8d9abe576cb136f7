package stream

import (
	"context"
	"encoding/json"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
)

const (
	headerBatchID     = "Nats-Batch-Id"
	headerBatchSeq    = "Nats-Batch-Sequence"
	headerBatchCommit = "Nats-Batch-Commit"
	headerRollup      = "Nats-Rollup"
	rollupSubject     = "sub"

	// MaxBatch is how many messages the server stores atomically.
	MaxBatch = 1000
)

// batchSeqs are the values of the sequence header of a batch: every message carries one.
var batchSeqs = func() (out [MaxBatch][]string) {
	for i := range out {
		out[i] = []string{strconv.Itoa(i + 1)}
	}
	return out
}()

var batchCommit = []string{"1"}

// Ack is the server's answer to a write.
type Ack struct {
	Seq       uint64 // of the last message
	Duplicate bool   // a message with the same id was stored before
}

// Append stores messages atomically, at consecutive sequences, and waits for the acknowledgement. Several messages are a
// batch under id, which must be new for each attempt: the server may still have a part of an earlier one. The messages
// must not be used concurrently.
func Append(ctx context.Context, b *bus.Bus, msgs []*bus.Msg, id string) (Ack, error) {
	if d := doorOf(b); d != nil {
		return d.append(ctx, msgs, id)
	}
	markBatch(msgs, id)
	last := len(msgs) - 1
	if err := checkSubjects(msgs); err != nil {
		return Ack{}, err
	}
	for _, m := range msgs[:last] {
		if err := b.Conn().PublishMsg(m); err != nil {
			return Ack{}, coded(b, "append", err)
		}
	}
	m, err := b.Conn().RequestMsgWithContext(ctx, msgs[last])
	if err != nil {
		return Ack{}, coded(b, "append", err)
	}
	return ParseAck(m)
}

// AppendAsync is Append without waiting: the acknowledgement goes to the subject reply, for ParseAck.
func AppendAsync(b *bus.Bus, msgs []*bus.Msg, id, reply string) error {
	if d := doorOf(b); d != nil {
		msgs = d.wrap(msgs, id, reply)
	} else {
		markBatch(msgs, id)
		msgs[len(msgs)-1].Reply = reply
	}
	if err := checkSubjects(msgs); err != nil {
		return err
	}
	for _, m := range msgs {
		if err := b.Conn().PublishMsg(m); err != nil {
			return coded(b, "append", err)
		}
	}
	return nil
}

func checkSubjects(msgs []*bus.Msg) error {
	for _, m := range msgs {
		if err := bus.CheckSubject(m.Subject, m.Reply); err != nil {
			return err
		}
	}
	return nil
}

func markBatch(msgs []*bus.Msg, id string) {
	if len(msgs) < 2 {
		return
	}
	ids := []string{id}
	for i, m := range msgs {
		if m.Header == nil {
			m.Header = bus.Header{}
		}
		m.Header[headerBatchID], m.Header[headerBatchSeq] = ids, batchSeqs[i]
	}
	msgs[len(msgs)-1].Header[headerBatchCommit] = batchCommit
}

// ParseAck reads an acknowledgement.
func ParseAck(m *bus.Msg) (Ack, error) {
	if len(m.Data) == 0 && m.Header.Get("Status") != "" {
		return Ack{}, coded(nil, "append", nats.ErrNoResponders)
	}
	var ack struct {
		Error     *jetstream.APIError `json:"error"`
		Seq       uint64              `json:"seq"`
		Duplicate bool                `json:"duplicate"`
	}
	if err := json.Unmarshal(m.Data, &ack); err != nil {
		return Ack{}, bus.Errorf(bus.CodeMalformed, "append: malformed acknowledgement: %w", err)
	}
	if ack.Error != nil {
		return Ack{}, coded(nil, "append", ack.Error)
	}
	return Ack{ack.Seq, ack.Duplicate}, nil
}

// ExpectLast makes the server reject the write unless the last message of the stream is at this sequence. m is the first
// message of the write.
func ExpectLast(m *bus.Msg, seq uint64) {
	if m.Header == nil {
		m.Header = bus.Header{}
	}
	m.Header[jetstream.ExpectedLastSeqHeader] = []string{strconv.FormatUint(seq, 10)}
}

// Replacing is the header of a message that replaces all earlier ones of its subject, and expires after ttl. Zero: never.
func Replacing(ttl time.Duration) bus.Header {
	h := bus.Header{headerRollup: {rollupSubject}}
	if ttl > 0 {
		h[jetstream.MsgTTLHeader] = []string{ttl.String()}
	}
	return h
}
