package bus

// Reply is one rank's answer as it was sent. The worker keeps it until the caller has it, so that it can be sent again.
type Reply struct {
	inbox string
	frame []byte
	ref   Ref
}

// Inbox is where the answers to a session's calls go.
func (e *Endpoint) Inbox(session string) string { return replyIn(e.namespace, session) }

// Reply sends an answer to a call to the caller's inbox. The body travels in the frame if the call allows that much; otherwise it is held
// here until the caller has pulled it, and onDone, if set, is called when it is no longer held. h is the answer's own
// envelope; for a failure the body is the encoded *Error. more says that other answers are about to follow, so that this
// one may travel with them.
func (e *Endpoint) Reply(inbox string, call *Header, h Header, body []byte, more bool, onDone func()) Reply {
	h.Seq = call.Seq
	r := Reply{inbox: inbox}
	f := Frame{Kind: KindAnswer, Header: h, Body: body}
	if len(body) > e.inlineLimit(call, h.Code) {
		r.ref = e.Hold(body, RankSet{}, "", onDone)
		f.Header.Ref, f.Body = r.ref, nil
	}
	r.frame = f.Append(make([]byte, 0, 64+len(f.Body)))
	if more && len(r.frame) < bundleLimit/2 {
		e.bundler.add(inbox, r.frame)
	} else {
		e.Repeat(&r)
	}
	return r
}

// inlineLimit is how much of an answer may travel in its frame. An error may take more than was promised, so that it
// rarely has to be pulled.
func (e *Endpoint) inlineLimit(call *Header, code Code) int {
	if code == "" {
		return int(call.Inline)
	}
	return min(maxInline, int(e.bus.nc.MaxPayload())-maxEnvelope)
}

// Repeat sends the answer again; the caller recognises it.
func (e *Endpoint) Repeat(r *Reply) {
	_ = e.publish(r.inbox, "", r.frame) // the caller asks again if it is lost
}

// ForgetReply lets go of a reply that the caller will not ask for again.
func (e *Endpoint) ForgetReply(r *Reply) {
	if r.ref.Owner != "" {
		e.Drop(r.ref)
	}
}

// Size is what the reply takes in memory, without a body that is held apart.
func (r *Reply) Size() int { return len(r.frame) }
