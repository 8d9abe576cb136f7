package nodes

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
)

// Harm forbidden: a port stays leased for a role whose driver never stopped it.
func TestForgottenPortsAreReturned(t *testing.T) {
	var l leases
	defer l.releaseAll()
	id := WorkerID{Namespace: "run", Role: "role", Incarnation: "one"}
	ports, err := l.take(id, 1)
	require.NoError(t, err)
	hosted := map[bus.Address]bool{id.Address(): true}
	at := time.Now()
	l.tidy(at, hosted)
	at = at.Add(time.Hour)
	l.tidy(at, hosted)
	require.Len(t, l.held, 1, "a worker of the role runs")
	clear(hosted)
	l.tidy(at, hosted)
	l.tidy(at.Add(portUnused), hosted)
	require.Len(t, l.held, 1, "the role may restart")
	l.tidy(at.Add(portUnused+time.Second), hosted)
	require.Empty(t, l.held)
	fds, err := holdPort(ports[0])
	require.NoError(t, err, "the port is free")
	l.held[leaseKey{}] = &lease{fds: fds} // to be closed
}
