package bench

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"troupe/benchmarks"
	"troupe/cmd/troupe/cli"
	"troupe/roles"
)

func newHosts(c command) *cobra.Command {
	cfg := benchmarks.HostsConfig{}
	cmd := &cobra.Command{
		Use:   "hosts",
		Short: "Large values between hosts that are network namespaces of this machine",
		Long: `Hosts makes network namespaces on this machine, which needs root and the program ip, starts a head on one and a node on each of the
others, and measures large values between the driver, which is on the head's, and the nodes, with the bytes on the head's link. What it
made is removed at the end. Real nodes: troupe bench transfer --nodes.`,
		Example: "  troupe bench hosts\n  troupe bench hosts --nodes 7 --mbit 1000 --mib 256 --rounds 3 --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if cfg.Nodes < 2 || cfg.Nodes > 16 {
				return cli.Usagef("--nodes %d: must be between 2 and 16", cfg.Nodes)
			}
			if err := checkBetween(cfg.MiB, cfg.Rounds); err != nil {
				return err
			}
			if os.Geteuid() != 0 {
				return cli.Usagef("network namespaces need root: run it with sudo, or measure real nodes with troupe bench transfer --nodes a,b")
			}
			if cfg.Program, err = os.Executable(); err != nil {
				return err
			}
			return benchmarks.Hosts(cmd.Context(), cfg, c.betweenRow())
		},
	}
	cmd.Flags().IntVar(&cfg.Nodes, "nodes", 2, "hosts beside that of the head and the driver")
	cmd.Flags().IntSliceVar(&cfg.MiB, "mib", []int{64, 512}, "sizes of the values")
	cmd.Flags().IntVar(&cfg.Rounds, "rounds", 10, "rounds of each row")
	cmd.Flags().IntVar(&cfg.Mbit, "mbit", 0, "rate of each link in Mbit/s (default no limit)")
	cmd.Flags().BoolVar(&cfg.Plain, "data-plain", false, "values without TLS")
	c.JSONFlag(cmd, "print one JSON object a line instead of a table")
	return cmd
}

func checkBetween(mib []int, rounds int) error {
	for _, n := range mib {
		if n < 1 || n > 4096 {
			return cli.Usagef("--mib %d: must be between 1 and 4096", n)
		}
	}
	if rounds < 1 || rounds > 1000 {
		return cli.Usagef("--rounds %d: must be between 1 and 1000", rounds)
	}
	return nil
}

// betweenRow prints rows of Between.
func (c command) betweenRow() func(benchmarks.BetweenResult) error {
	first := true
	return func(r benchmarks.BetweenResult) error {
		if c.JSON {
			return c.PrintJSON(r)
		}
		if first {
			c.Printf("%-28s %6s %10s %10s %8s %10s\n", "", "MiB", "median ms", "worst", "MB/s", "head MiB")
			first = false
		}
		head := "-"
		if r.HeadMiB >= 0 {
			head = fmt.Sprintf("%.1f", r.HeadMiB)
		}
		c.Printf("%-28s %6d %10.0f %10.0f %8.0f %10s\n", r.Row, r.Bytes>>20, r.Median, r.Worst, r.MBps, head)
		return nil
	}
}

// between measures on real nodes.
func (c command) between(ctx context.Context, nodes []string, mib []int, rounds int) error {
	if len(nodes) < 2 {
		return cli.Usagef("--nodes %s: give two names or more, as troupe nodes shows them", strings.Join(nodes, ","))
	}
	if err := checkBetween(mib, rounds); err != nil {
		return err
	}
	cfg := benchmarks.BetweenConfig{Nodes: nodes, Rounds: rounds}
	for _, n := range mib {
		cfg.Bytes = append(cfg.Bytes, n<<20)
	}
	return c.WithRuntime(ctx, func(rt *roles.Runtime) error { return benchmarks.Between(ctx, rt, cfg, c.betweenRow()) })
}
