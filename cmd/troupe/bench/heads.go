package bench

import (
	"context"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"troupe/benchmarks"
	"troupe/cmd/troupe/cli"
)

func newHeads(c command) *cobra.Command {
	cfg := benchmarks.HeadsConfig{}
	cmd := &cobra.Command{
		Use:   "heads",
		Short: "What faults of one of three heads do to calls, grants and jobs",
		Long: `Heads runs three heads that form a cluster, an agent and workers as processes on simulated devices, with one driver connected to each
head. While the drivers call workers and devices are reserved, one after the other, it kills and freezes heads. Each time in the table is
that of the slowest call or grant of one repetition; calls are lost if they fail, doubled if they ran twice, jobs end if a role fails.

The faults: ` + strings.Join(benchmarks.HeadFaults(), ", ") + `.`,
		Example: "  troupe bench heads\n  troupe bench heads --repetitions 3 --faults leader_killed,leader_stopped --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.Repetitions < 1 {
				return cli.Usagef("--repetitions %d: must be one or more", cfg.Repetitions)
			}
			for _, f := range cfg.Faults {
				if !slices.Contains(benchmarks.HeadFaults(), f) {
					return cli.Usagef("--faults %q: must be one of %s", f, strings.Join(benchmarks.HeadFaults(), ", "))
				}
			}
			return c.runHeads(cmd.Context(), cfg)
		},
	}
	cmd.Flags().IntVar(&cfg.Repetitions, "repetitions", 10, "repetitions of each fault")
	cmd.Flags().StringSliceVar(&cfg.Faults, "faults", nil, "faults to measure (default all)")
	c.JSONFlag(cmd, "print one JSON object a line instead of a table")
	return cmd
}

func (c command) runHeads(ctx context.Context, cfg benchmarks.HeadsConfig) (err error) {
	if cfg.Program, err = os.Executable(); err != nil {
		return err
	}
	cfg.Log = func(format string, args ...any) { c.Warnf("troupe: "+format+"\n", args...) }
	if !c.JSON {
		c.Printf("%-16s %3s %10s %10s %10s %10s %6s %8s %6s\n", "fault", "n", "calls ms", "worst", "grants ms", "worst", "lost", "doubled", "ended")
	}
	return benchmarks.Heads(ctx, cfg, func(r benchmarks.HeadsResult) error {
		if c.JSON {
			return c.PrintJSON(r)
		}
		c.Printf("%-16s %3d %10.0f %10.0f %10.0f %10.0f %6d %8d %6d\n", r.Fault, r.N, r.CallsMedian, r.CallsWorst, r.GrantsMedian, r.GrantsWorst, r.Lost, r.Doubled, r.JobsEnded)
		return nil
	})
}
