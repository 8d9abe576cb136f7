package cli

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"troupe/placement"
	"troupe/roles"
)

// completionWait bounds the completion of a name.
const completionWait = 2 * time.Second

// CompleteFrom completes a word with names from a session. Without a head there is no completion.
func (c *CLI) CompleteFrom(cmd *cobra.Command, names func(context.Context, *roles.Runtime) ([]string, error)) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(cmd.Context(), completionWait)
	defer cancel()
	var out []string
	if c.LoadConfig(cmd) != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	err := c.WithRuntime(ctx, func(rt *roles.Runtime) (err error) {
		out, err = names(ctx, rt)
		return err
	})
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

// CompleteRole completes the name of a role.
func (c *CLI) CompleteRole(cmd *cobra.Command, words []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(words) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return c.CompleteFrom(cmd, func(ctx context.Context, rt *roles.Runtime) ([]string, error) {
		all, err := rt.Roles(ctx)
		var names []string
		for _, r := range all {
			names = append(names, fmt.Sprintf("%s\t%s, %d workers, %s", r.Name, r.Class, r.World, r.State))
		}
		return names, err
	})
}

// CompleteNode and CompleteReservation complete names from the placement service.
func (c *CLI) CompleteNode(cmd *cobra.Command, words []string, _ string) ([]string, cobra.ShellCompDirective) {
	return c.completePlacement(cmd, words, func(ctx context.Context, client *placement.Client) ([]string, error) {
		list, err := client.Nodes(ctx)
		var names []string
		for _, n := range list {
			names = append(names, fmt.Sprintf("%s\t%s, %s", n.Report.Node, cmp.Or(string(n.State), "ready"), Counted(len(n.Report.Devices), "device")))
		}
		return names, err
	})
}

func (c *CLI) CompleteReservation(cmd *cobra.Command, words []string, _ string) ([]string, cobra.ShellCompDirective) {
	return c.completePlacement(cmd, words, func(ctx context.Context, client *placement.Client) ([]string, error) {
		list, err := client.List(ctx)
		var names []string
		for _, r := range list.Records {
			names = append(names, r.ID+"\t"+r.Holder)
		}
		for _, w := range list.Waiting {
			names = append(names, w.ID+"\t"+w.Holder+", waits")
		}
		return names, err
	})
}

func (c *CLI) completePlacement(cmd *cobra.Command, words []string, names func(context.Context, *placement.Client) ([]string, error)) (out []string, d cobra.ShellCompDirective) {
	if len(words) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completionWait)
	defer cancel()
	if c.LoadConfig(cmd) != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	err := c.WithPlacement(ctx, true, func(client *placement.Client) (err error) {
		out, err = names(ctx, client)
		return err
	})
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}
