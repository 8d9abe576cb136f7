package stream

import (
	"context"
	"errors"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
)

// coded gives an error of NATS its code; nil stays nil.
func coded(doing string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, jetstream.ErrStreamNotFound), errors.Is(err, jetstream.ErrMsgNotFound):
		return bus.Errorf(bus.CodeNotFound, "%s: %w", doing, err)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return bus.Errorf(bus.CodeOf(err), "%s: %w", doing, err)
	case errors.Is(err, nats.ErrConnectionClosed):
		return bus.Errorf(bus.CodeClosed, "%s: %w", doing, err)
	}
	return bus.Errorf(bus.CodeUnavailable, "%s: %w", doing, err)
}
