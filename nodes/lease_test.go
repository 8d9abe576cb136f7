package nodes

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
)

// Harm forbidden: a port is held for ever for a role whose driver never came back to stop it.
func TestForgottenPortsAreReturned(t *testing.T) {
	var l leases
	defer l.releaseAll()
	id := WorkerID{Namespace: "run", Role: "role", Incarnation: "one"}
	ports, err := l.take(id, 1)
	require.NoError(t, err)
	plays := map[bus.Address]bool{id.Address(): true}
	at := time.Now()
	l.tidy(at, plays)
	at = at.Add(time.Hour)
	l.tidy(at, plays)
	require.Len(t, l.held, 1, "its worker runs")
	clear(plays)
	l.tidy(at, plays)
	l.tidy(at.Add(portUnused), plays)
	require.Len(t, l.held, 1, "it may be restarted")
	l.tidy(at.Add(portUnused+time.Second), plays)
	require.Empty(t, l.held)
	fds, err := holdPort(ports[0])
	require.NoError(t, err, "it is free")
	l.held[leaseKey{}] = &lease{fds: fds} // to be closed
}
