package capacity

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/placement"
	"troupe/placement/planner"
)

func newReserve(c command) *cobra.Command {
	var f requestFlags
	var wait time.Duration
	cmd := &cobra.Command{
		Use:   "reserve",
		Short: "Reserve devices until they are released",
		Long: `Reserve requests a gang of bundles and waits in the queue until all of it is granted. The reservation stays when the command
ends; "troupe release ID" releases it. A second request with the same --id returns the same reservation.

A request that is not granted within --wait ends with exit code 1 and the holders of the devices. A request that can never fit
fails at once. An invalid request ends with exit code 2.`,
		Example: `  troupe reserve --bundles 4 --devices 2 --id trainer
  troupe reserve --world 4 --device-mapping 'list(range(0,8))' --wait 0 --json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := f.request(cmd)
			if err != nil {
				return err
			}
			if wait < 0 {
				return cli.Usagef("--wait %v: must not be negative", wait)
			}
			return c.reserve(cmd.Context(), r, wait)
		},
	}
	f.add(cmd)
	cmd.Flags().DurationVar(&wait, "wait", time.Minute, "how long to wait in the queue; 0 does not wait")
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print one JSON object: granted, reasons, workers, id and token")
	return cmd
}

// reserved is the JSON output of reserve.
type reserved struct {
	Granted  bool               `json:"granted"`
	Reasons  []planner.Reason   `json:"reasons"`
	WaitsFor []planner.Obstacle `json:"waits_for,omitempty"`
	Workers  []placement.Worker `json:"workers"`
	ID       string             `json:"id,omitempty"`
	Token    uint64             `json:"token,omitempty"`
	State    placement.State    `json:"state,omitempty"`
	Unmet    string             `json:"unmet,omitempty"`
}

func (c command) reserve(ctx context.Context, r placement.Request, wait time.Duration) error {
	return c.WithPlacement(ctx, false, func(client *placement.Client) error {
		record, err := c.obtain(ctx, client, r, wait)
		if !c.JSON {
			if err != nil {
				return err
			}
			c.Printf("%s is reserved under token %d\n", record.ID, record.Token)
			return c.WorkersTable(record.Workers)
		}
		out := reserved{
			Granted: err == nil, Reasons: []planner.Reason{}, Workers: record.Workers,
			ID: record.ID, Token: record.Token, State: record.State, Unmet: record.Unmet,
		}
		if out.Workers == nil {
			out.Workers = []placement.Worker{}
		}
		if errors.Is(err, placement.ErrInvalid) {
			return err
		}
		if err != nil {
			out.Reasons, out.WaitsFor = whyNot(err)
		}
		return errors.Join(c.PrintJSON(out), err)
	})
}

func (c command) obtain(ctx context.Context, client *placement.Client, r placement.Request, wait time.Duration) (placement.Record, error) {
	if wait == 0 {
		return client.TryReserve(ctx, r)
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	return client.Reserve(ctx, r)
}

// whyNot is a refusal in JSON.
func whyNot(err error) ([]planner.Reason, []planner.Obstacle) {
	if e, ok := errors.AsType[*placement.NoCapacityError](err); ok {
		return e.Reasons, e.WaitsFor
	}
	reasons := []planner.Reason{{Code: planner.ReasonGang, Text: err.Error()}}
	if e, ok := errors.AsType[*placement.WaitError](err); ok && e.Wait != nil {
		return reasons, e.Wait.WaitsFor
	}
	return reasons, nil
}

func newRelease(c command) *cobra.Command {
	var token uint64
	cmd := &cobra.Command{
		Use:   "release ID",
		Short: "Release a reservation",
		Long: `Release releases a reservation. Of an id that is not reserved it says so, with exit code 1. With --token it releases only the grant with that token, and not a later
reservation of the same id.`,
		Example: "  troupe release trainer",
		Args:    cobra.ExactArgs(1),
		RunE:    func(cmd *cobra.Command, args []string) error { return c.release(cmd.Context(), args[0], token) },

		ValidArgsFunction: c.CompleteReservation,
	}
	cmd.Flags().Uint64Var(&token, "token", 0, "token of the grant (default that of the current grant)")
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print one JSON object: id and released, whether it was there")
	return cmd
}

func (c command) release(ctx context.Context, id string, token uint64) error {
	return c.WithPlacement(ctx, false, func(client *placement.Client) error {
		list, err := client.List(ctx)
		if err != nil {
			return err
		}
		at := slices.IndexFunc(list.Records, func(r placement.Record) bool { return r.ID == id })
		if at >= 0 {
			if err := client.Release(ctx, id, cmp.Or(token, list.Records[at].Token)); err != nil {
				return err
			}
		}
		if c.JSON {
			err = c.PrintJSON(struct {
				ID       string `json:"id"`
				Released bool   `json:"released"`
			}{id, at >= 0})
		} else if at >= 0 {
			c.Printf("%s is released\n", id)
		}
		if err == nil && at < 0 {
			err = bus.Errorf(bus.CodeNotFound, "no reservation %q; %s", id, cli.ThereAre(cli.ReservationIDs(list.Records)))
		}
		return err
	})
}
