package workers

import (
	"context"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/nodes"
	"troupe/roles"
)

// workerTarget is a role, or one of its ranks.
type workerTarget struct {
	role string
	rank int // -1: all
}

func parseWorker(text string, oneRank bool) (workerTarget, error) {
	role, rankText, one := strings.Cut(text, "/")
	t := workerTarget{role: role, rank: -1}
	if err := bus.CheckRoleName(role); err != nil {
		return t, cli.Usagef("%w", err)
	}
	if !one && oneRank {
		return t, cli.Usagef("%q: give ROLE/RANK, with a rank counted from 0", text)
	}
	if one {
		rank, err := strconv.Atoi(rankText)
		if err != nil || rank < 0 {
			return t, cli.Usagef("%q: give ROLE/RANK, with a rank counted from 0", text)
		}
		t.rank = rank
	}
	return t, nil
}

func newStacks(c command) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "stacks ROLE[/RANK]",
		Short: "Show what the workers of a role are doing: running methods and stacks",
		Long: `Stacks shows, for every rank of a role or for one, the running methods, since when and with what arguments (types and shapes), and
the stacks of all threads, or of all goroutines of a Go worker, the innermost function first. Ranks that do the same are shown once; those
that do something else than the others come first.

A worker answers also while it computes. If foreign code holds the interpreter lock, its stacks are read from outside: with py-spy if the node
has it, else by faulthandler.`,
		Example: "  troupe stacks actor_train\n  troupe stacks actor_train/3\n  troupe stacks actor_train --json | jq '.[] | {rank, calls}'",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			target, err := parseWorker(args[0], false)
			if err != nil {
				return err
			}
			return c.stacks(cmd.Context(), target)
		},
		ValidArgsFunction: c.CompleteRole,
	}
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print one JSON array with an object for each rank")
	return cmd
}

func (c command) stacks(ctx context.Context, t workerTarget) error {
	return c.WithRole(ctx, t.role, func(cl *roles.Cluster) error {
		var ranks []int
		if t.rank >= 0 {
			ranks = []int{t.rank}
		}
		all, err := cl.Stacks(ctx, ranks...)
		if err != nil {
			return err
		}
		if c.JSON {
			return c.PrintJSON(all)
		}
		for i, group := range nodes.FoldStacks(all) {
			if i > 0 {
				c.Printf("\n")
			}
			c.Printf("%s", group)
		}
		return nil
	})
}

func newInterrupt(c command) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "interrupt ROLE/RANK",
		Short: "Interrupt the running method of a Python worker",
		Long: `Interrupt raises KeyboardInterrupt in the methods that a worker runs; tasks of async methods are cancelled. Their callers get a
cancelled error, and the worker continues with its next call.`,
		Example: "  troupe interrupt actor_train/3",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			target, err := parseWorker(args[0], true)
			if err != nil {
				return err
			}
			return c.interrupt(cmd.Context(), target)
		},
		ValidArgsFunction: c.CompleteRole,
	}
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print the names of the interrupted methods as one JSON object")
	return cmd
}

func (c command) interrupt(ctx context.Context, t workerTarget) error {
	return c.WithRole(ctx, t.role, func(cl *roles.Cluster) error {
		methods, err := cl.Interrupt(ctx, t.rank)
		if err != nil {
			return err
		}
		if c.JSON {
			return c.PrintJSON(map[string]any{"role": t.role, "rank": t.rank, "interrupted": append([]string{}, methods...)})
		}
		if len(methods) == 0 {
			c.Printf("%s/%d does not answer; it is interrupted when it runs Python code again\n", t.role, t.rank)
			return nil
		}
		c.Printf("interrupted %s of %s/%d\n", strings.Join(methods, ", "), t.role, t.rank)
		return nil
	})
}

func newDebug(c command) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "debug ROLE/RANK",
		Short: "Attach to a Python worker that is stopped at a breakpoint()",
		Long: `Debug attaches this terminal to the debugger (pdb) of a worker that has reached a breakpoint(). The worker waits there until a debugger is
attached; what it prints says so. It continues when the debugger's "continue" is given, or when this command ends.`,
		Example: "  troupe debug actor_train/3",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			target, err := parseWorker(args[0], true)
			if err != nil {
				return err
			}
			return c.debug(cmd.Context(), target, cmd.InOrStdin())
		},
		ValidArgsFunction: c.CompleteRole,
	}
	c.ServerFlags(cmd)
	return cmd
}

func (c command) debug(ctx context.Context, t workerTarget, in io.Reader) error {
	out := c.Out
	if out == nil {
		out = os.Stdout
	}
	return c.WithRole(ctx, t.role, func(cl *roles.Cluster) error { return cl.Debug(ctx, t.rank, in, out) })
}
