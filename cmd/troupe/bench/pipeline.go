package bench

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"troupe/benchmarks"
	"troupe/cmd/troupe/cli"
)

func newPipeline(c command) *cobra.Command {
	cfg := benchmarks.PipelineConfig{}
	cmd := &cobra.Command{
		Use:   "pipeline",
		Short: "How many items per second go through the stages of a pipeline",
		Long: `Pipeline sends items through stages that pass them on, in turns with the same hops written with bare JetStream on the same server:
work queues, fetch, publish, wait for the store, acknowledge, with the same batches and the same durability. Both sync files
before they acknowledge, as a head does, unless --no-sync is given. p50 and p99 are the time of one item through an idle
pipeline.`,
		Example: "  troupe bench pipeline\n  troupe bench pipeline --stages 1,3 --bytes 1024,65536 --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkBenchPipeline(cfg); err != nil {
				return err
			}
			return c.runPipeline(cmd.Context(), cfg)
		},
	}
	cmd.Flags().IntSliceVar(&cfg.Stages, "stages", []int{1, 3}, "numbers of stages")
	cmd.Flags().IntSliceVar(&cfg.Bytes, "bytes", []int{1024, 65536}, "sizes of an item")
	cmd.Flags().DurationVar(&cfg.Each, "each", 6*time.Second, "time for each number and size")
	cmd.Flags().BoolVar(&cfg.NoSync, "no-sync", false, "sync to disk every two minutes instead of at each write")
	c.JSONFlag(cmd, "print one JSON object a line instead of a table")
	return cmd
}

func checkBenchPipeline(cfg benchmarks.PipelineConfig) error {
	for _, n := range cfg.Stages {
		if n < 1 || n > 16 {
			return cli.Usagef("--stages %d: must be between 1 and 16", n)
		}
	}
	for _, n := range cfg.Bytes {
		if n < 1 || n > 512<<10 {
			return cli.Usagef("--bytes %d: must be between 1 and 524288", n)
		}
	}
	if cfg.Each < 10*time.Millisecond {
		return cli.Usagef("--each %s: must be 10ms at least", cfg.Each)
	}
	return nil
}

func (c command) runPipeline(ctx context.Context, cfg benchmarks.PipelineConfig) error {
	if !c.JSON {
		c.Printf("%6s %7s %10s %10s %6s %9s %9s %9s %9s\n", "stages", "bytes", "items/s", "raw/s", "ratio", "p50 µs", "p99 µs", "raw p50", "raw p99")
	}
	return benchmarks.Pipelines(ctx, cfg, func(r benchmarks.PipelineResult) error {
		if c.JSON {
			return c.PrintJSON(r)
		}
		c.Printf("%6d %7d %10.0f %10.0f %6.2f %9.0f %9.0f %9.0f %9.0f\n", r.Stages, r.Bytes, r.PerS, r.RawPerS, r.Ratio, r.P50, r.P99, r.RawP50, r.RawP99)
		return nil
	})
}
