package bench

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"troupe/benchmarks"
	"troupe/cmd/troupe/cli"
)

func newFaults(c command) *cobra.Command {
	cfg := benchmarks.FaultsConfig{}
	cmd := &cobra.Command{
		Use:   "faults",
		Short: "Time from a fault to the caller's error, and the memory of an idle head",
		Long: `Faults runs a head, agents and workers as processes of their own on simulated devices, kills and freezes them, and
measures the time until the caller has its error, or until calls succeed again. It takes a few minutes and leaves nothing behind.`,
		Example: "  troupe bench faults\n  troupe bench faults --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.Kills < 1 || cfg.Each < 1 || cfg.Workers < 1 {
				return cli.Usagef("--kills %d, --each %d and --workers %d: each must be one or more", cfg.Kills, cfg.Each, cfg.Workers)
			}
			return c.runFaults(cmd.Context(), cfg)
		},
	}
	cmd.Flags().IntVar(&cfg.Kills, "kills", 25, "workers to kill")
	cmd.Flags().IntVar(&cfg.Each, "each", 3, "repetitions of each other fault")
	cmd.Flags().IntVar(&cfg.Workers, "workers", 64, "workers to create and destroy at once")
	c.JSONFlag(cmd, "print one JSON object a line instead of a table")
	return cmd
}

func (c command) runFaults(ctx context.Context, cfg benchmarks.FaultsConfig) (err error) {
	if cfg.Program, err = os.Executable(); err != nil {
		return err
	}
	cfg.Log = func(format string, args ...any) { c.Warnf("troupe: "+format+"\n", args...) }
	if !c.JSON {
		c.Printf("%-16s %4s %10s %10s %8s %6s %13s\n", "fault", "n", "p50 ms", "p99 ms", "MB", "calls", "reservations")
	}
	return benchmarks.Faults(ctx, cfg, func(r benchmarks.FaultResult) error {
		if c.JSON {
			return c.PrintJSON(r)
		}
		c.Printf("%-16s %4d %10s %10s %8s %6s %13s\n", r.Fault, r.N, dash("%.1f", r.P50), dash("%.1f", r.P99), dash("%.0f", r.MB), dash("%d", r.CallsLost), dash("%d", r.ReservationsLost))
		return nil
	})
}

// dash formats a value; nil is a dash.
func dash[T any](format string, v *T) string {
	if v == nil {
		return "–"
	}
	return fmt.Sprintf(format, *v)
}
