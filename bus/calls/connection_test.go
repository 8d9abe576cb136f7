package calls_test

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/calls"
	"troupe/bus/kv"
	"troupe/bus/wire"
)

// closeUnasked makes the server end the connection of b, by a control line that is too long, and returns when the bus is connected again.
func closeUnasked(t *testing.T, b *bus.Bus) {
	t.Helper()
	reconnects := b.Reconnects()
	_ = b.Conn().Publish("x."+strings.Repeat("y", 5000), nil) // written past the bus, which would refuse it
	_ = b.Conn().Flush()
	require.Eventually(t, func() bool { return b.Reconnects() > reconnects && b.Connected() }, 60*time.Second, time.Millisecond)
	require.False(t, b.Closed())
}

func TestWrapLeavesTheConnectionAlone(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{})
	var handled atomic.Int32
	nc, err := nats.Connect("", nats.InProcessServer(srv), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) { handled.Add(1) }))
	require.NoError(t, err)
	defer nc.Close()
	b, err := bus.Wrap(nc, bus.Config{})
	require.NoError(t, err)
	s := newTestRole(t, 1)
	func() { // a host on it, which ends before the bus
		ep := endpoint(t, b)
		defer ep.Close()
		_, err := ep.Scatter(t.Context(), s.call("echo", nil))
		require.NoError(t, err)
	}()
	_, err = b.Dial(t.Context(), "other")
	require.ErrorIs(t, err, bus.ErrInvalid)
	require.NoError(t, b.Close())
	require.NoError(t, b.Close())
	require.True(t, nc.IsConnected())
	sub, err := nc.SubscribeSync("s")
	require.NoError(t, err)
	require.NoError(t, sub.SetPendingLimits(1, 1))
	for range 3 {
		require.NoError(t, nc.Publish("s", []byte("x")))
	}
	require.Eventually(t, func() bool { return handled.Load() > 0 }, 2*time.Minute, time.Millisecond, "its handlers are its own")

	b, err = bus.Wrap(nc, bus.Config{})
	require.NoError(t, err)
	ep := endpoint(t, b)
	g := scatter(t, ep, s.call("echo", nil))
	nc.Close() // before the bus: its calls fail, and nothing is left behind
	require.ErrorIs(t, answers(t, g)[0].Err, bus.ErrClosed)
	_, err = ep.Scatter(t.Context(), s.call("echo", nil))
	require.ErrorIs(t, err, bus.ErrClosed)
	require.NoError(t, b.Close())
	_, err = bus.Wrap(nc, bus.Config{})
	require.ErrorIs(t, err, bus.ErrClosed)
	_, err = bus.Wrap(nil, bus.Config{})
	require.ErrorIs(t, err, bus.ErrClosed)
}

// TestNothingIsSaidLate checks that messages published during an outage are refused, not sent later.
func TestNothingIsSaidLate(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{})
	b := newFaultyConn(t, srv)
	ep := endpoint(t, b.Bus)
	heard, err := b.Conn().SubscribeSync("late")
	require.NoError(t, err)
	bustest.Reconnected(t, b.Conn(), func() {
		srv.Stop()
		require.Eventually(t, func() bool {
			err := ep.Send("late", &wire.Frame{Kind: wire.KindBeat})
			return errors.Is(err, bus.ErrUnavailable)
		}, 2*time.Minute, time.Millisecond)
		srv.Restart()
	})
	require.NoError(t, b.Conn().Flush())
	n, _, err := heard.Pending()
	require.NoError(t, err)
	require.Zero(t, n)
}

// TestOutageLimit checks that calls wait for the server, up to the outage limit.
func TestOutageLimit(t *testing.T) {
	bustest.VirtualTime(t, func(t *testing.T) {
		srv := bustest.StartServer(t, bustest.Options{})
		b := newFaultyConnWith(t, srv, bus.Config{OutageLimit: 30 * time.Second})
		s := newTestRole(t, 2)
		ep := endpoint(t, b.Bus)
		srv.Stop()
		time.Sleep(time.Second)
		began := time.Now()
		for _, a := range answers(t, scatter(t, ep, s.call("echo", nil))) {
			require.ErrorIs(t, a.Err, bus.ErrUnavailable)
			require.ErrorContains(t, a.Err, "the server has been unreachable for 30s")
		}
		require.InDelta(t, 30, time.Since(began).Seconds(), 2)

		bustest.Reconnected(t, b.Conn(), srv.Restart)
		time.Sleep(time.Minute)
		srv.Stop()
		time.Sleep(time.Second)
		began = time.Now()
		require.ErrorIs(t, answers(t, scatter(t, ep, s.call("echo", nil)))[0].Err, bus.ErrUnavailable)
		require.InDelta(t, 30, time.Since(began).Seconds(), 2, "another outage, which begins anew")
		srv.Restart()
	})
}

// TestClosedInTheMiddle checks that pending calls and transfers end when their bus is closed, and leave nothing behind.
func TestClosedInTheMiddle(t *testing.T) {
	for i := range 10 {
		b := bustest.Open(t)
		s := newTestRole(t, 4)
		for r := range s.world {
			s.start(dial(t, b), r)
		}
		driver := dial(t, b)
		ep := endpoint(t, driver)
		var under []*calls.Gather
		for k := range 8 {
			under = append(under, scatter(t, ep, s.call("echo", pattern(k<<20, k))))
		}
		time.Sleep(time.Duration(i) * 3 * time.Millisecond)
		require.NoError(t, driver.Close())
		for _, g := range under {
			for _, a := range answers(t, g) {
				if a.Err != nil {
					require.ErrorIs(t, a.Err, bus.ErrClosed, fmt.Sprint(i))
				}
			}
		}
		require.Zero(t, ep.Values().Uploads())
		require.Zero(t, ep.Pending())
	}
}

// TestCallsWithACredentialsFile makes calls over connections that Dial opens with the same file.
func TestCallsWithACredentialsFile(t *testing.T) {
	t.Parallel()
	op := bustest.StartOperator(t, bustest.Options{Listen: true})
	b := bustest.Open(t, bus.Config{URLs: []string{op.URL()}, CredsFile: op.Creds(bustest.Grant{})})
	s := newTestRole(t, 3)
	for r := range s.world {
		s.start(dial(t, b), r)
	}
	body := pattern(4<<20, 1)
	for _, a := range good(t, scatter(t, endpoint(t, b), s.call("echo", body))) {
		require.Equal(t, body, a.Body)
	}
}

// TestCredentialsExpireInUse checks that a credentials file renewed in time keeps the bus open, and that an expired one
// ends the bus and all pending calls with the reason.
func TestCredentialsExpireInUse(t *testing.T) {
	t.Parallel()
	op := bustest.StartOperator(t, bustest.Options{Listen: true})
	soon := func(after time.Duration) bustest.Grant { return bustest.Grant{Expires: time.Now().Add(after)} }
	file := op.Creds(soon(2 * time.Second))
	told := make(chan error, 100)
	b := bustest.Open(t, bus.Config{URLs: []string{op.URL()}, CredsFile: file, OutageLimit: 2 * time.Second, OnError: func(err error) { told <- err }})
	s := newTestRole(t, 1)
	ep := endpoint(t, b)
	bustest.Reconnected(t, b.Conn(), func() {
		require.ErrorContains(t, <-told, "expired")
		op.Renew(file, soon(3*time.Second))
	})
	// A server may accept the expired file for a moment, and close that connection too.
	require.Eventually(t, func() bool { return b.Flush(t.Context()) == nil }, 5*time.Second, time.Millisecond)
	g := scatter(t, ep, s.call("wait", nil)) // of a role without workers
	err := answers(t, g)[0].Err
	require.ErrorContains(t, err, file)
	require.ErrorContains(t, err, "expired")
	require.Eventually(t, b.Conn().IsClosed, 2*time.Minute, time.Millisecond)
	_, err = kv.Open(t.Context(), b, kv.Config{Bucket: "b"})
	require.ErrorIs(t, err, bus.ErrClosed)
	require.ErrorContains(t, err, "expired")
	require.Empty(t, told, "it is said once, not at each attempt")
}

// TestPendingCallsSurviveAnUnaskedClose closes the connections of the caller and of the worker while calls are pending: each call is
// answered once, without a repetition by the program.
func TestPendingCallsSurviveAnUnaskedClose(t *testing.T) {
	srv := bustest.StartServer(t, bustest.Options{Listen: true})
	cfg := bus.Config{OnError: func(error) {}, URLs: []string{srv.URL()}}
	callers, workers := bustest.Open(t, cfg), bustest.Open(t, cfg)
	s := newTestRole(t, 2)
	for r := range s.world {
		s.start(workers, r)
	}
	ep := endpoint(t, callers)
	for round := range 4 {
		var pending []*calls.Gather
		for k := range 16 {
			pending = append(pending, scatter(t, ep, s.call("echo", pattern(1000*k, k))))
		}
		closeUnasked(t, []*bus.Bus{callers, workers}[round%2])
		for _, g := range pending {
			for _, a := range answers(t, g) {
				require.NoError(t, a.Err)
			}
		}
	}
}
