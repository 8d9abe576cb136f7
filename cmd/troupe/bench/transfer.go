package bench

import (
	"github.com/spf13/cobra"

	"troupe/benchmarks"
	"troupe/cmd/troupe/cli"
)

func newTransfer(c command) *cobra.Command {
	cfg := benchmarks.TransferConfig{}
	mib := 64
	cmd := &cobra.Command{
		Use:   "transfer",
		Short: "The rate of a large value between two processes without shared memory, beside bare NATS",
		Long: `Transfer gets a value of another session by its reference, in turns with the same chunks published with bare nats.go on the
same server, within the same window. Both receivers are in this process; that of bare NATS counts the bytes and drops them.`,
		Example: "  troupe bench transfer\n  troupe bench transfer --mib 256 --nats nats://user:password@host:4222",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if mib < 1 || mib > 4096 {
				return cli.Usagef("--mib %d: must be between 1 and 4096", mib)
			}
			cfg.Bytes, cfg.Version = mib<<20, cli.Version
			r, err := benchmarks.Transfer(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			if c.JSON {
				return c.PrintJSON(r)
			}
			c.Printf("%d MiB, %d transfers: %.0f MB/s, bare NATS %.0f MB/s, ratio %.2f; %.2f and %.2f CPU seconds a GiB\n", mib, r.Transfers, r.MBps, r.FloorMBps, r.Ratio, r.CPU, r.FloorCPU)
			return nil
		},
	}
	cmd.Flags().IntVar(&mib, "mib", mib, "size of the value")
	cmd.Flags().StringVar(&cfg.URL, "nats", "", "URL of a NATS server to measure on (default one of its own)")
	cmd.Flags().DurationVar(&cfg.Each, "each", 0, "time for both ways together (default 5s)")
	c.JSONFlag(cmd, "print a JSON object instead of a line")
	return cmd
}
