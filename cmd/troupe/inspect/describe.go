package inspect

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/nodes"
	"troupe/placement"
)

// recentEvents is how many events a description shows.
const recentEvents = 10

func newDescribe(c command) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "describe",
		Short:   "Show everything that is known about one role, node or reservation",
		Example: "  troupe describe role actor_train\n  troupe describe node box-1\n  troupe describe reservation trainer",
	}
	sub := func(use, short, long, example string, complete func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective), show func(ctx context.Context, name string) error) {
		var watch cli.WatchFlags
		one := &cobra.Command{Use: use, Short: short, Long: long, Example: "  troupe describe " + example, Args: cobra.ExactArgs(1), ValidArgsFunction: complete, RunE: func(cmd *cobra.Command, args []string) error {
			return c.Repeat(cmd.Context(), watch, func(ctx context.Context) error { return show(ctx, args[0]) })
		}}
		watch.Add(one)
		c.ServerFlags(one)
		c.JSONFlag(one, "print one JSON object")
		cmd.AddCommand(one)
	}
	sub("role NAME", "Show a role: record, ranks, methods, reservations, events",
		"Role prints the record of a role, its ranks with what they run, the ranks that the others wait for, its reservations and its last events.",
		"role actor_train", c.CompleteRole, c.describeRole)
	sub("node NAME", "Show a node: machine, devices, workers, reservations, events",
		"Node prints the state of a node, its agent's version and clock, disks and limits, its devices and their holders, its workers and its last events.",
		"node box-1", c.CompleteNode, c.describeNode)
	sub("reservation ID", "Show a reservation, or why a request waits",
		"Reservation prints the holder, the devices and the state of a reservation; of a request in the queue its place, and what it waits for.",
		"reservation trainer", c.CompleteReservation, c.describeReservation)
	return cmd
}

// field prints one line of a description.
func (c command) field(name, format string, args ...any) {
	c.Printf("%-14s%s\n", name+":", fmt.Sprintf(format, args...))
}

// section prints a table under a heading, or nothing if there are no rows.
func (c command) section(heading, header string, rows [][]string) error {
	if len(rows) == 0 {
		return nil
	}
	c.Printf("\n%s\n", heading)
	return c.Table(header, rows)
}

func stamp(t time.Time) string {
	if t.IsZero() {
		return "–"
	}
	return t.UTC().Format(time.DateTime) + " UTC (" + cli.Age(t) + ")"
}

func reservationRows(all []placement.Record) (rows [][]string) {
	for _, r := range all {
		rows = append(rows, []string{r.ID, string(r.State), cli.Age(r.Since), strconv.Itoa(len(r.Workers)), deviceCount(r), why(r)})
	}
	return rows
}

func (c command) showEvents(events []nodes.Event) error {
	if len(events) > 0 {
		c.Printf("\nEvents\n")
	}
	for _, e := range events {
		c.Printf("%s %s\n", e.At.Format(time.DateTime), e)
	}
	return nil
}

// eventsAbout is the last stored events that a filter keeps.
func eventsAbout(ctx context.Context, b *bus.Bus, keep func(nodes.Event) bool) []nodes.Event {
	ctx, cancel := context.WithTimeout(ctx, factWait)
	defer cancel()
	var out []nodes.Event
	_ = nodes.ReadEvents(ctx, b, nodes.EventQuery{}, func(e nodes.Event) error { // what was read so far is shown
		if keep(e) {
			out = append(out, e)
			out = out[max(0, len(out)-recentEvents):]
		}
		return nil
	})
	return out
}

func listReservations(ctx context.Context, b *bus.Bus, namespace string) (placement.Listing, error) {
	client, err := placement.NewClient(b, namespace)
	if err != nil {
		return placement.Listing{}, err
	}
	defer client.Close()
	return client.List(ctx)
}
