package inspect

import (
	"cmp"
	"context"

	"github.com/spf13/cobra"

	"troupe/cmd/troupe/cli"
	"troupe/gpu"
	"troupe/placement"
)

func newGPUs(c command) *cobra.Command {
	var watch cli.WatchFlags
	cmd := &cobra.Command{
		Use:   "gpus",
		Short: "Show the devices of all nodes, their state and their holders",
		Long: `Gpus prints every device that the nodes report: memory, load and temperature where the driver has them, the namespace, role and rank that
hold it, and its faults. The last column of a node that is not ready has the reason.`,
		Example: "  troupe gpus\n  troupe gpus --watch\n  troupe gpus --json | jq -r 'select(.held_by == null) | .device.uuid'",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.Repeat(cmd.Context(), watch, c.gpus)
		},
	}
	watch.Add(cmd)
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print one JSON object a device instead of a table")
	return cmd
}

func (c command) gpus(ctx context.Context) error {
	return c.WithPlacement(ctx, true, func(client *placement.Client) error {
		rows, err := deviceRows(ctx, client)
		if err != nil {
			return err
		}
		if !c.JSON {
			c.Printf("%s", gpu.Table(rows))
			return nil
		}
		for _, row := range rows {
			if err := c.PrintJSON(row); err != nil {
				return err
			}
		}
		return nil
	})
}

// deviceRows joins the reports of the nodes with the ledger.
func deviceRows(ctx context.Context, client *placement.Client) ([]gpu.Row, error) {
	nodes, err := client.Nodes(ctx)
	if err != nil {
		return nil, err
	}
	list, err := client.List(ctx)
	if err != nil {
		return nil, err
	}
	holders := holdersOf(list.Records)
	var rows []gpu.Row
	for _, node := range nodes {
		for _, row := range node.Report.Rows() {
			row.HeldBy = holders[row.Device.UUID]
			if node.State != placement.NodeReady && row.Device.Health.Lost == "" {
				row.Device.Health.Lost = "the node is " + string(node.State) + ": " + node.Why
			}
			if row.Closed = closedBy(node.Cordons, row.Device.UUID); row.Closed == "" {
				row.Closed = node.Unverified[row.Device.UUID]
			}
			rows = append(rows, row)
		}
	}
	return rows, nil
}

// holdersOf maps the UUID of a device to the namespace, role and rank that hold it.
func holdersOf(records []placement.Record) map[string][]gpu.Holder {
	holders := map[string][]gpu.Holder{}
	for _, r := range records {
		for _, w := range r.Workers {
			for _, s := range w.Slots {
				holders[s.UUID] = append(holders[s.UUID], gpu.Holder{Namespace: r.Namespace, Role: cmp.Or(r.Holder, r.ID), Rank: w.Rank, Milli: int(s.Share)})
			}
		}
	}
	return holders
}

// closedBy is the cordon of a device, or of its node.
func closedBy(cordons []placement.Cordon, uuid string) string {
	for _, one := range cordons {
		if one.Device == "" || one.Device == uuid {
			return "cordoned " + one.String()
		}
	}
	return ""
}
