package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"troupe/actors"
	"troupe/bus"
	"troupe/dispatch"
	"troupe/roles"
)

func newRoles(c *cli) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "roles [ROLE]",
		Short: "List the roles of a namespace, or the workers of one",
		Long: `Roles prints what the registry says of each role: its class, its layout, its state and since when, whether it ends
with its driver (owned) or stays (detached), on which nodes its processes are, who made it, and why it failed.

With the name of a role it prints its workers: where each runs, on which devices, and what it says of itself right now.`,
		Example: "  troupe roles\n  troupe roles actor_train\n  troupe roles --namespace run-42\n  troupe roles --json | jq -r 'select(.state == \"failed\") | .name'",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				return c.ranks(cmd.Context(), args[0])
			}
			return c.roles(cmd.Context())
		},
		ValidArgsFunction: c.completeRole,
	}
	c.serverFlags(cmd)
	c.jsonFlag(cmd, "print one JSON object a role, or a worker, instead of a table")
	return cmd
}

func (c *cli) roles(ctx context.Context) error {
	return c.withRuntime(ctx, func(rt *roles.Runtime) error {
		all, err := rt.Roles(ctx)
		if err != nil {
			return err
		}
		if !c.json {
			return c.rolesTable(rt.Namespace(), all)
		}
		for _, r := range all {
			if err := c.printJSON(r); err != nil {
				return err
			}
		}
		return nil
	})
}

// rank is one worker, as the registry and it itself say.
type rank struct {
	Rank    int           `json:"rank"`
	Name    string        `json:"name,omitempty"`
	Node    string        `json:"node"`
	Devices []int         `json:"devices,omitempty"`
	Gen     uint32        `json:"gen,omitempty"`
	PID     int           `json:"pid,omitempty"`
	State   string        `json:"state"` // as the worker says; "silent" if it says nothing
	Calls   int           `json:"calls"`
	Busy    time.Duration `json:"busy"` // how long the oldest call has been running
}

// ranks asks every worker of a role about itself, and does not wait long for those who say nothing.
func (c *cli) ranks(ctx context.Context, role string) error {
	if err := bus.CheckRoleName(role); err != nil {
		return &usageError{err}
	}
	return c.withRuntime(ctx, func(rt *roles.Runtime) error {
		cluster, err := rt.Attach(ctx, role)
		if err != nil {
			return err
		}
		rows := ranksOf(cluster.Record())
		f, err := cluster.Go(ctx, dispatch.Call{Method: actors.VerbInfo, Control: true, CollectAll: true, Timeout: infoWait})
		if err == nil { // of a role that has failed, the registry says what there is
			outcomes, err := dispatch.AwaitOutcomes[actors.Info](ctx, f)
			if err != nil {
				return err
			}
			for _, o := range outcomes {
				if o.Err == nil {
					rows[o.Rank].hear(o.Value)
				}
			}
		}
		if c.json {
			for _, r := range rows {
				if err := c.printJSON(r); err != nil {
					return err
				}
			}
			return nil
		}
		return c.ranksTable(rows)
	})
}

// completeRole completes the name of a role.
func (c *cli) completeRole(cmd *cobra.Command, words []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(words) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return c.completeCall(cmd, words, prefix)
}

// infoWait is how long workers have to say how they are.
const infoWait = 2 * time.Second

func ranksOf(rec roles.Record) []rank {
	rows := make([]rank, rec.World)
	for i := range rows {
		rows[i] = rank{Rank: i, State: "silent"}
		if i < len(rec.Seats) {
			s := rec.Seats[i]
			rows[i].Name, rows[i].Node, rows[i].Devices, rows[i].Gen = s.Name, s.Node, s.Devices, s.Gen
		}
	}
	return rows
}

func (r *rank) hear(info actors.Info) {
	r.Node, r.PID, r.State, r.Gen, r.Calls = info.Node, info.PID, string(info.State), info.Gen, len(info.Calls)
	for _, call := range info.Calls {
		if call.Running {
			r.Busy = max(r.Busy, call.For)
		}
	}
}

func (c *cli) ranksTable(all []rank) error {
	rows := make([][]string, len(all))
	for i, r := range all {
		busy := "idle"
		if r.Busy > 0 {
			busy = r.Busy.Round(time.Millisecond).String()
		}
		rows[i] = []string{itoa(r.Rank), cmp.Or(r.Name, "–"), cmp.Or(r.Node, "–"), indices(r.Devices), itoa(r.PID), r.State, itoa(r.Calls), busy}
	}
	return c.table("RANK WORKER NODE DEVICES PID STATE CALLS BUSY", rows)
}

func (c *cli) rolesTable(namespace string, all []roles.Record) error {
	if len(all) == 0 {
		c.printf("no roles in namespace %q\n", namespace)
		return nil
	}
	rows := make([][]string, len(all))
	for i, r := range all {
		life := "owned"
		if r.Detached {
			life = "detached"
		}
		rows[i] = []string{r.Name, r.Class, itoa(r.World), r.Mesh.String(), string(r.State), age(r.Since), life, nodesOf(r), r.By, r.Cause}
	}
	return c.table("ROLE CLASS WORLD MESH STATE SINCE LIFE NODES BY CAUSE", rows)
}

// nodesOf names the nodes of a role's processes, or the first of them.
func nodesOf(r roles.Record) string {
	var names []string
	for _, s := range r.Seats {
		if !slices.Contains(names, s.Node) {
			names = append(names, s.Node)
		}
	}
	switch n := len(names); {
	case n == 0:
		return "–"
	case n > 3:
		return fmt.Sprintf("%s and %d more", strings.Join(names[:2], ","), n-2)
	}
	return strings.Join(names, ",")
}

func age(t time.Time) string { return time.Since(t).Round(time.Second).String() + " ago" }
