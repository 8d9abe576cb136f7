package actorstest

import (
	"encoding/binary"
	"slices"
	"time"

	"troupe/bus"
	"troupe/bus/wire"

	"github.com/stretchr/testify/require"
)

// rawCaller is a caller that sends single frames, to produce repeats, delays and wrong orders.
type rawCaller struct {
	st      *roleFixture
	session string
	ch      chan *bus.Msg
	frames  []wire.Frame // received and not read yet
}

// rawCaller opens a caller with its own session.
func (st *roleFixture) rawCaller(session string) *rawCaller {
	st.t.Helper()
	w := &rawCaller{st: st, session: st.role.Address.Role + "-" + session}
	w.ch = st.subscribe(st.ep.Inbox(w.session))
	return w
}

// header is the envelope of a first message to rank 0.
func (w *rawCaller) header(seq uint64, method string) wire.Header {
	return wire.Header{Session: w.session, Seq: seq, Method: method, Caller: "wire", Inline: 32 << 10, Gens: w.gens()}
}

func (w *rawCaller) gens() map[int]uint32 {
	if w.st.role.Gen == 0 {
		return nil
	}
	return map[int]uint32{0: w.st.role.Gen}
}

// call sends a call to rank 0.
func (w *rawCaller) call(h wire.Header, args ...any) {
	w.st.t.Helper()
	w.send(w.st.role.Address.Rank(0), wire.Frame{Kind: wire.KindCall, Header: h, Body: w.st.body(args...)})
}

// again repeats a call, as a caller does that misses the answer.
func (w *rawCaller) again(h wire.Header, args ...any) {
	w.st.t.Helper()
	h.Age = time.Millisecond
	w.call(h, args...)
}

// control sends a control frame about a call.
func (w *rawCaller) control(kind wire.Kind, seq uint64) {
	w.st.t.Helper()
	h := wire.Header{Session: w.session, Seq: seq}
	if kind == wire.KindAsk {
		h.Age = time.Millisecond
	}
	w.send(w.st.role.Address.ControlRank(0), wire.Frame{Kind: kind, Header: h})
}

func (w *rawCaller) send(subject string, f wire.Frame) {
	w.st.t.Helper()
	require.NoError(w.st.t, w.st.ep.Bus().Publish(subject, f.Append(nil)))
}

// next waits for the next frame for which holds is true; the others stay. Answers to several calls may come in any
// order.
func (w *rawCaller) next(holds func(wire.Frame) bool) wire.Frame {
	w.st.t.Helper()
	for seen := 0; ; {
		for ; seen < len(w.frames); seen++ {
			if f := w.frames[seen]; holds(f) {
				w.frames = slices.Delete(w.frames, seen, seen+1)
				return f
			}
		}
		w.take(w.st.receive(w.ch, "no such frame in the inbox, only %v", w.frames))
	}
}

// about waits for the next frame about the call.
func (w *rawCaller) about(seq uint64) wire.Frame {
	w.st.t.Helper()
	return w.next(func(f wire.Frame) bool { return f.Header.Seq == seq })
}

// missing waits for the next report of a missing call.
func (w *rawCaller) missing() wire.Header {
	w.st.t.Helper()
	return w.next(func(f wire.Frame) bool { return f.Kind == wire.KindMissing }).Header
}

// take parses a message: a frame, or a bundle of frames.
func (w *rawCaller) take(data []byte) {
	w.st.t.Helper()
	f, err := wire.ParseFrame(data)
	require.NoError(w.st.t, err)
	if f.Kind != wire.KindBundle {
		w.frames = append(w.frames, f)
		return
	}
	for b := f.Body; len(b) > 0; {
		n := binary.BigEndian.Uint32(b)
		w.take(b[4 : 4+n])
		b = b[4+n:]
	}
}

// answer waits for the next frame about the call, which must be its answer.
func (w *rawCaller) answer(seq uint64) wire.Frame {
	w.st.t.Helper()
	f := w.about(seq)
	require.Equal(w.st.t, wire.KindAnswer, f.Kind, "%+v", f.Header)
	require.Equal(w.st.t, w.st.role.Gen, f.Header.Gen)
	return f
}

// good waits for the call's result and decodes it.
func (w *rawCaller) good(seq uint64) any {
	w.st.t.Helper()
	f := w.answer(seq)
	require.Empty(w.st.t, f.Header.Code, "%s", f.Body)
	var v any
	require.NoError(w.st.t, wire.Unmarshal(f.Body, &v))
	return v
}

// status waits for the next frame about the call, which must be its status.
func (w *rawCaller) status(seq uint64) wire.Header {
	w.st.t.Helper()
	f := w.about(seq)
	require.Equal(w.st.t, wire.KindStatus, f.Kind, "%+v", f.Header)
	return f.Header
}

// asked asks for the status of the call and returns its state.
func (w *rawCaller) asked(seq uint64) wire.State {
	w.st.t.Helper()
	w.control(wire.KindAsk, seq)
	return w.status(seq).State
}
