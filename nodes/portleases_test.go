package nodes

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
)

// This must not happen: a port stays leased for a role whose driver never stopped it.
func TestIdlePortsExpire(t *testing.T) {
	var l portLeases
	defer l.releaseAll()
	id := WorkerID{Namespace: "run", Role: "role", Incarnation: "one"}
	ports, err := l.acquire(id, 1)
	require.NoError(t, err)
	hosted := map[bus.Address]bool{id.Address(): true}
	at := time.Now()
	l.expire(at, hosted)
	at = at.Add(time.Hour)
	l.expire(at, hosted)
	require.Len(t, l.leased, 1, "a worker of the role runs")
	clear(hosted)
	l.expire(at, hosted)
	l.expire(at.Add(portIdleTimeout), hosted)
	require.Len(t, l.leased, 1, "the role may restart")
	l.expire(at.Add(portIdleTimeout+time.Second), hosted)
	require.Empty(t, l.leased)
	fds, err := bindPort(ports[0])
	require.NoError(t, err, "the port is free")
	l.leased[portHolder{}] = &portLease{fds: fds} // to be closed
}
