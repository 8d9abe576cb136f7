package bus_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/wire"
)

func TestServeAndAsk(t *testing.T) {
	b := bustest.Open(t)
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err := b.Ask(short, "test.double", 21, nil)
	require.ErrorIs(t, err, bus.ErrTimedOut)
	require.ErrorContains(t, err, "no process serves it")
	_, err = b.Request(t.Context(), "test.double", nil)
	require.ErrorIs(t, err, bus.ErrNoResponders)

	result := make(chan error, 1)
	var got int
	go func() { result <- b.Ask(t.Context(), "test.double", 21, &got) }() // it waits for what serves the subject
	sub, err := b.Serve("test.double", func(m *bus.Msg) (any, error) {
		var n int
		if err := wire.Unmarshal(m.Data, &n); err != nil {
			return nil, err
		}
		if n < 0 {
			return nil, bus.Errorf(bus.CodeRefused, "%d is negative; send a positive number", n)
		}
		return 2 * n, nil
	})
	require.NoError(t, err)
	require.NoError(t, <-result)
	require.Equal(t, 42, got)
	err = b.Ask(t.Context(), "test.double", -1, &got)
	require.ErrorIs(t, err, bus.ErrRefused)
	require.EqualError(t, err, "-1 is negative; send a positive number")
	require.ErrorIs(t, b.Ask(t.Context(), "test.double", 1, new([]string)), bus.ErrRefused, "the answer is a number")
	require.NoError(t, sub.Unsubscribe())
}
