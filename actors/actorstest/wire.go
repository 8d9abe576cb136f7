package actorstest

import (
	"encoding/binary"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"

	"troupe/bus"
)

// wire is a caller that writes its frames by hand, to do what no honest driver does: say things twice, too late, in the
// wrong order.
type wire struct {
	st      *stage
	session string
	sub     *nats.Subscription
	frames  []bus.Frame // received and not taken
}

// wire opens a caller with a session of its own.
func (st *stage) wire(session string) *wire {
	st.t.Helper()
	w := &wire{st: st, session: st.role.Address.Role + "-" + session}
	sub, err := st.ep.Bus().Conn().SubscribeSync(st.ep.Inbox(w.session))
	require.NoError(st.t, err)
	st.t.Cleanup(func() { _ = sub.Unsubscribe() })
	w.sub = sub
	return w
}

// header is the envelope of a first sending to rank 0.
func (w *wire) header(seq uint64, method string) bus.Header {
	return bus.Header{Session: w.session, Seq: seq, Method: method, Caller: "wire", Inline: 32 << 10, Gens: w.gens()}
}

func (w *wire) gens() map[int]uint32 {
	if w.st.role.Gen == 0 {
		return nil
	}
	return map[int]uint32{0: w.st.role.Gen}
}

// call sends a call to rank 0.
func (w *wire) call(h bus.Header, args ...any) {
	w.st.t.Helper()
	w.send(w.st.role.Address.Rank(0), bus.Frame{Kind: bus.KindCall, Header: h, Body: w.st.body(args...)})
}

// again sends a call once more, as one who misses the answer would.
func (w *wire) again(h bus.Header, args ...any) {
	w.st.t.Helper()
	h.Age = time.Millisecond
	w.call(h, args...)
}

// control sends a frame of the control subjects that is about a call.
func (w *wire) control(kind bus.Kind, seq uint64) {
	w.st.t.Helper()
	h := bus.Header{Session: w.session, Seq: seq}
	if kind == bus.KindAsk {
		h.Age = time.Millisecond
	}
	w.send(w.st.role.Address.ControlRank(0), bus.Frame{Kind: kind, Header: h})
}

func (w *wire) send(subject string, f bus.Frame) {
	w.st.t.Helper()
	require.NoError(w.st.t, w.st.ep.Bus().Conn().Publish(subject, f.Append(nil)))
}

// next waits for the next frame in the inbox of which it holds; the others stay. Answers to several calls may come in
// any order.
func (w *wire) next(holds func(bus.Frame) bool) bus.Frame {
	w.st.t.Helper()
	for seen := 0; ; {
		for ; seen < len(w.frames); seen++ {
			if f := w.frames[seen]; holds(f) {
				w.frames = slices.Delete(w.frames, seen, seen+1)
				return f
			}
		}
		m, err := w.sub.NextMsg(patience)
		require.NoError(w.st.t, err, "no such frame in the inbox, only %v", w.frames)
		w.take(m.Data)
	}
}

// about waits for the next frame that is about that call.
func (w *wire) about(seq uint64) bus.Frame {
	w.st.t.Helper()
	return w.next(func(f bus.Frame) bool { return f.Header.Seq == seq })
}

// missing waits for the next word that a call before another has not come.
func (w *wire) missing() bus.Header {
	w.st.t.Helper()
	return w.next(func(f bus.Frame) bool { return f.Kind == bus.KindMissing }).Header
}

// take reads a message: a frame, or a bundle of frames.
func (w *wire) take(data []byte) {
	w.st.t.Helper()
	f, err := bus.ParseFrame(data)
	require.NoError(w.st.t, err)
	if f.Kind != bus.KindBundle {
		w.frames = append(w.frames, f)
		return
	}
	for b := f.Body; len(b) > 0; {
		n := binary.BigEndian.Uint32(b)
		w.take(b[4 : 4+n])
		b = b[4+n:]
	}
}

// answer waits for the next frame about that call, which must be its answer.
func (w *wire) answer(seq uint64) bus.Frame {
	w.st.t.Helper()
	f := w.about(seq)
	require.Equal(w.st.t, bus.KindAnswer, f.Kind, "%+v", f.Header)
	require.Equal(w.st.t, w.st.role.Gen, f.Header.Gen)
	return f
}

// good is an answer without an error, decoded.
func (w *wire) good(seq uint64) any {
	w.st.t.Helper()
	f := w.answer(seq)
	require.Empty(w.st.t, f.Header.Code, "%s", f.Body)
	var v any
	require.NoError(w.st.t, bus.Unmarshal(f.Body, &v))
	return v
}

// status waits for the next frame about that call, which must be what the worker says of its state.
func (w *wire) status(seq uint64) bus.Header {
	w.st.t.Helper()
	f := w.about(seq)
	require.Equal(w.st.t, bus.KindStatus, f.Kind, "%+v", f.Header)
	return f.Header
}

// asked asks about a call and gives the state the worker says it is in.
func (w *wire) asked(seq uint64) bus.State {
	w.st.t.Helper()
	w.control(bus.KindAsk, seq)
	return w.status(seq).State
}
