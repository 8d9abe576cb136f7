package bus_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
)

func TestRetry(t *testing.T) {
	quick := bus.Backoff{First: time.Millisecond, Most: 2 * time.Millisecond}
	n := 0
	require.NoError(t, bus.Retry(t.Context(), quick, func() error {
		if n++; n < 5 {
			return errors.New("not yet")
		}
		return nil
	}))
	require.Equal(t, 5, n)

	n = 0
	err := bus.Retry(t.Context(), quick, func() error { n++; return bus.Permanent(bus.ErrExists) })
	require.Equal(t, 1, n)
	require.Equal(t, bus.ErrExists, err, "the mark is removed")

	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	err = bus.Retry(ctx, quick, func() error { return errors.New("the disk is full") })
	require.ErrorIs(t, err, bus.ErrTimedOut)
	require.ErrorContains(t, err, "the disk is full")
	require.NoError(t, bus.Permanent(nil))
}

func TestBackoffGrowsToItsBound(t *testing.T) {
	waits := bus.Backoff{First: 10 * time.Millisecond, Most: 40 * time.Millisecond}.Start()
	for i := range 50 {
		d := waits.Next()
		require.LessOrEqual(t, d, 60*time.Millisecond, "jitter is half of the wait")
		if i == 0 {
			require.LessOrEqual(t, d, 15*time.Millisecond)
		}
		if i > 10 {
			require.GreaterOrEqual(t, d, 20*time.Millisecond)
		}
	}
	waits.Reset()
	require.LessOrEqual(t, waits.Next(), 15*time.Millisecond)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, waits.Wait(ctx), context.Canceled)
}
