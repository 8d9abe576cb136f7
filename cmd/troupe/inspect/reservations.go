package inspect

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"troupe/cmd/troupe/cli"
	"troupe/placement"
)

func newReservations(c command) *cobra.Command {
	var all bool
	var watch cli.WatchFlags
	cmd := &cobra.Command{
		Use:     "reservations",
		Short:   "List reservations and waiting requests",
		Long:    `Reservations prints what is held in a namespace, by whom and since when, and what waits in the queue and for what.`,
		Example: "  troupe reservations\n  troupe reservations --all --json | jq '.reservations[].id'",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.Repeat(cmd.Context(), watch, func(ctx context.Context) error { return c.reservations(ctx, all) })
		},
	}
	watch.Add(cmd)
	cmd.Flags().BoolVar(&all, "all", false, "list all namespaces")
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print one JSON object: reservations and waiting")
	return cmd
}

func (c command) reservations(ctx context.Context, all bool) error {
	return c.WithPlacement(ctx, all, func(client *placement.Client) error {
		list, err := client.List(ctx)
		if err != nil {
			return err
		}
		if c.JSON {
			return c.PrintJSON(list)
		}
		if len(list.Records)+len(list.Waiting) == 0 {
			c.Printf("nothing is reserved\n")
			return nil
		}
		rows := make([][]string, 0, len(list.Records)+len(list.Waiting))
		for _, r := range list.Records {
			rows = append(rows, []string{r.ID, r.Namespace, r.Holder, string(r.State), cli.Age(r.Since), strconv.Itoa(len(r.Workers)), deviceCount(r), strconv.Itoa(r.Priority), why(r)})
		}
		for _, w := range list.Waiting {
			waits := (time.Duration(w.Waited) * time.Millisecond).Round(time.Second).String()
			rows = append(rows, []string{w.ID, w.Namespace, w.Holder, "waits", waits, "–", w.Devices.String(), strconv.Itoa(w.Priority), w.Wait.Text})
		}
		return c.Table("ID NAMESPACE HOLDER STATE SINCE WORKERS DEVICES PRIORITY WHY", rows)
	})
}

// why is the last column of a reservation.
func why(r placement.Record) string {
	switch {
	case r.Unconfirmed == "":
		return r.Why
	case r.Why == "":
		return "not confirmed: " + r.Unconfirmed
	}
	return r.Why + "; not confirmed: " + r.Unconfirmed
}

// deviceCount is the number of devices of a reservation and of their nodes.
func deviceCount(r placement.Record) string {
	var devices placement.Share
	on := map[string]bool{}
	for _, w := range r.Workers {
		on[w.Node] = true
		for _, s := range w.Slots {
			devices += s.Share
			on[s.Node] = true
		}
	}
	return fmt.Sprintf("%s on %d", devices, len(on))
}
