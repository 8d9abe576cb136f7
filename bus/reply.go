package bus

import (
	"slices"

	"troupe/bus/wire"
)

// ReplyRoom is how many bytes an answer's buffer has in front of the body for the envelope, so that the body of most
// answers is written once and never copied. It is a multiple of 64, which keeps tensors aligned.
const ReplyRoom = 64

// Reply is one rank's answer as it was sent. The worker keeps it until the caller has it, so that it can be sent again.
type Reply struct {
	buf  []byte
	from int    // where the frame begins in buf
	held uint64 // the body that is held apart; 0: none
}

// Inbox is where the answers to a session's calls go.
func (e *Endpoint) Inbox(session string) string { return replyIn(e.namespace, session) }

// Reply sends an answer to a call to the caller's inbox. buf is ReplyRoom bytes and then the body, if body is nil; it
// belongs to the Reply from now on. The body travels in the frame if the call allows that much; otherwise it is held here until the
// caller has pulled it, and onDone, if set, is called when nobody reads it any more. h is the answer's own envelope; for a
// failure the body is the encoded *Error. more says that other answers are about to follow, so that this one may travel
// with them.
func (e *Endpoint) Reply(inbox string, call *wire.Header, h *wire.Header, buf, body []byte, more bool, onDone func()) Reply {
	h.Seq = call.Seq
	inPlace := body == nil
	if inPlace {
		body = buf[ReplyRoom:]
	}
	var r Reply
	switch {
	case len(body) > e.inlineLimit(call, h.Code):
		h.Ref = e.Hold(body, wire.RankSet{}, "", onDone)
		r.held, r.buf = h.Ref.ID, make([]byte, ReplyRoom)
	case inPlace:
		r.buf = buf
	default:
		r.buf = append(buf[:ReplyRoom], body...)
	}
	var room [2 * ReplyRoom]byte
	head := wire.AppendAnswerHead(room[:0], h)
	if r.from = ReplyRoom - len(head); r.from < 0 { // the words of a ref or a failure are longer
		r.buf, r.from = slices.Concat(head, r.buf[ReplyRoom:]), 0
	} else {
		copy(r.buf[r.from:], head)
	}
	if more && r.Size() < bundleLimit/2 {
		e.bundler.add(inbox, r.frame())
	} else {
		e.Repeat(inbox, &r)
	}
	return r
}

// inlineLimit is how much of an answer may travel in its frame. An error may take more than was promised, so that it
// rarely has to be pulled.
func (e *Endpoint) inlineLimit(call *wire.Header, code Code) int {
	if code == "" {
		return int(call.Inline)
	}
	return min(MaxInline, int(e.bus.nc.MaxPayload())-maxEnvelope)
}

func (r *Reply) frame() []byte { return r.buf[r.from:] }

// Repeat sends the answer again; the caller recognises it.
func (e *Endpoint) Repeat(inbox string, r *Reply) {
	_ = e.bus.publish(inbox, "", r.frame()) // the caller asks again if it is lost
}

// ForgetReply lets go of a reply that the caller will not ask for again, and gives its buffer back.
func (e *Endpoint) ForgetReply(r *Reply) (buf []byte) {
	if r.held != 0 {
		e.Drop(wire.Ref{Owner: e.session, ID: r.held})
	}
	buf, *r = r.buf, Reply{}
	return buf
}

// Held reports whether the body is held apart, for the caller to pull.
func (r *Reply) Held() bool { return r.held != 0 }

// Size is what the reply takes in memory, without a body that is held apart.
func (r *Reply) Size() int { return len(r.buf) - r.from }
