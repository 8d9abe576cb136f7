package capacity

import (
	"context"

	"github.com/spf13/cobra"

	"troupe/cmd/troupe/cli"
	"troupe/placement"
)

func newLedger(c command) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ledger [accept]",
		Short: "Show whether the ledger of reservations is trusted, or accept it as it is",
		Long: `Ledger prints whether the placement service trusts its ledger. It does not trust a ledger that has lost records (its store was
damaged or replaced by an older copy), and grants nothing until every known node has reported its workers. Reservations of running
workers are adopted; the holder of any other reservation must confirm it within 30 seconds.

"troupe ledger accept" stops waiting for nodes that will not come back, and gives up their reservations. If such a node returns,
its devices are granted only after it has reported.`,
		Example: "  troupe ledger\n  troupe ledger accept",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ask := (*placement.Client).Ledger
			if len(args) > 0 {
				if args[0] != "accept" {
					return cli.Usagef("%q: give no argument, or accept", args[0])
				}
				ask = (*placement.Client).AcceptLedger
			}
			return c.ledger(cmd.Context(), ask)
		},
	}
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print one JSON object: id, and of a ledger that is not trusted doubt, awaits and since")
	return cmd
}

func (c command) ledger(ctx context.Context, ask func(*placement.Client, context.Context) (placement.LedgerStatus, error)) error {
	return c.WithPlacement(ctx, true, func(client *placement.Client) error {
		status, err := ask(client, ctx)
		if err != nil {
			return err
		}
		if c.JSON {
			return c.PrintJSON(status)
		}
		c.Printf("%s\n", cli.LedgerLine(status))
		return nil
	})
}
