package cli

import (
	"context"
	"errors"
	"slices"
	"strconv"

	"troupe/bus"
	"troupe/placement"
)

// WithPlacement calls do with a client of the placement service. An operator's client sees every namespace.
func (c *CLI) WithPlacement(ctx context.Context, operator bool, do func(*placement.Client) error) error {
	return c.WithBus(ctx, func(b *bus.Bus, s Server) error {
		namespace := s.Namespace
		if operator {
			namespace = ""
		}
		client, err := placement.NewClient(b, namespace)
		if err != nil {
			return err
		}
		defer client.Close()
		return UsageIfInvalid(do(client))
	})
}

// UsageIfInvalid makes an invalid request a usage error.
func UsageIfInvalid(err error) error {
	if errors.Is(err, placement.ErrInvalid) || errors.Is(err, bus.ErrInvalid) {
		return Usagef("%w", err)
	}
	return err
}

// CheckNode is bus.ErrNotFound for a node that the placement service does not know.
func CheckNode(ctx context.Context, client *placement.Client, node string) error {
	list, err := client.Nodes(ctx)
	if err != nil {
		return err
	}
	names := make([]string, len(list))
	for i, n := range list {
		if names[i] = n.Report.Node; names[i] == node {
			return nil
		}
	}
	return bus.Errorf(bus.CodeNotFound, "no node %q; %s", node, ThereAre(names))
}

// ReservationIDs are the ids of reservations, for an error that names what exists.
func ReservationIDs(records []placement.Record) []string {
	ids := make([]string, len(records))
	for i, r := range records {
		ids[i] = r.ID
	}
	return ids
}

// LedgerLine is the status of the ledger as text.
func LedgerLine(s placement.LedgerStatus) string {
	line := "LEDGER " + s.String()
	if s.Unconfirmed > 0 {
		line += "; not confirmed yet: " + Counted(s.Unconfirmed, "reservation")
	}
	return line
}

// WorkersTable prints the nodes and devices of workers.
func (c *CLI) WorkersTable(workers []placement.Worker) error {
	rows := make([][]string, len(workers))
	for i, w := range workers {
		rows[i] = []string{strconv.Itoa(w.Rank), strconv.Itoa(w.NodeRank), w.Node, Indices(w.Devices), parts(w)}
	}
	return c.Table("RANK NODE_RANK NODE DEVICES SHARE", rows)
}

// parts is a worker's share of its device; empty for a whole device.
func parts(w placement.Worker) string {
	at := slices.IndexFunc(w.Slots, func(s placement.Slot) bool { return s.Share < placement.Whole })
	if at < 0 {
		return ""
	}
	return w.Slots[at].Share.String()
}
