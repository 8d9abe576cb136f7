package inspect

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/nodes"
)

func newEvents(c command) *cobra.Command {
	var follow, audit bool
	var since string
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Show events: nodes that joined, left or were lost, workers that died, roles that failed",
		Long: `Events prints the events of the head, the agents and the drivers, the oldest first: of all namespaces, or with --namespace of one.
A bounded number is kept. With --audit it prints the audit trail instead: who has created, destroyed, resized, reserved, released, cordoned,
interrupted, debugged, issued or revoked what.`,
		Example: "  troupe events\n  troupe events -f --since 0s\n  troupe events --audit --since 24h\n  troupe events --json | jq 'select(.kind == \"worker_exit\")'",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			at, err := cli.ParseSince(since)
			if err != nil {
				return err
			}
			return c.events(cmd.Context(), nodes.EventQuery{Namespace: c.Namespace, Since: at, Follow: follow, Audit: audit})
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "print new events too, until Ctrl-C")
	cmd.Flags().BoolVar(&audit, "audit", false, "who has done what, instead of what has happened")
	cmd.Flags().StringVar(&since, "since", "", "from this time on: a duration such as 10m, or a time such as 2006-01-02T15:04:05Z")
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print one JSON object an event")
	return cmd
}

func (c command) events(ctx context.Context, q nodes.EventQuery) error {
	return c.WithBus(ctx, func(b *bus.Bus, _ cli.Server) error {
		return nodes.ReadEvents(ctx, b, q, func(e nodes.Event) error {
			if c.JSON {
				return c.PrintJSON(e)
			}
			by := ""
			if e.By != nil {
				by = " by " + e.By.String() + ","
			}
			c.Printf("%s%s %s\n", e.At.Format(time.DateTime), by, e)
			return nil
		})
	})
}
