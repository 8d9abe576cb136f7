package main

import (
	"context"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"troupe/roles"
)

func newRoles(c *cli) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "roles",
		Short: "List the roles of a namespace",
		Long: `Roles prints what the registry says of each role: its class, its layout, its state and since when, whether it ends
with its driver (owned) or stays (detached), who made it, and why it failed. How a worker is right now, it says itself:
troupe call ROLE @health.`,
		Example: "  troupe roles\n  troupe roles --namespace run-42\n  troupe roles --json | jq -r 'select(.state == \"failed\") | .name'",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return c.roles(cmd.Context()) },
	}
	c.serverFlags(cmd)
	c.jsonFlag(cmd, "print one JSON object a role instead of a table")
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
		rows[i] = []string{r.Name, r.Class, strconv.Itoa(r.World), r.Mesh.String(), string(r.State), age(r.Since), life, r.By, r.Cause}
	}
	return c.table("ROLE CLASS WORLD MESH STATE SINCE LIFE BY CAUSE", rows)
}

func age(t time.Time) string { return time.Since(t).Round(time.Second).String() + " ago" }
