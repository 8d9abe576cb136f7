package main

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/placement"
)

// ledgerAnswer is how long a head waits to hear whether its own ledger is trusted.
const ledgerAnswer = 2 * time.Second

func newLedger(c *cli) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ledger [accept]",
		Short: "Show whether the ledger of reservations is trusted, or accept it as it is",
		Long: `Ledger says whether the placement service trusts its ledger. A ledger that has lost something (its store was damaged or
replaced by an older copy) is not trusted: nothing is granted until every node that it knew has reported what runs there.
What runs is adopted; what was only in the ledger must be confirmed by its holder within 30 seconds.

"troupe ledger accept" ends the wait for nodes that will not come back: what ran there is given up. Devices of such a node
are still granted only after it has reported, should it return.`,
		Example: "  troupe ledger\n  troupe ledger accept",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ask := (*placement.Client).Ledger
			if len(args) > 0 {
				if args[0] != "accept" {
					return usagef("%q: the one thing to do with the ledger is to accept it", args[0])
				}
				ask = (*placement.Client).AcceptLedger
			}
			return c.ledger(cmd.Context(), ask)
		},
	}
	c.serverFlags(cmd)
	c.jsonFlag(cmd, "print one JSON object: id, and of a ledger that is not trusted doubt, awaits and since")
	return cmd
}

func (c *cli) ledger(ctx context.Context, ask func(*placement.Client, context.Context) (placement.LedgerStatus, error)) error {
	return c.withPlacement(ctx, true, func(client *placement.Client) error {
		status, err := ask(client, ctx)
		if err != nil {
			return err
		}
		if c.json {
			return c.printJSON(status)
		}
		c.printf("%s\n", ledgerLine(status))
		return nil
	})
}

// ledgerLine is the status of the ledger for a person.
func ledgerLine(s placement.LedgerStatus) string {
	line := "LEDGER " + s.String()
	if s.Unconfirmed > 0 {
		line += "; " + itoa(s.Unconfirmed) + " reservations are not confirmed yet"
	}
	return line
}

// ownLedger is how a head's own ledger is; the zero status if the service does not say.
func ownLedger(ctx context.Context, b *bus.Bus) placement.LedgerStatus {
	client, err := placement.NewClient(b, "")
	if err != nil {
		return placement.LedgerStatus{}
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, ledgerAnswer)
	defer cancel()
	status, err := client.Ledger(ctx)
	if err != nil {
		return placement.LedgerStatus{}
	}
	return status
}
