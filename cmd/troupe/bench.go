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
	cmd.AddCommand(newBenchFanout(c), newBenchPlacement(c), newBenchFaults(c), newBenchPipeline(c), newBenchReport(c), newBenchCheck(c), newBenchAB(c), newBenchABRow(c))
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
	cmd.Flags().IntSliceVar(&cfg.Bytes, "bytes", []int{64}, "sizes of the argument and of each answer")
	cmd.Flags().StringSliceVar(&cfg.Layouts, "layout", []string{benchmarks.Own, benchmarks.Shared}, "connections of the workers: own, shared")
	cmd.Flags().Float64Var(&cfg.Rate, "rate", 0, "calls to begin in a second, whether or not the last has ended (default one after another)")
	cmd.Flags().StringVar(&cfg.URL, "nats", "", "URL of a NATS server to measure on (default one in this process)")
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
	for _, n := range cfg.Bytes {
		if n < 1 || n > 1<<20 {
			return usagef("--bytes %d: must be between 1 and 1048576", n)
		}
	}
	for _, l := range cfg.Layouts {
		if l != benchmarks.Own && l != benchmarks.Shared {
			return usagef("--layout %q: must be own or shared", l)
		}
	}
	if cfg.Rate < 0 || cfg.Rate > 1e6 {
		return usagef("--rate %g: must be between 0 and 1000000", cfg.Rate)
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
