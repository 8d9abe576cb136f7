package bus_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
)

func TestAnswering(t *testing.T) {
	t.Parallel()
	srv := bustest.StartServer(t, bustest.Options{})
	faults := bustest.NewFaults(srv)
	b := bustest.Open(t, bus.Config{InProcess: faults})
	since := func() time.Time { s, _ := b.Answering(); return s }
	answers := func() bool { return !since().IsZero() }
	require.Eventually(t, answers, 2*time.Minute, 10*time.Millisecond)
	first := since()

	require.Eventually(t, func() bool {
		moment := time.Now()
		for !b.AnsweredSince(moment) {
			time.Sleep(time.Millisecond)
		}
		return time.Since(moment) < 400*time.Millisecond
	}, 2*time.Minute, time.Millisecond, "it is asked at once, not at the next round trip")

	faults.Freeze()
	frozen := time.Now()
	require.Never(t, func() bool { return b.AnsweredSince(frozen) }, time.Second, 10*time.Millisecond)
	require.Eventually(t, func() bool { return !answers() }, 2*time.Minute, 10*time.Millisecond, "a server that hangs")
	require.True(t, b.Connected(), "its connection is up")
	faults.Thaw()
	thawed := time.Now()
	require.Eventually(t, answers, 2*time.Minute, 10*time.Millisecond)
	second := since()
	require.True(t, second.After(first))

	require.Eventually(t, func() bool {
		_, last := b.Answering()
		return last.Sub(thawed) > 3*time.Second
	}, 2*time.Minute, 10*time.Millisecond)
	require.Equal(t, second, since(), "a server that goes on answering")

	bustest.Reconnected(t, b.Conn(), faults.Cut)
	require.Eventually(t, answers, 2*time.Minute, 10*time.Millisecond)
	third := since()
	require.True(t, third.After(second), "another connection")
}
