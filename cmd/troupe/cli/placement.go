package cli

import (
	"context"
	"errors"

	"troupe/bus"
	"troupe/placement"
)

// WithPlacement calls do with a client of the placement service. An operator's client sees every namespace.
func (c *CLI) WithPlacement(ctx context.Context, operator bool, do func(*placement.Client) error) error {
	return c.WithBus(ctx, func(b *bus.Bus, s Server) error {
		namespace := s.Namespace
		if operator {
			namespace = ""
		}
		client, err := placement.NewClient(b, namespace)
		if err != nil {
			return err
		}
		defer client.Close()
		return UsageIfInvalid(do(client))
	})
}

// UsageIfInvalid makes an invalid request a usage error.
func UsageIfInvalid(err error) error {
	if errors.Is(err, placement.ErrInvalid) || errors.Is(err, bus.ErrInvalid) {
		return Usagef("%w", err)
	}
	return err
}
