package calls

import (
	"encoding/binary"
	"runtime"
	"slices"
	"sync"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
)

// ReplyRoom is the number of bytes before the body in an answer's buffer, for the envelope, so that the body of most
// answers is written once and not copied. It is a multiple of 64, which keeps tensors aligned.
const ReplyRoom = 64

// Reply is one rank's answer. The worker keeps it until the caller has acknowledged it, so that it can be sent again.
type Reply struct {
	buf    []byte
	from   int    // start of the frame in buf
	upload uint64 // id of the upload of its body; 0: the body is in the frame, or kept
	kept   uint64 // id of the upload of a body that is kept for the caller
}

// Inbox is the subject for answers to a session's calls.
func (e *Endpoint) Inbox(session string) string { return e.session.Inbox(session) }

// Reply sends an answer to a call to the caller's inbox. buf is ReplyRoom bytes and then the body, if body is nil; it
// belongs to the Reply from now on. The body travels in the frame if the call allows its size; otherwise this endpoint
// offers it until the caller has pulled it, and onDone, if set, is called when it is not read any more. h is the
// answer's envelope; for a failure the body is the encoded *Error. With more set, other answers follow soon, and this
// one may travel in one message with them. With h.Keep set, the body is kept for the caller as References says, and the uses of the
// references inside it belong to the kept body from now on.
func (e *Endpoint) Reply(inbox string, call *wire.Header, h *wire.Header, buf, body []byte, inside values.RetainedReferences, more bool, onDone func()) Reply {
	h.Seq = call.Seq
	inPlace := body == nil
	if inPlace {
		body = buf[ReplyRoom:]
	}
	var r Reply
	switch {
	case h.Keep:
		h.Ref = e.References().Keep(call.Session, body, inside, onDone)
		r.kept, r.buf = h.Ref.ID, make([]byte, ReplyRoom)
	case len(body) > e.inlineLimit(call, h.Code):
		h.Ref = e.values.Offer(body, wire.RankSet{}, "", onDone)
		r.upload, r.buf = h.Ref.ID, make([]byte, ReplyRoom)
	case inPlace:
		r.buf = buf
	default:
		r.buf = append(buf[:ReplyRoom], body...)
	}
	if h.Ref.Owner != "" {
		e.values.Place(h.Ref, h.Location)
	}
	var room [2 * ReplyRoom]byte
	head := wire.AppendAnswerHead(room[:0], h)
	if r.from = ReplyRoom - len(head); r.from < 0 { // the head with a ref or an error code is longer
		r.buf, r.from = slices.Concat(head, r.buf[ReplyRoom:]), 0
	} else {
		copy(r.buf[r.from:], head)
	}
	if h.Ref.Owner == "" {
		e.values.CountSent(values.PathInline, int64(len(body)))
	}
	if more && r.Size() < bundleLimit/2 {
		e.batcher.add(inbox, r.frame())
	} else {
		e.Repeat(inbox, &r)
	}
	return r
}

// inlineLimit is the largest body of an answer that travels in its frame. An error may take more than the call allows,
// so that it rarely has to be pulled.
func (e *Endpoint) inlineLimit(call *wire.Header, code bus.Code) int {
	if code == "" {
		return int(call.Inline)
	}
	return min(values.MaxInline, e.Bus().MaxPayload()-bus.MaxEnvelope)
}

func (r *Reply) frame() []byte { return r.buf[r.from:] }

// Repeat sends the answer again; the caller recognises it.
func (e *Endpoint) Repeat(inbox string, r *Reply) {
	_ = e.Bus().Publish(inbox, r.frame()) // the caller's next status request repeats it
}

// ForgetReply releases a reply that the caller has acknowledged, and returns its buffer.
func (e *Endpoint) ForgetReply(r *Reply) (buf []byte) {
	if r.kept != 0 {
		e.References().Settle(r.kept)
	}
	if r.upload != 0 {
		e.values.Withdraw(wire.BodyRef{Owner: e.Session(), ID: r.upload})
	}
	buf, *r = r.buf, Reply{}
	return buf
}

// Uploaded reports whether the caller pulls the body.
func (r *Reply) Uploaded() bool { return r.upload != 0 }

// Size is the memory of the reply, without an uploaded body.
func (r *Reply) Size() int { return len(r.buf) - r.from }

const bundleLimit = 64 << 10 // size at which a bundle is sent

// answerBatcher puts answers to one caller that are ready at about the same time into one message, a bundle: the ranks
// of a process answer a broadcast together, and the server and the caller then handle one message instead of hundreds.
// No timer is involved: a bundle is sent after one turn of the runnable goroutines.
type answerBatcher struct {
	ep *Endpoint

	mu      sync.Mutex
	bundles map[string]*answerBatch // by inbox
	wakeCh  chan struct{}           // holds one
}

// answerBatch is a bundle of frames, each after its length.
type answerBatch struct {
	buf []byte
	n   int
}

func newAnswerBatcher(ep *Endpoint) *answerBatcher {
	return &answerBatcher{ep: ep, bundles: map[string]*answerBatch{}, wakeCh: make(chan struct{}, 1)}
}

// add takes a copy of the frame and sends it soon.
func (b *answerBatcher) add(inbox string, frame []byte) {
	b.mu.Lock()
	u := b.bundles[inbox]
	if u == nil {
		u = &answerBatch{}
		b.bundles[inbox] = u
	}
	if len(u.buf)+len(frame)+4 > bundleLimit {
		b.send(inbox, u)
	}
	if u.n == 0 {
		u.buf = (&wire.Frame{Kind: wire.KindBundle}).Append(u.buf[:0])
	}
	u.buf = append(binary.BigEndian.AppendUint32(u.buf, uint32(len(frame))), frame...)
	u.n++
	b.mu.Unlock()
	select {
	case b.wakeCh <- struct{}{}:
	default:
	}
}

// send publishes the bundle for one caller. b.mu is held, so that answers keep their order.
func (b *answerBatcher) send(inbox string, u *answerBatch) {
	if u.n > 0 {
		_ = b.ep.Bus().Publish(inbox, u.buf) // the caller's next status request repeats it
		u.n = 0
	}
}

// loop sends until the endpoint is closed.
func (b *answerBatcher) loop() {
	for {
		select {
		case <-b.ep.session.Done():
			b.flush()
			return
		case <-b.wakeCh:
		}
		runtime.Gosched() // other ranks may be about to answer
		b.flush()
	}
}

func (b *answerBatcher) flush() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for inbox, u := range b.bundles {
		if u.n == 0 { // unused since the last flush
			delete(b.bundles, inbox)
			continue
		}
		b.send(inbox, u)
	}
}
