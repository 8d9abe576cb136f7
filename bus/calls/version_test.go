package calls_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/bus/wire"
)

// TestCallerOfAnotherVersionIsTold checks that a worker and a sequencer answer with their version.
func TestCallerOfAnotherVersionIsTold(t *testing.T) {
	b := bustest.Open(t)
	s := newTestRole(t, 1)
	s.ordered = true
	s.start(b)
	for _, subject := range []string{s.to.All(), s.to.Rank(0), s.to.Control(), s.to.ControlRank(0), s.to.Sequencer()} {
		reply, err := b.Conn().Request(subject, otherMajor(wire.Frame{Kind: wire.KindCall}), 5*time.Second)
		require.NoError(t, err, subject)
		f, err := wire.ParseFrame(reply.Data)
		require.NoError(t, err)
		require.Equal(t, wire.KindVersion, f.Kind)
		require.EqualValues(t, wire.Major, reply.Data[2])
	}
}

// TestWorkerOfAnotherVersion checks that the answer of a worker of another version ends the call with an error that
// names both versions.
func TestWorkerOfAnotherVersion(t *testing.T) {
	for _, answers := range []bool{false, true} {
		b := bustest.Open(t)
		s := newTestRole(t, 2)
		_, err := b.Conn().Subscribe(s.to.Prefix()+".>", func(m *nats.Msg) {
			f, err := wire.ParseFrame(m.Data)
			if answers && err == nil && f.Kind == wire.KindCall {
				_ = b.Conn().Publish("troupe.test.reply."+f.Header.Session+".in", otherMajor(wire.Frame{Kind: wire.KindAnswer, Header: wire.Header{Seq: f.Header.Seq}}))
				return
			}
			_ = m.Respond(otherMajor(wire.Frame{Kind: wire.KindVersion}))
		})
		require.NoError(t, err)
		c := s.call("echo", nil)
		c.AskAfter = 10 * time.Millisecond
		for _, a := range answersOf(t, endpoint(t, b), c) {
			require.ErrorIs(t, a.Err, bus.ErrVersion)
			require.ErrorContains(t, a.Err, "echo uses version 2 of the wire, this process version 1; run the same major version on both")
		}
	}
}

func answersOf(t *testing.T, ep *calls.Endpoint, c calls.Call) []calls.Answer {
	t.Helper()
	return answers(t, scatter(t, ep, c))
}

// otherMajor is the frame with the next major version.
func otherMajor(f wire.Frame) []byte {
	msg := f.Append(nil)
	msg[2] = wire.Major + 1
	return msg
}
