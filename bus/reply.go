package bus

import (
	"encoding/binary"
	"slices"
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
func (e *Endpoint) Reply(inbox string, call *Header, h *Header, buf, body []byte, more bool, onDone func()) Reply {
	h.Seq = call.Seq
	inPlace := body == nil
	if inPlace {
		body = buf[ReplyRoom:]
	}
	var r Reply
	switch {
	case len(body) > e.inlineLimit(call, h.Code):
		h.Ref = e.Hold(body, RankSet{}, "", onDone)
		r.held, r.buf = h.Ref.ID, make([]byte, ReplyRoom)
	case inPlace:
		r.buf = buf
	default:
		r.buf = append(buf[:ReplyRoom], body...)
	}
	var room [2 * ReplyRoom]byte
	head := appendAnswerHead(room[:0], h)
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

// appendAnswerHead is an answer without its body: Frame.Append for the few fields of the kind that every rank writes for
// every call.
func appendAnswerHead(b []byte, h *Header) []byte {
	b = append(b, 'T', 'p', Major, byte(KindAnswer), 0, 0, 0, 0, 0xde, 0, 0)
	n := 2
	b = packUint(append(b, keySeq), h.Seq)
	if h.Ref.Owner != "" {
		b = packStr(append(b, keyRefOwner), h.Ref.Owner)
		b = packUint(append(b, keyRefID), h.Ref.ID)
		b = packUint(append(b, keyRefLen), uint64(h.Ref.Len))
		n += 3
	}
	b = packUint(append(b, keyRank), uint64(h.Rank))
	num := func(key byte, v uint64) {
		if v != 0 {
			b, n = packUint(append(b, key), v), n+1
		}
	}
	num(keyGen, uint64(h.Gen))
	if h.Code != "" {
		b, n = packStr(append(b, keyCode), string(h.Code)), n+1
	}
	num(keyQueued, micros(h.Queued))
	num(keyRan, micros(h.Ran))
	b[frameHead+2] = byte(n)
	binary.BigEndian.PutUint32(b[4:], uint32(len(b)-frameHead))
	return b
}

// inlineLimit is how much of an answer may travel in its frame. An error may take more than was promised, so that it
// rarely has to be pulled.
func (e *Endpoint) inlineLimit(call *Header, code Code) int {
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
		e.Drop(Ref{Owner: e.session, ID: r.held})
	}
	buf, *r = r.buf, Reply{}
	return buf
}

// Held reports whether the body is held apart, for the caller to pull.
func (r *Reply) Held() bool { return r.held != 0 }

// Size is what the reply takes in memory, without a body that is held apart.
func (r *Reply) Size() int { return len(r.buf) - r.from }
