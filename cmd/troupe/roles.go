package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"
)

func newRoles(c *cli) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "roles",
		Short:   "List the roles of a namespace",
		Example: "  troupe roles\n  troupe roles --json | jq .name",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return c.roles(cmd.Context()) },
	}
	c.serverFlags(cmd)
	return cmd
}

func (c *cli) roles(ctx context.Context) error {
	rt, err := c.runtime(ctx)
	if err != nil {
		return err
	}
	defer closeQuietly(ctx, rt)
	all, err := rt.Roles(ctx)
	if err != nil {
		return err
	}
	if c.json {
		for _, r := range all {
			if err := c.printJSON(r); err != nil {
				return err
			}
		}
		return nil
	}
	if len(all) == 0 {
		fmt.Fprintf(c.out, "no roles in namespace %q\n", rt.Namespace())
		return nil
	}
	rows := make([][]string, len(all))
	for i, r := range all {
		kept := "owned"
		if r.Detached {
			kept = "detached"
		}
		rows[i] = []string{r.Name, r.Class, strconv.Itoa(r.World), r.Mesh.String(), string(r.State), age(r.Since), kept, r.By, r.Cause}
	}
	return c.table("ROLE CLASS WORLD MESH STATE SINCE LIFE BY CAUSE", rows)
}

func age(t time.Time) string { return time.Since(t).Round(time.Second).String() + " ago" }
