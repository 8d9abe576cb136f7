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

// A server is not asked for a process that does not want to know; the first answer afterwards begins a new period.
func TestAnsweringPauses(t *testing.T) {
	bustest.VirtualTime(t, func(t *testing.T) {
		b := bustest.Open(t, bus.Config{InProcess: bustest.StartServer(t, bustest.Options{})})
		wanted := func() bool { since, _ := b.Answering(); return !since.IsZero() }
		for !wanted() {
			time.Sleep(100 * time.Millisecond)
		}
		first, _ := b.Answering()
		for range 300 { // a minute and a half
			time.Sleep(300 * time.Millisecond)
			require.True(t, wanted(), "it is asked as long as somebody wants to know")
		}
		time.Sleep(5 * time.Minute)
		paused := time.Now()
		_, last := b.Answering()
		require.Greater(t, paused.Sub(last), 3*time.Minute)
		for !wanted() {
			time.Sleep(100 * time.Millisecond)
		}
		second, _ := b.Answering()
		require.False(t, second.Before(paused))
		require.True(t, second.After(first))
	})
}
