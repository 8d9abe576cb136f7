package stream

import (
	"context"
	"errors"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
)

// Codes of a write that does not follow the expected sequence.
const (
	codeWrongLastSeq      = jetstream.ErrorCode(10071)
	codeWrongLastSeqBatch = jetstream.ErrorCode(10164)
)

// closed reports that the connection ended. Unless the bus is closed, it opens another one.
func closed(err error) bool {
	return errors.Is(err, nats.ErrConnectionClosed) || errors.Is(err, jetstream.ErrConnectionClosed)
}

// coded gives an error of NATS its code; nil stays nil. b may be nil for an answer of the server.
func coded(b *bus.Bus, doing string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, jetstream.ErrStreamNotFound), errors.Is(err, jetstream.ErrMsgNotFound):
		return bus.Errorf(bus.CodeNotFound, "%s: %w", doing, err)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return bus.Errorf(bus.CodeOf(err), "%s: %w", doing, err)
	case bus.HasServerCode(err, codeWrongLastSeq, codeWrongLastSeqBatch):
		return bus.Errorf(bus.CodeConflict, "%s: %w", doing, err)
	case closed(err) && b.Closed():
		return bus.Errorf(bus.CodeClosed, "%s: %w", doing, err)
	}
	return bus.Errorf(bus.CodeUnavailable, "%s: %w", doing, err)
}
