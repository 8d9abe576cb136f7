// Package bench is the commands of `troupe bench`: flags and tables of the measurements of package benchmarks.
package bench

import (
	"context"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"troupe/benchmarks"
	"troupe/cmd/troupe/cli"
)

// command is the commands of this package.
type command struct{ *cli.CLI }

// New is the command bench.
func New(base *cli.CLI) *cobra.Command {
	c := command{base}
	cmd := &cobra.Command{
		Use:     "bench",
		Short:   "Measure Troupe and bare NATS in the same run",
		Example: "  troupe bench fanout --workers 1,8,64,512",
	}
	cmd.AddCommand(newFanout(c), newPlacement(c), newFaults(c), newHeads(c), newPipeline(c), newTransfer(c), newHosts(c), newScale(c), newReport(c), newCheck(c), newFloorWorker(c))
	return cmd
}

func newFanout(c command) *cobra.Command {
	cfg := benchmarks.FanoutConfig{}
	cmd := &cobra.Command{
		Use:   "fanout",
		Short: "How long a call of N workers takes until all answers are in",
		Long: `Fanout calls N echo workers with one ONE_TO_ALL call and waits for all answers, in turns with the same publish and
gather written with bare nats.go on the same server: for N = 1 that is nc.Request.

The layouts: "own", workers in this process with a connection each; "shared", with one connection for all; "processes", a process
for each worker, started by a head of its own, and one for each worker of the floor.

With --rate calls begin at fixed times, and a call that begins late counts from when it was due (no coordinated omission).`,
		Example: `  troupe bench fanout
  troupe bench fanout --workers 1,8,64,512 --bytes 64,4096,262144 --json > fanout.json
  troupe bench fanout --workers 8 --layout processes
  troupe bench fanout --nats nats://user:password@host:4222 --rate 100`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkFanout(cfg); err != nil {
				return err
			}
			program, err := os.Executable()
			if err != nil {
				return err
			}
			cfg.Program, cfg.Version = program, cli.Version
			return c.runFanout(cmd.Context(), cfg)
		},
	}
	cmd.Flags().IntSliceVar(&cfg.Workers, "workers", []int{1, 8, 64, 512}, "numbers of workers")
	cmd.Flags().IntSliceVar(&cfg.Bytes, "bytes", []int{64}, "sizes of the argument and of each answer")
	cmd.Flags().StringSliceVar(&cfg.Layouts, "layout", []string{benchmarks.Own, benchmarks.Shared}, "layouts of the workers: own, shared, processes")
	cmd.Flags().Float64Var(&cfg.Rate, "rate", 0, "calls to begin in a second, whether or not the last has ended (default one after another)")
	cmd.Flags().StringVar(&cfg.URL, "nats", "", "URL of a NATS server with JetStream to measure on (default one of its own)")
	cmd.Flags().DurationVar(&cfg.Each, "each", 4*time.Second, "time for each size and layout")
	c.JSONFlag(cmd, "print one JSON object a line instead of a table")
	return cmd
}

var layouts = []string{benchmarks.Own, benchmarks.Shared, benchmarks.Processes}

// maxProcesses bounds the workers of the layout processes.
const maxProcesses = 512

// newFloorWorker is one worker of the floor of bench fanout, which runs it as a process of its own.
func newFloorWorker(c command) *cobra.Command {
	return &cobra.Command{
		Use: benchmarks.FloorWorkerCommand[1], Short: "Answer messages as bare NATS would", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return benchmarks.FloorWorker(cmd.Context(), c.Out) },
	}
}

func checkFanout(cfg benchmarks.FanoutConfig) error {
	if len(cfg.Workers) == 0 {
		return cli.Usagef("--workers is empty: give numbers, as in 1,8,64")
	}
	for _, n := range cfg.Workers {
		if n < 1 || n > 4096 {
			return cli.Usagef("--workers %d: must be between 1 and 4096", n)
		}
	}
	for _, n := range cfg.Bytes {
		if n < 1 || n > 1<<20 {
			return cli.Usagef("--bytes %d: must be between 1 and 1048576", n)
		}
	}
	for _, l := range cfg.Layouts {
		if !slices.Contains(layouts, l) {
			return cli.Usagef("--layout %q: must be one of %s", l, strings.Join(layouts, ", "))
		}
		if most := slices.Max(cfg.Workers); l == benchmarks.Processes && most > maxProcesses {
			return cli.Usagef("--workers %d: the layout processes starts two processes for each worker, and takes at most %d", most, maxProcesses)
		}
	}
	if cfg.Rate < 0 || cfg.Rate > 1e6 {
		return cli.Usagef("--rate %g: must be between 0 and 1000000", cfg.Rate)
	}
	if cfg.Each < 10*time.Millisecond {
		return cli.Usagef("--each %s: must be 10ms at least", cfg.Each)
	}
	return nil
}

func (c command) runFanout(ctx context.Context, cfg benchmarks.FanoutConfig) error {
	if !c.JSON {
		c.Printf("%8s %-9s %8s %10s %10s %12s %12s %7s\n", "workers", "layout", "bytes", "p50 µs", "p99 µs", "floor p50", "floor p99", "ratio")
	}
	return benchmarks.Fanout(ctx, cfg, func(r benchmarks.FanoutResult) error {
		if c.JSON {
			return c.PrintJSON(r)
		}
		c.Printf("%8d %-9s %8d %10.0f %10.0f %12.0f %12.0f %7.2f\n", r.Workers, r.Layout, r.Bytes, r.P50, r.P99, r.FloorP50, r.FloorP99, r.RatioP50)
		return nil
	})
}
