package roles

import (
	"context"

	"troupe/bus"
)

// WaitReady returns when every rank of the role takes calls, or why that will not be: the role has failed or been taken
// down, or ctx has ended.
func (c *Cluster) WaitReady(ctx context.Context) error {
	for {
		if err := c.callable(""); err != nil {
			return err
		}
		away, changedCh := c.gate.Away()
		if len(away) == 0 {
			return nil
		}
		select {
		case <-changedCh:
		case <-ctx.Done():
			return bus.Errorf(bus.CodeOf(ctx.Err()), "role %s is not ready: %d of its ranks are restarting, rank %d among them: %w", c.Name(), len(away), away[0], ctx.Err())
		}
	}
}
