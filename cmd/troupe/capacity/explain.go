package capacity

import (
	"context"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/cmd/troupe/head"
	"troupe/gpu"
	"troupe/nodes"
	"troupe/nodes/protocol"
	"troupe/placement"
	"troupe/placement/planner"
)

func newExplain(c command) *cobra.Command {
	var f requestFlags
	var spec string
	cmd := &cobra.Command{
		Use:   "explain",
		Short: "Show what a request would be granted, or why not",
		Long: `Explain takes the flags of reserve and prints the node and devices of each worker, or what the request would wait for: which
devices, their holders and since when. It changes nothing. The exit code is 0 for both answers, and 2 for an invalid request.

With --nodes it needs no head, and decides on simulated nodes or on this machine.`,
		Example: `  troupe explain --bundles 4 --devices 2
  troupe explain --nodes sim:2x4 --world 4 --device-mapping 'list(range(0,8))'
  troupe explain --nodes sim:4x8,numa=2 --bundles 6 --devices 4 --strategy SPREAD --json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := f.request(cmd)
			if err != nil {
				return err
			}
			return c.explain(cmd.Context(), r, spec)
		},
	}
	f.add(cmd)
	cmd.Flags().StringVar(&spec, "nodes", "", "explain without a head, on sim:NODESxDEVICES, auto or a FILE of devices")
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print one JSON object: granted, reasons, workers and what it waits for")
	return cmd
}

func (c command) explain(ctx context.Context, r placement.Request, spec string) error {
	if spec != "" {
		x, err := explainOffline(ctx, r, spec)
		if err != nil {
			return cli.UsageIfInvalid(err)
		}
		return c.showExplanation(x)
	}
	return c.WithPlacement(ctx, false, func(client *placement.Client) error {
		x, err := client.Explain(ctx, r)
		if err != nil {
			return err
		}
		return c.showExplanation(x)
	})
}

// explainOffline decides on nodes without reservations.
func explainOffline(ctx context.Context, r placement.Request, spec string) (placement.Explanation, error) {
	inventories, err := head.OpenDevices(spec, "", "")
	if err != nil {
		return placement.Explanation{}, cli.Usagef("%w", err)
	}
	defer head.CloseDevices(inventories)
	reports := make([]protocol.Report, len(inventories))
	for i, inventory := range inventories {
		devices, err := inventory.Devices(ctx)
		if err != nil {
			return placement.Explanation{}, err
		}
		reports[i] = protocol.Report{Node: bus.NodeName(nodes.HostName(), i, len(inventories)), CPUs: 64, Memory: 512 * gpu.GiB, Devices: devices}
		if len(inventories) > 1 {
			reports[i].Node = "node-" + strconv.Itoa(i)
		}
	}
	plan, err := planner.Decide(planner.Snapshot{Nodes: placement.NodesFromReports(reports)}, r)
	return placement.Explanation{Plan: plan}, err
}

func (c command) showExplanation(x placement.Explanation) error {
	if c.JSON {
		return c.PrintJSON(x)
	}
	if x.Held != nil {
		c.Printf("reservation %s is there already: %s since %s\n", x.Held.ID, x.Held.State, cli.Age(x.Held.Since))
	}
	if !x.Granted {
		c.printRefusal(x)
		return nil
	}
	c.Printf("yes: it would be granted now\n")
	if x.Unmet != "" {
		c.Printf("but %s\n", x.Unmet)
	}
	return c.WorkersTable(x.Workers)
}

// printRefusal prints the reasons, node by node, and what the request would wait for.
func (c command) printRefusal(x placement.Explanation) {
	switch {
	case x.Never:
		c.Printf("no, and never: nothing that could be released or repaired would be enough\n")
	case x.Position > 0:
		c.Printf("not now: it would wait at place %d of the queue: %s\n", x.Position, x.Wait.Text)
	default:
		c.Printf("not now\n")
	}
	for _, reason := range x.Reasons {
		where := ""
		if reason.Node != "" {
			where = reason.Node + ": "
		}
		c.Printf("  %s%s\n", where, reason.Text)
	}
	if len(x.WaitsFor) > 0 {
		c.Printf("it waits for:\n")
	}
	for _, o := range x.WaitsFor {
		since := ""
		if !o.Since.IsZero() {
			since = ", for " + time.Since(o.Since).Round(time.Second).String()
		}
		c.Printf("  %s%s\n", o, since)
	}
	for _, id := range x.Preempts {
		c.Printf("  it would send away %s\n", id)
	}
}
