package values

import (
	"crypto/sha256"
	"encoding/hex"
	"strconv"

	"troupe/bus"
	"troupe/bus/wire"
)

// join lets one process of the host pull a body for all that need it.
func (rs *downloads) join(r *download) {
	s, ok := r.Memory.(Sharing)
	if !ok || r.Alone || r.ref.Len <= MaxInline {
		rs.pull(r)
		return
	}
	s.Join(rs.hostName(r.ref), r.ref.Len, func() { rs.waits(r) }, func(f HostFetch, body []byte) { rs.joined(r, f, body) })
}

// hostName is the name of a body among the processes of a host.
func (rs *downloads) hostName(ref wire.BodyRef) string {
	sum := sha256.Sum256([]byte(rs.store.namespace + "/" + ref.Owner + "/" + strconv.FormatUint(ref.ID, 10) + "/" + strconv.FormatInt(ref.Len, 10)))
	return hex.EncodeToString(sum[:16])
}

// waits tells the owner that another process of the host pulls the body, so that the transfer does not wait for this one.
func (rs *downloads) waits(r *download) {
	r.mu.Lock()
	h := rs.header(r)
	r.mu.Unlock()
	h.ForHost = wire.ByAnother
	_ = rs.store.session.Send(rs.store.session.Inbox(r.ref.Owner), &wire.Frame{Kind: wire.KindWant, Header: h}) // without it the transfer begins later
}

// header names the body, and the ranks that need it. r.mu is held.
func (rs *downloads) header(r *download) wire.Header {
	return wire.Header{Session: rs.store.name, Ref: r.ref, Some: r.Ranks.Len() > 0, Ranks: r.Ranks}
}

// joined continues a download when it is known which process of the host pulls the body.
func (rs *downloads) joined(r *download, f HostFetch, body []byte) {
	if f == nil && body == nil {
		rs.pull(r)
		return
	}
	if f == nil {
		rs.attached(r, body)
		return
	}
	r.mu.Lock()
	late := r.finished
	if !late {
		r.fetch, r.buf = f, f.Room()
	}
	r.mu.Unlock()
	if late {
		f.End()
		return
	}
	rs.pull(r)
}

// listen subscribes to the body's subject, on which the owner serves several hosts with one transfer. The subscription precedes the request.
func (rs *downloads) listen(r *download) {
	r.mu.Lock()
	listens := r.fetch != nil && r.sub == nil && !r.finished
	r.mu.Unlock()
	if !listens {
		return
	}
	sub, err := rs.store.session.Listen(bodySubject(rs.store.namespace, r.ref))
	if err != nil {
		return // the body is sent to the inbox
	}
	r.mu.Lock()
	late := r.finished
	if !late {
		r.sub = sub
	}
	r.mu.Unlock()
	if late {
		_ = sub.Unsubscribe() // fails only on a closed connection
	}
}

// viewed ends the download of a body that this process has pulled for its host. Without a view of its own it gets a copy.
func (rs *downloads) viewed(r *download, body []byte) {
	if body == nil {
		if body = makeBody(r.Memory, int(r.ref.Len)); body == nil {
			rs.finish(r, bus.Errorf(bus.CodeRefused, "no memory for a body of %d bytes", r.ref.Len))
			return
		}
		copy(body, r.fetch.Room())
	}
	r.mu.Lock()
	late := r.finished
	r.buf, r.fetch = body, nil
	r.mu.Unlock()
	if late {
		FreeBody(r.Memory, body)
		return
	}
	rs.finish(r, nil)
}
