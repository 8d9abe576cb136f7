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

// Open returns a bus that is closed at the end of the test: with a private embedded server, or with cfg (at most one).
// An asynchronous error fails the test unless cfg.OnError is set, except the loss of a server that belongs to another
// bus during a write. The log goes to the test's output unless cfg.Logger is set.
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

// Reconnected calls a function that breaks the connection of nc, and returns when nc has reconnected. IsConnected is
// not sufficient: it stays true for a moment after the loss, and messages published then are lost.
func Reconnected(t testing.TB, nc *nats.Conn, do func()) {
	t.Helper()
	backCh := nc.StatusChanged(nats.CONNECTED)
	defer nc.RemoveStatusListener(backCh)
	do()
	select {
	case <-backCh:
	case <-time.After(2 * time.Minute):
		t.Fatalf("bustest: not reconnected after two minutes; the connection is %v", nc.Status())
	}
}

// output is a test's log until the test ends; later lines are dropped.
type output struct {
	t      testing.TB
	shared bool // the server does not belong to the bus

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
