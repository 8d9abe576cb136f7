package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"troupe/benchmarks"
	"troupe/cmd/troupe/cli"
)

func newPlacement(c command) *cobra.Command {
	cfg := benchmarks.PlacementConfig{}
	cmd := &cobra.Command{
		Use:   "placement",
		Short: "How many gangs a second are reserved and released",
		Long: `Placement reserves and releases gangs on simulated nodes of eight devices, with an embedded server on file storage, with every
write synced to disk (the default of a head) and without. It also plans a gang of 1,024 bundles on 4,096 nodes, and measures when
the grants of a killed node end.`,
		Example: "  troupe bench placement\n  troupe bench placement --nodes 64 --bundles 1,8 --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for flag, values := range map[string][]int{"nodes": cfg.Nodes, "bundles": cfg.Bundles, "clients": cfg.Clients} {
				for _, n := range values {
					if n < 1 || n > 8192 {
						return cli.Usagef("--%s %d: must be between 1 and 8192", flag, n)
					}
				}
			}
			return c.runPlacement(cmd.Context(), cfg)
		},
	}
	cmd.Flags().IntSliceVar(&cfg.Nodes, "nodes", []int{64, 1024}, "numbers of simulated nodes")
	cmd.Flags().IntSliceVar(&cfg.Bundles, "bundles", []int{1, 8, 64}, "bundles of a gang")
	cmd.Flags().IntSliceVar(&cfg.Clients, "clients", []int{1, 8}, "numbers of clients")
	cmd.Flags().DurationVar(&cfg.Each, "each", 2500*time.Millisecond, "time for each combination")
	cmd.Flags().StringVar(&cfg.Dir, "dir", "", "folder for the stores (default a temporary one)")
	cmd.Flags().BoolVar(&cfg.NoLoss, "no-loss", false, "do not measure the loss of a node")
	c.JSONFlag(cmd, "print one JSON object a line")
	return cmd
}

func (c command) runPlacement(ctx context.Context, cfg benchmarks.PlacementConfig) error {
	if !c.JSON {
		c.Printf("%6s %8s %8s %6s %10s %10s %10s\n", "nodes", "bundles", "clients", "synced", "pairs/s", "p50 µs", "p99 µs")
	}
	return benchmarks.Placement(ctx, cfg, func(r benchmarks.PlacementResult) error {
		var err error
		switch {
		case c.JSON:
			err = c.PrintJSON(r)
		case r.PlanMS > 0:
			_, err = fmt.Fprintf(c.Out, "%6d %8d planned in %.1f ms\n", r.Nodes, r.Bundles, r.PlanMS)
		case r.FreedMS > 0:
			_, err = fmt.Fprintf(c.Out, "%6d a node of a lease of %.0f s died: lost after %.0f ms, freed after %.0f ms\n", r.Nodes, r.LeaseS, r.LostMS, r.FreedMS)
		default:
			_, err = fmt.Fprintf(c.Out, "%6d %8d %8d %6v %10.0f %10.0f %10.0f\n", r.Nodes, r.Bundles, r.Clients, r.SyncAlways, r.PairsPerS, r.P50, r.P99)
		}
		return err
	})
}
