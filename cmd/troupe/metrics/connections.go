package metrics

import (
	"net"
	"net/http"
	"sync"
	"time"
)

// idleLimit is how long a connection without a request stays open.
const idleLimit = time.Minute

// connections bounds the connections of a server. Beyond the bound, the one that has been without a request for longest is closed: a
// client that opens connections and says nothing cannot keep others out. If all have requests, the new one is closed.
type connections struct {
	most int

	mu      sync.Mutex
	changes uint64
	idle    map[net.Conn]uint64 // connections without a request, with the change that made them so
	active  map[net.Conn]struct{}
}

func newConnections(most int) *connections {
	return &connections{most: most, idle: map[net.Conn]uint64{}, active: map[net.Conn]struct{}{}}
}

// changed is the ConnState of the server.
func (c *connections) changed(conn net.Conn, state http.ConnState) {
	if surplus := c.record(conn, state); surplus != nil {
		_ = surplus.Close() // its client is gone or says nothing
	}
}

// record notes the state of a connection, and returns the one to close.
func (c *connections) record(conn net.Conn, state http.ConnState) (surplus net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.idle, conn)
	delete(c.active, conn)
	switch c.changes++; state {
	case http.StateActive:
		c.active[conn] = struct{}{}
	case http.StateNew, http.StateIdle:
		c.idle[conn] = c.changes
	}
	if state != http.StateNew || len(c.idle)+len(c.active) <= c.most {
		return nil
	}
	for one, since := range c.idle {
		if surplus == nil || since < c.idle[surplus] {
			surplus = one
		}
	}
	delete(c.idle, surplus)
	return surplus
}
