package bench

import (
	"context"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"troupe/benchmarks"
	"troupe/cmd/troupe/cli"
	"troupe/internal/ab"
)

func newAB(c command) *cobra.Command {
	cfg := benchmarks.ABConfig{}
	cmd := &cobra.Command{
		Use:   "ab",
		Short: "Measure each optimisation switched on and off",
		Long: `Ab measures rows with an optimisation switched on and off (TROUPE_AB_OFF), in turns, each measurement in a process of its own, and
prints the medians. Optimisations: ` + strings.Join(ab.Names, ", ") + `.`,
		Example: "  troupe bench ab\n  troupe bench ab --only quick_values --rounds 15 --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.Rounds < 1 || cfg.Each <= 0 {
				return cli.Usagef("--rounds %d and --each %v: both must be positive", cfg.Rounds, cfg.Each)
			}
			return c.runAB(cmd.Context(), cfg)
		},
	}
	cmd.Flags().StringSliceVar(&cfg.Optimisations, "only", nil, "optimisations to measure (default all)")
	cmd.Flags().IntVar(&cfg.Rounds, "rounds", 7, "measurements of each row, on and off")
	cmd.Flags().DurationVar(&cfg.Each, "each", 2*time.Second, "time of one measurement")
	c.JSONFlag(cmd, "print one JSON object a line instead of a table")
	return cmd
}

func (c command) runAB(ctx context.Context, cfg benchmarks.ABConfig) (err error) {
	if cfg.Program, err = os.Executable(); err != nil {
		return err
	}
	if !c.JSON {
		c.Printf("%-13s %-12s %6s %10s %10s %8s  %s\n", "optimisation", "row", "rounds", "on", "off", "gain", "unit")
	}
	return benchmarks.AB(ctx, cfg, func(r benchmarks.ABResult) error {
		if c.JSON {
			return c.PrintJSON(r)
		}
		c.Printf("%-13s %-12s %6d %10.2f %10.2f %7.1f%%  %s\n", r.Optimisation, r.Row, r.Rounds, r.On, r.Off, r.Gain, r.Unit)
		return nil
	})
}

// newABRow is one measurement, which newAB runs as a process of its own.
func newABRow(c command) *cobra.Command {
	var each time.Duration
	cmd := &cobra.Command{
		Use:    "ab-row ROW",
		Short:  "Measure one row of bench ab",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			program, err := os.Executable()
			if err != nil {
				return err
			}
			v, err := benchmarks.ABRow(cmd.Context(), program, args[0], each)
			if err != nil {
				return err
			}
			return c.PrintJSON(v)
		},
	}
	cmd.Flags().DurationVar(&each, "each", 0, "time of the measurement")
	return cmd
}
