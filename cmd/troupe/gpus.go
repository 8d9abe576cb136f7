package main

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"troupe/gpu"
	"troupe/placement"
)

func newGPUs(c *cli) *cobra.Command {
	var watch bool
	var every time.Duration
	cmd := &cobra.Command{
		Use:   "gpus",
		Short: "Show the devices of all nodes, how they are and who holds them",
		Long: `Gpus prints every device that the nodes report: memory, load and temperature as far as the driver says, the role and rank
that hold it, and what is wrong with it. A node that is not ready says why in the last column.`,
		Example: "  troupe gpus\n  troupe gpus --watch\n  troupe gpus --json | jq -r 'select(.held_by == null) | .device.uuid'",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if every < 100*time.Millisecond {
				return usagef("--every %v: give 100ms or more", every)
			}
			return c.gpus(cmd.Context(), watch, every)
		},
	}
	cmd.Flags().BoolVar(&watch, "watch", false, "draw it again and again, until Ctrl-C")
	cmd.Flags().DurationVar(&every, "every", 2*time.Second, "time between two drawings")
	c.serverFlags(cmd)
	c.jsonFlag(cmd, "print one JSON object a device instead of a table")
	return cmd
}

func (c *cli) gpus(ctx context.Context, watch bool, every time.Duration) error {
	return c.withPlacement(ctx, true, func(client *placement.Client) error {
		for {
			rows, err := deviceRows(ctx, client)
			if err != nil {
				return err
			}
			if watch && !c.json {
				c.printf("\x1b[H\x1b[2J")
			}
			if err := c.showDevices(rows); err != nil || !watch {
				return err
			}
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(every):
			}
		}
	})
}

func (c *cli) showDevices(rows []gpu.Row) error {
	if !c.json {
		c.printf("%s", gpu.Table(rows))
		return nil
	}
	for _, row := range rows {
		if err := c.printJSON(row); err != nil {
			return err
		}
	}
	return nil
}

// deviceRows joins what the nodes report with what the ledger says.
func deviceRows(ctx context.Context, client *placement.Client) ([]gpu.Row, error) {
	nodes, err := client.Nodes(ctx)
	if err != nil {
		return nil, err
	}
	list, err := client.List(ctx)
	if err != nil {
		return nil, err
	}
	holders := map[string][]gpu.Holder{}
	for _, r := range list.Records {
		name := r.Holder
		if name == "" {
			name = r.ID
		}
		for _, w := range r.Workers {
			for _, s := range w.Slots {
				holders[s.UUID] = append(holders[s.UUID], gpu.Holder{Role: name, Rank: w.Rank, Milli: int(s.Share)})
			}
		}
	}
	var rows []gpu.Row
	for _, node := range nodes {
		for _, row := range node.Report.Rows() {
			row.HeldBy = holders[row.Device.UUID]
			if node.State != placement.NodeReady && row.Device.Health.Lost == "" {
				row.Device.Health.Lost = "the node is " + string(node.State) + ": " + node.Why
			}
			rows = append(rows, row)
		}
	}
	return rows, nil
}
