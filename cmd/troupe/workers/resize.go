package workers

import (
	"context"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"troupe/cmd/troupe/cli"
	"troupe/roles"
)

func newResize(c command) *cobra.Command {
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "resize ROLE REPLICAS",
		Short: "Give a role another number of replicas while it works",
		Long: `Resize asks the driver that created a role to add replicas, or to remove the last ones; a replica has the ranks of one data-parallel
index. No call fails because of it: new ranks are called with the last arguments of methods with replay=True first, and ranks that leave
finish their calls.`,
		Example: "  troupe resize reward 6",
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			target, err := parseWorker(args[0], false)
			if err != nil {
				return err
			}
			replicas, err := strconv.Atoi(args[1])
			if err != nil || replicas < 1 || target.rank >= 0 {
				return cli.Usagef("%q %q: give ROLE and REPLICAS, a number from 1", args[0], args[1])
			}
			return c.change(cmd.Context(), target.role, timeout, func(ctx context.Context, cl *roles.Cluster) error { return cl.Resize(ctx, replicas) })
		},
		ValidArgsFunction: c.CompleteRole,
	}
	return c.changeFlags(cmd, &timeout)
}

func newReplace(c command) *cobra.Command {
	var timeout time.Duration
	var reason string
	cmd := &cobra.Command{
		Use:   "replace ROLE/RANK",
		Short: "Give a rank of a role another process",
		Long: `Replace asks the driver that created a role to replace the worker of a rank. The worker finishes its calls within the stop_grace of the
role and is killed; calls to the rank wait until the next process has the replayed methods. The policy of the role must be restart_rank or
restart_role. The budget of restarts does not count it.`,
		Example: "  troupe replace actor_train/3 --reason 'its device is slow'",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			target, err := parseWorker(args[0], true)
			if err != nil {
				return err
			}
			return c.change(cmd.Context(), target.role, timeout, func(ctx context.Context, cl *roles.Cluster) error { return cl.Replace(ctx, target.rank, reason) })
		},
		ValidArgsFunction: c.CompleteRole,
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why, for events and errors")
	return c.changeFlags(cmd, &timeout)
}

func (c command) changeFlags(cmd *cobra.Command, timeout *time.Duration) *cobra.Command {
	c.ServerFlags(cmd)
	cmd.Flags().DurationVar(timeout, "timeout", 5*time.Minute, "give up after this time")
	c.JSONFlag(cmd, "print the membership as one JSON object")
	return cmd
}

// change changes the membership of a role and prints it.
func (c command) change(ctx context.Context, role string, timeout time.Duration, do func(context.Context, *roles.Cluster) error) error {
	if timeout <= 0 {
		return cli.Usagef("--timeout %s: must be positive", timeout)
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return c.WithRole(ctx, role, func(cl *roles.Cluster) error {
		if err := do(ctx, cl); err != nil {
			return err
		}
		now, err := cl.Members(ctx)
		if err != nil {
			return err
		}
		if c.JSON {
			return c.PrintJSON(now)
		}
		c.Printf("role %s has %d workers in epoch %d: %s\n", role, len(now.Members), now.Epoch, now.Cause)
		return nil
	})
}
