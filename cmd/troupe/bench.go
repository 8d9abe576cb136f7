package main

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"troupe/benchmarks"
)

func newBench(c *cli) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "bench",
		Short:   "Measure Troupe and bare NATS in the same run",
		Example: "  troupe bench fanout --workers 1,8,64,512",
	}
	cmd.AddCommand(newBenchFanout(c), newBenchPlacement(c), newBenchFaults(c), newBenchPipeline(c), newBenchAB(c), newBenchABRow(c))
	return cmd
}

func newBenchFanout(c *cli) *cobra.Command {
	cfg := benchmarks.FanoutConfig{}
	cmd := &cobra.Command{
		Use:   "fanout",
		Short: "How long a call of N workers takes until all answers are in",
		Long: `Fanout calls N echo workers with one ONE_TO_ALL call and waits for all answers, in turns with the same publish and
gather written with bare nats.go on the same server: for N = 1 that is nc.Request. Workers have a connection each
("own") or share one ("shared").`,
		Example: "  troupe bench fanout\n  troupe bench fanout --workers 1,8,64,512 --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkFanout(cfg); err != nil {
				return err
			}
			return c.benchFanout(cmd.Context(), cfg)
		},
	}
	cmd.Flags().IntSliceVar(&cfg.Workers, "workers", []int{1, 8, 64, 512}, "numbers of workers")
	cmd.Flags().IntVar(&cfg.Bytes, "bytes", 64, "size of the argument and of each answer")
	cmd.Flags().DurationVar(&cfg.Each, "each", 4*time.Second, "time for each size and layout")
	c.jsonFlag(cmd, "print one JSON object a line instead of a table")
	return cmd
}

func checkFanout(cfg benchmarks.FanoutConfig) error {
	if len(cfg.Workers) == 0 {
		return usagef("--workers is empty: give numbers, as in 1,8,64")
	}
	for _, n := range cfg.Workers {
		if n < 1 || n > 4096 {
			return usagef("--workers %d: must be between 1 and 4096", n)
		}
	}
	if cfg.Bytes < 1 || cfg.Bytes > 1<<20 {
		return usagef("--bytes %d: must be between 1 and 1048576", cfg.Bytes)
	}
	if cfg.Each < 10*time.Millisecond {
		return usagef("--each %s: must be 10ms at least", cfg.Each)
	}
	return nil
}

func (c *cli) benchFanout(ctx context.Context, cfg benchmarks.FanoutConfig) error {
	if !c.json {
		c.printf("%8s %-7s %10s %10s %12s %12s %7s\n", "workers", "layout", "p50 µs", "p99 µs", "floor p50", "floor p99", "ratio")
	}
	return benchmarks.Fanout(ctx, cfg, func(r benchmarks.FanoutResult) error {
		if c.json {
			return c.printJSON(r)
		}
		c.printf("%8d %-7s %10.0f %10.0f %12.0f %12.0f %7.2f\n", r.Workers, r.Layout, r.P50, r.P99, r.FloorP50, r.FloorP99, r.RatioP50)
		return nil
	})
}
