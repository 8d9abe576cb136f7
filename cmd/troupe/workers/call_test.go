package workers

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus/calls"
	"troupe/bus/wire"
)

func TestWaitingFor(t *testing.T) {
	require.Equal(t, "1 of 3 ranks have answered; rank 1 is running for 3s", waitingFor([]calls.Progress{
		{Rank: 0, Answered: true}, {Rank: 1, State: wire.StateRunning, For: 3100 * time.Millisecond}, {Rank: 2},
	}))
}
