package bus

import (
	"strings"

	"github.com/nats-io/nats.go"

	"troupe/internal/ab"
)

var batchWrites = ab.On(ab.BatchWrites)

// WriteBatch holds back what is said on a connection, so that it goes out together.
type WriteBatch struct{ w *batchConn }

// BatchWrites holds back what every endpoint of this bus says from now on, until the cork is taken out. Put in and taken out around a
// few quick calls it saves the wake-up of the goroutine that otherwise sends: what was said is written by whoever takes out
// the last cork. Where the connection is not a plain socket (TLS, a WebSocket, the server in this process) it does nothing.
func (b *Bus) BatchWrites() WriteBatch {
	w := b.wire.Load()
	if w != nil {
		w.hold()
	}
	return WriteBatch{w}
}

// Flush takes the cork out. now: what was said goes out before it returns, as far as the socket takes it without a wait; else
// within a tenth of a millisecond, with what comes until then, or with the next Push.
func (c WriteBatch) Flush(now bool) {
	if c.w != nil {
		c.w.release(now)
	}
}

// Push sends what is held back at this moment.
func (b *Bus) Push() {
	if w := b.wire.Load(); w != nil {
		w.push()
	}
}

// adopt makes the connection that NATS has just made one that can be corked, if the bus can speak NATS's language on it.
func (b *Bus) adopt(nc *nats.Conn) {
	w := b.dialled.Load()
	if _, err := nc.TLSConnectionState(); err == nil || strings.HasPrefix(nc.ConnectedUrl(), "ws") {
		w = nil
	}
	b.wire.Store(w)
}

// publish says one message. What NATS itself has not sent yet goes first: the subscription that an answer comes to, perhaps.
func (b *Bus) publish(subject, reply string, data []byte) error {
	if w := b.wire.Load(); w != nil && b.nc.IsConnected() && int64(len(data)) <= b.nc.MaxPayload() {
		if n, err := b.nc.Buffered(); n == 0 && err == nil {
			if done, err := w.publish(subject, reply, data); done {
				return err
			}
		}
	}
	var err error
	if reply == "" {
		err = b.nc.Publish(subject, data)
	} else {
		err = b.nc.PublishRequest(subject, reply, data)
	}
	if err != nil {
		return natsError("publish", err)
	}
	return nil
}
