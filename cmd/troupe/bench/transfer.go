package bench

import (
	"github.com/spf13/cobra"

	"troupe/benchmarks"
	"troupe/cmd/troupe/cli"
)

func newTransfer(c command) *cobra.Command {
	cfg := benchmarks.TransferConfig{}
	mib, nodes, rounds := []int{64}, []string(nil), 10
	cmd := &cobra.Command{
		Use:   "transfer",
		Short: "The rate of a large value between two processes without shared memory, beside bare NATS",
		Long: `Transfer gets a value of another session by its reference, in turns with the same chunks published with bare nats.go on the
same server, within the same window. Both receivers are in this process; that of bare NATS counts the bytes and drops them.

With --nodes it measures values between this process, as the driver, and nodes of a running head, and between the first two of them. It starts four
workers on each, which need no devices.`,
		Example: "  troupe bench transfer\n  troupe bench transfer --mib 256 --nats nats://user:password@host:4222\n  troupe bench transfer --nodes a,b --mib 64,512",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if len(nodes) > 0 {
				return c.between(cmd.Context(), nodes, mib, rounds)
			}
			if err := checkBetween(mib, rounds); err != nil {
				return err
			}
			if len(mib) != 1 {
				return cli.Usagef("--mib: give one size, or nodes (--nodes)")
			}
			cfg.Bytes, cfg.Version = mib[0]<<20, cli.Version
			r, err := benchmarks.Transfer(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			if c.JSON {
				return c.PrintJSON(r)
			}
			c.Printf("%d MiB, %d transfers: %.0f MB/s, bare NATS %.0f MB/s, ratio %.2f; %.2f and %.2f CPU seconds a GiB\n", mib[0], r.Transfers, r.MBps, r.FloorMBps, r.Ratio, r.CPU, r.FloorCPU)
			return nil
		},
	}
	cmd.Flags().IntSliceVar(&mib, "mib", mib, "size of the value; with --nodes also several")
	cmd.Flags().StringSliceVar(&nodes, "nodes", nil, "nodes to measure between, two or more (default: processes of this machine, over the bus)")
	cmd.Flags().IntVar(&rounds, "rounds", rounds, "rounds of each row, with --nodes")
	c.ServerFlags(cmd)
	cmd.Flags().StringVar(&cfg.URL, "nats", "", "URL of a NATS server to measure on (default one of its own)")
	cmd.Flags().DurationVar(&cfg.Each, "each", 0, "time for both ways together (default 5s)")
	c.JSONFlag(cmd, "print JSON: an object, or with --nodes one for each row")
	return cmd
}
