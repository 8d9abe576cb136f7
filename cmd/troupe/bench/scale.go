package bench

import (
	"context"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"troupe/benchmarks"
	"troupe/cmd/troupe/cli"
)

func newScale(c command) *cobra.Command {
	cfg := benchmarks.ScaleConfig{}
	cmd := &cobra.Command{
		Use:   "scale",
		Short: "What nodes and ranks cost: to join, create, call and end, and memory and CPU of an idle head",
		Long: `Scale runs a head with each number of nodes, whose agents are processes of this machine with simulated devices, and roles of each number of
workers, processes too, spread over them. It prints a row for the nodes alone and one for each size of a role, and then how much each figure
grows with a node or a rank. Choose sizes that the machine has memory for: an agent takes about 25 MB, a worker 15 MB.`,
		Example: "  troupe bench scale\n  troupe bench scale --nodes 1,100,1000 --ranks 64,1024 --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if slices.ContainsFunc(slices.Concat(cfg.Nodes, cfg.Ranks), func(n int) bool { return n < 1 }) || cfg.Rounds < 1 || cfg.Idle < time.Second || cfg.Settle < 0 {
				return cli.Usagef("--nodes %v, --ranks %v, --rounds %d, --settle %v, --idle %v: numbers of one or more, no negative time, and a second or more",
					cfg.Nodes, cfg.Ranks, cfg.Rounds, cfg.Settle, cfg.Idle)
			}
			return c.runScale(cmd.Context(), cfg)
		},
	}
	cmd.Flags().IntSliceVar(&cfg.Nodes, "nodes", []int{1, 8, 32}, "numbers of nodes")
	cmd.Flags().IntSliceVar(&cfg.Ranks, "ranks", []int{8, 64, 256}, "numbers of workers of a role")
	cmd.Flags().IntVar(&cfg.Rounds, "rounds", 3, "roles of each size")
	cmd.Flags().DurationVar(&cfg.Settle, "settle", 70*time.Second, "how long nodes run before the head counts as idle: for a minute they ask more than later")
	cmd.Flags().DurationVar(&cfg.Idle, "idle", 10*time.Second, "how long the idle head is observed")
	c.JSONFlag(cmd, "print one JSON object a line instead of a table")
	return cmd
}

func (c command) runScale(ctx context.Context, cfg benchmarks.ScaleConfig) (err error) {
	if cfg.Program, err = os.Executable(); err != nil {
		return err
	}
	cfg.Log = func(format string, args ...any) { c.Warnf("troupe: "+format+"\n", args...) }
	if !c.JSON {
		c.Printf("%6s %6s %9s %7s %8s %10s %8s %8s\n", "nodes", "ranks", "join ms", "idle %", "head MB", "create ms", "call ms", "end ms")
	}
	var all []benchmarks.ScaleResult
	err = benchmarks.Scale(ctx, cfg, func(r benchmarks.ScaleResult) error {
		all = append(all, r)
		if c.JSON {
			return c.PrintJSON(r)
		}
		c.Printf("%6d %6d %9s %7s %8s %10s %8s %8s\n", r.Nodes, r.Ranks, dash("%.0f", r.Join), dash("%.1f", r.IdleCPU), dash("%.0f", r.HeadMB),
			dash("%.0f", r.Create), dash("%.2f", r.Call), dash("%.0f", r.End))
		return nil
	})
	if err != nil {
		return err
	}
	for _, s := range benchmarks.ScaleSlopes(all) {
		if c.JSON {
			if err := c.PrintJSON(s); err != nil {
				return err
			}
			continue
		}
		c.Printf("%-16s %+.4f each %s\n", s.Figure, s.Slope, s.Each)
	}
	return nil
}
