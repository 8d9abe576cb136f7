package calls_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/wire"
)

// TestHostileFrames sends frames of every kind, with names that no subject may have, to a worker, the sequencer of its role and the inbox of
// a driver. All are dropped and counted, and the connections stay.
func TestHostileFrames(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	open := func() *bus.Bus { return bustest.Open(t, bus.Config{URLs: []string{srv.URL()}}) }
	workers, driver, stranger := open(), open(), open()
	s := newTestRole(t, 1)
	s.start(workers, 0)
	ep := endpoint(t, driver)
	_, err := ep.Sequence(s.to, 1)
	require.NoError(t, err)
	for _, b := range []*bus.Bus{workers, driver} {
		require.NoError(t, b.Flush(t.Context())) // the server knows their subscriptions
	}
	inbox := ep.Inbox(ep.Session())
	names := []string{strings.Repeat("x", 5000), strings.Repeat("x", 65), "a.b", "*", ">", "a b", "a\r\nPUB evil 0\r\n\r\n", "\xff", "../x"}
	sent := uint64(0)
	for kind := range 32 {
		for _, name := range names {
			for _, h := range []wire.Header{
				{Session: name, Seq: 1, Method: "echo"},
				{Session: "s", Seq: 1, Stream: name, Order: 9, Prev: 8, Method: "echo"},
				{Session: "s", Seq: 1, Method: "echo", Ref: wire.BodyRef{Owner: name, ID: 1, Len: 1 << 20}},
				{Session: "s", Seq: 1, Method: "echo", Location: wire.Location{Owner: name}},
				{Session: "s", Seq: 1, Method: "echo", Arguments: []wire.Reference{{Owner: name, ID: 1}}},
				{Session: "s", Seq: 1, References: []wire.Reference{{Owner: name, ID: 1}}},
			} {
				f := wire.Frame{Kind: wire.Kind(kind), Header: h, Body: wire.AppendReferences(nil, []wire.Reference{{Owner: name, ID: 1}})}
				data := f.Append(nil)
				for _, subject := range []string{s.to.Rank(0), s.to.All(), s.to.Control(), s.to.ControlRank(0), s.to.Sequencer(), inbox} {
					require.NoError(t, stranger.Publish(subject, data))
					sent++
				}
			}
			missing := wire.Frame{Kind: wire.KindMissing, Header: wire.Header{Session: "s", Stream: "s", Object: name, Order: 9}}
			routed := wire.Frame{Kind: wire.KindSequence, Header: wire.Header{Session: "s", Seq: 1}}
			routed.Body = wire.AppendRouted(nil, s.to.Prefix()+". "+name, &wire.Frame{Kind: wire.KindCall, Header: wire.Header{Session: "s", Seq: 1}})
			require.NoError(t, stranger.Publish(inbox, missing.Append(nil)))
			require.NoError(t, stranger.Publish(s.to.Sequencer(), routed.Append(nil)))
			sent += 2
			counted := func() bool { return workers.MalformedCount()+driver.MalformedCount() == sent }
			require.Eventually(t, counted, 60*time.Second, 100*time.Microsecond, "all are counted") // buffers of receivers are bounded
		}
		for _, a := range answers(t, scatter(t, ep, s.call("echo", pattern(100, kind)))) {
			require.NoError(t, a.Err)
		}
	}
	for _, b := range []*bus.Bus{workers, driver, stranger} {
		require.Zero(t, b.Reconnects())
		require.True(t, b.Connected())
	}
}
