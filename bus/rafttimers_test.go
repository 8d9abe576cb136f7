package bus

import (
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/stretchr/testify/require"
)

// The raft timers are set behind the back of nats-server. With another version of it, docs/operations.md, "Timers", says what to measure
// before this test is changed.
func TestRaftTimersBelongToOneVersionOfNATS(t *testing.T) {
	require.Equal(t, "2.15.2", server.VERSION)
}
