package bus

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go"
)

// NATS reconnects by itself after the loss of a connection. After some errors of the server it closes the connection for good
// instead: a control line that is too long, an operation that the server could not parse, a payload over its limit. A program
// has not asked for that, so the bus opens another connection in its place. Subscriptions of the bus move to it, the status of every
// pending call is requested, and what reads a stream or watches a bucket opens it again: all as after a reconnect.

// reopenBackoff is the wait before a connection that NATS has closed is replaced. It grows while new connections are closed soon.
var reopenBackoff = Backoff{First: 20 * time.Millisecond, Most: 2 * time.Second}

// reopenSteady is the age of a connection after which the waits begin again.
const reopenSteady = 10 * time.Second

// closedUnasked reports whether a closed connection was closed neither by the program nor by the refusals of the server: NATS then
// has an error to tell.
func (b *Bus) closedUnasked() bool {
	failed := b.Conn().LastError() != nil
	b.mu.Lock()
	defer b.mu.Unlock()
	return failed && b.owned && !b.closed && !b.refusals.ended
}

// reopen replaces a connection that NATS has closed. It returns false if the bus ends instead.
func (b *Bus) reopen(waits *Waits) bool {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	Go(func() {
		select {
		case <-b.closingCh:
			cancel()
		case <-ctx.Done():
		}
	})
	old := b.conn.Load()
	b.cfg.Logger.Error("bus: the server has closed the connection; opening another", "error", old.nc.LastError())
	for waits.Wait(ctx) == nil {
		err := b.replace(ctx, old)
		switch {
		case err == nil:
			b.cfg.Logger.Warn("bus: the connection is open again", "server", b.Conn().ConnectedUrlRedacted())
			return true
		case authFailed(err):
			b.turnedAway(old.nc, err)
		}
		if !b.closedUnasked() {
			return false
		}
		b.cfg.Logger.Warn("bus: the connection could not be opened again; trying on", "error", err)
	}
	return false
}

// replace opens a connection with the options of the first one, and moves the subscriptions to it.
func (b *Bus) replace(ctx context.Context, old *conn) error {
	opts, err := b.options()
	if err != nil {
		return err
	}
	nc, err := connectOnce(ctx, b.cfg, opts)
	if err != nil {
		return err
	}
	c, err := b.newConn(nc)
	if err != nil {
		nc.Close()
		return err
	}
	c.before = old.reconnects() + 1
	if err := b.move(c); err != nil {
		nc.Close()
		return err
	}
	old.nc.RemoveStatusListener(old.statusCh)
	return nil
}

// move makes c the connection of the bus, unless that is closed, and subscribes to everything on it.
func (b *Bus) move(c *conn) error {
	b.subscribing.Lock()
	defer b.subscribing.Unlock()
	if b.Closed() {
		return Errorf(CodeClosed, "the bus is closed")
	}
	for s := range b.subscriptions {
		if err := s.openLocked(c.nc); err != nil {
			return err
		}
	}
	b.conn.Store(c)
	return nil
}

// reconnects counts how often the connection, and those before it, were made again.
func (c *conn) reconnects() uint64 { return c.before + c.nc.Stats().Reconnects }

// Reconnects counts how often the connection was lost and made again. Messages in flight may have been lost each time.
func (b *Bus) Reconnects() uint64 { return b.conn.Load().reconnects() }

// Subscription is one subscription of a bus. It outlives the connection: see reopen.
type Subscription struct {
	bus     *Bus
	subject string
	handle  nats.MsgHandler // nil: messages go to ch
	ch      chan *Msg
	bytes   int // limit of the messages that wait for handle; 0: the default of NATS

	sub *nats.Subscription // guarded by bus.subscribing
}

func (b *Bus) subscribe(s *Subscription) (*Subscription, error) {
	s.bus = b
	b.subscribing.Lock()
	defer b.subscribing.Unlock()
	if b.Closed() {
		return nil, Errorf(CodeClosed, "subscribe to %s: the connection to the bus is closed", s.subject)
	}
	err := s.openLocked(b.Conn())
	replaced := errors.Is(err, nats.ErrConnectionClosed) && b.closedUnasked() // the subscription opens with the next connection
	if err != nil && !replaced {
		return nil, b.natsError("subscribe to "+s.subject, err)
	}
	b.subscriptions[s] = struct{}{}
	return s, nil
}

// Subject is the subject of the subscription.
func (s *Subscription) Subject() string { return s.subject }

// openLocked subscribes on a connection.
func (s *Subscription) openLocked(nc *nats.Conn) (err error) {
	var sub *nats.Subscription
	if s.handle != nil {
		sub, err = nc.Subscribe(s.subject, GuardMsg(s.handle))
	} else {
		sub, err = nc.ChanSubscribe(s.subject, s.ch)
	}
	if err == nil && s.bytes > 0 {
		err = sub.SetPendingLimits(-1, s.bytes)
	}
	if err == nil {
		s.sub = sub
	}
	return err
}

// Unsubscribe ends the subscription. A message that has arrived may still be handled.
func (s *Subscription) Unsubscribe() error {
	s.bus.subscribing.Lock()
	delete(s.bus.subscriptions, s)
	sub := s.sub
	s.bus.subscribing.Unlock()
	if sub == nil {
		return nil
	}
	if err := sub.Unsubscribe(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) && !errors.Is(err, nats.ErrBadSubscription) {
		return s.bus.natsError("unsubscribe from "+s.subject, err)
	}
	return nil
}
