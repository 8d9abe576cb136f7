package bustest

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"troupe/bus"
)

// Open returns a bus that is closed at the end of the test: a private embedded server, or what cfg (at most one) says.
// An asynchronous error fails the test unless cfg.OnError is set; that a server which is not the bus's own went away
// during a write is none. The log goes to the test's output unless cfg.Logger is set.
func Open(t testing.TB, cfg ...bus.Config) *bus.Bus {
	t.Helper()
	var c bus.Config
	if len(cfg) > 1 {
		t.Fatalf("bustest.Open: %d configs; give one at most", len(cfg))
	}
	if len(cfg) == 1 {
		c = cfg[0]
	}
	out := &output{t: t, shared: c.InProcess != nil || len(c.URLs) > 0}
	if c.Logger == nil {
		c.Logger = slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: slog.LevelWarn}))
	}
	if c.OnError == nil {
		c.OnError = out.fail
	}
	b, err := bus.Open(t.Context(), c)
	if err != nil {
		t.Fatalf("bustest.Open: %v", err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("close the bus: %v", err)
		}
		out.end()
	})
	return b
}

// Reconnected does what costs nc its connection, and returns when nc has a new one. IsConnected would not do: for a
// moment after the loss it is still true, and what is published then is lost.
func Reconnected(t testing.TB, nc *nats.Conn, do func()) {
	t.Helper()
	backCh := nc.StatusChanged(nats.CONNECTED)
	defer nc.RemoveStatusListener(backCh)
	do()
	select {
	case <-backCh:
	case <-time.After(20 * time.Second):
		t.Fatalf("bustest: not reconnected after 20 s; the connection is %v", nc.Status())
	}
}

// output is a test's log until the test ends; what a connection still has to say then goes nowhere.
type output struct {
	t      testing.TB
	shared bool // the server is not the bus's own

	mu    sync.Mutex
	ended bool
}

func (o *output) Write(line []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ended {
		return len(line), nil
	}
	return o.t.Output().Write(line)
}

func (o *output) fail(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.ended && !(o.shared && lost(err)) {
		o.t.Errorf("asynchronous error on the bus: %v", err)
	}
}

func lost(err error) bool {
	for _, why := range []error{io.EOF, io.ErrClosedPipe, net.ErrClosed, syscall.EPIPE, syscall.ECONNRESET} {
		if errors.Is(err, why) {
			return true
		}
	}
	return false
}

func (o *output) end() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ended = true
}
