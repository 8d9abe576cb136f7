package capacity

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/nodes"
	"troupe/placement"
)

// drainPoll is the interval of asking whether workers have ended.
const drainPoll = 100 * time.Millisecond

// drainFlags are the flags of drain.
type drainFlags struct {
	why   string
	by    string
	wait  time.Duration
	grace time.Duration
}

func newDrain(c command) *cobra.Command {
	var flags drainFlags
	cmd := &cobra.Command{
		Use:   "drain NODE",
		Short: "Close a node to new grants and end or move its workers",
		Long: `Drain cordons the node, waits up to --wait for its workers to end by themselves, and then ends the others: INT, after --grace TERM,
then KILL, to the whole process trees. The workers of a role with the policy restart_rank or restart_role are started again on
other nodes with room, which does not count as one of its restarts. Any other role fails, with the drain and its --why as the
cause. Drain prints how many workers are left, and returns when there are none. "troupe uncordon" opens the node again.`,
		Example: "  troupe drain box-1\n  troupe drain box-1 --wait 30m --why 'a new fan'",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := bus.CheckName("node", args[0]); err != nil {
				return cli.Usagef("%w", err)
			}
			if flags.wait < 0 || flags.grace < 0 {
				return cli.Usagef("--wait %v and --grace %v must not be negative", flags.wait, flags.grace)
			}
			flags.by = cmp.Or(flags.by, c.whoami())
			return c.drain(cmd.Context(), args[0], flags)
		},
		ValidArgsFunction: c.CompleteNode,
	}
	cmd.Flags().StringVar(&flags.why, "why", "", "the reason, shown to waiting requests and in the errors of ended workers")
	cmd.Flags().StringVar(&flags.by, "by", "", "name of the operator (default you)")
	cmd.Flags().DurationVar(&flags.wait, "wait", 0, "how long workers may take to end by themselves")
	cmd.Flags().DurationVar(&flags.grace, "grace", 10*time.Second, "how long they may take to end after SIGINT")
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print one JSON object at the end: node, ended and stopped")
	return cmd
}

func (c command) drain(ctx context.Context, node string, f drainFlags) error {
	return c.WithBus(ctx, func(b *bus.Bus, _ cli.Server) error {
		client, err := placement.NewClient(b, "")
		if err != nil {
			return err
		}
		defer client.Close()
		if err := cli.CheckNode(ctx, client, node); err != nil {
			return err
		}
		if _, err := client.Cordon(ctx, placement.Cordon{Node: node, Why: cmp.Or(f.why, "drained"), By: f.by}); err != nil {
			return cli.UsageIfInvalid(err)
		}
		agent := nodes.NewClient(b)
		before, left, err := c.awaitEnds(ctx, agent, node, f.wait)
		if err != nil {
			return err
		}
		if len(left) > 0 {
			if !c.JSON {
				c.Printf("%s: ending %s\n", node, cli.Counted(len(left), "worker"))
			}
			why := fmt.Sprintf("node %s is drained by %s", node, f.by)
			if f.why != "" {
				why += ": " + f.why
			}
			if _, err := agent.Evict(ctx, node, left, f.grace, why); err != nil {
				return err
			}
		}
		if c.JSON {
			return c.PrintJSON(map[string]any{"node": node, "ended": before - len(left), "stopped": len(left)})
		}
		c.Printf("%s is drained\n", node)
		return nil
	})
}

// awaitEnds waits for workers to end by themselves. It returns how many there were, and the workers that are left.
func (c command) awaitEnds(ctx context.Context, agent *nodes.Client, node string, most time.Duration) (before int, left []nodes.WorkerID, err error) {
	end, reported := time.Now().Add(most), -1
	for {
		all, err := agent.Running(ctx, node)
		if err != nil {
			return 0, nil, err
		}
		left = nil
		for _, s := range slices.DeleteFunc(all, func(s nodes.Status) bool { return s.Exit != nil || s.PID == 0 }) {
			left = append(left, s.ID)
		}
		before = max(before, len(left))
		if len(left) == 0 || !time.Now().Before(end) {
			return before, left, nil
		}
		if len(left) != reported && !c.JSON {
			reported = len(left)
			c.Printf("%s: left: %s\n", node, cli.Counted(reported, "worker"))
		}
		select {
		case <-ctx.Done():
			return before, left, ctx.Err()
		case <-time.After(drainPoll):
		}
	}
}
