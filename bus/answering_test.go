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
	require.Eventually(t, answers, 20*time.Second, 10*time.Millisecond)
	first := since()

	moment := time.Now()
	require.Eventually(t, func() bool { return b.AnsweredSince(moment) }, 20*time.Second, time.Millisecond)
	require.Less(t, time.Since(moment), 400*time.Millisecond, "it is asked at once, not at the next round trip")

	faults.Freeze()
	frozen := time.Now()
	require.Never(t, func() bool { return b.AnsweredSince(frozen) }, time.Second, 10*time.Millisecond)
	require.Eventually(t, func() bool { return !answers() }, 20*time.Second, 10*time.Millisecond, "a server that hangs")
	require.True(t, b.Connected(), "its connection is up")
	faults.Thaw()
	thawed := time.Now()
	require.Eventually(t, answers, 20*time.Second, 10*time.Millisecond)
	second := since()
	require.True(t, second.After(first))

	require.Eventually(t, func() bool { return time.Since(thawed) > 3*time.Second }, 20*time.Second, 10*time.Millisecond)
	same, last := b.Answering()
	require.Equal(t, second, same, "a server that goes on answering")
	require.Less(t, time.Since(last), 3*time.Second)

	bustest.Reconnected(t, b.Conn(), faults.Cut)
	require.Eventually(t, answers, 20*time.Second, 10*time.Millisecond)
	third := since()
	require.True(t, third.After(second), "another connection")
}
