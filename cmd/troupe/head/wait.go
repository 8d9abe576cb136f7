package head

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/nodes"
	"troupe/placement"
)

const nodesPoll = 100 * time.Millisecond

// wanted is how many nodes and devices must be there.
type wanted struct {
	nodes int
	gpus  int
}

func newWait(c command) *cobra.Command {
	var want wanted
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "wait",
		Short: "Wait until enough nodes and devices are there",
		Long: `Wait returns when the given number of nodes is ready and the given number of healthy devices is on them. The head itself need not be
there yet. Every change of what is missing is printed.`,
		Example: "  troupe wait --nodes 4 --gpus 32 --timeout 10m",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case want.nodes < 0 || want.gpus < 0 || want == wanted{}:
				return cli.Usagef("give --nodes, --gpus or both, as whole numbers")
			case timeout <= 0:
				return cli.Usagef("--timeout %v: must be positive", timeout)
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			return c.wait(ctx, want)
		},
	}
	cmd.Flags().IntVar(&want.nodes, "nodes", 0, "how many nodes must be ready")
	cmd.Flags().IntVar(&want.gpus, "gpus", 0, "how many healthy devices must be on them")
	cmd.Flags().DurationVar(&timeout, "timeout", 5*time.Minute, "give up after this time")
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print one JSON object at the end: nodes and gpus")
	return cmd
}

// wait waits for the head, and then for its nodes, until they are there or ctx ends.
func (c command) wait(ctx context.Context, want wanted) error {
	missing := "the head"
	err := bus.Retry(ctx, bus.Backoff{First: nodesPoll, Most: nodesPoll}, func() error {
		err := c.WithPlacement(ctx, true, func(client *placement.Client) error {
			have, err := c.awaitWanted(ctx, client, want, &missing)
			if err != nil {
				return err
			}
			if c.JSON {
				return c.PrintJSON(map[string]int{"nodes": have.nodes, "gpus": have.gpus})
			}
			are := "are"
			if have.nodes == 1 {
				are = "is"
			}
			c.Printf("%s with %s %s there\n", cli.Counted(have.nodes, "node"), cli.Counted(have.gpus, "device"), are)
			return nil
		})
		if !headMayCome(err) {
			return bus.Permanent(err)
		}
		return err
	})
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("gave up waiting: %s", missing)
	}
	return err
}

// headMayCome reports whether the error is that of a head that is not there yet.
func headMayCome(err error) bool {
	return errors.Is(err, bus.ErrUnavailable) || errors.Is(err, bus.ErrTimedOut) || errors.Is(err, nodes.ErrNoHead)
}

// awaitWanted returns when there are enough nodes and devices. missing is what is not there yet, in words; every change of it is
// printed.
func (c command) awaitWanted(ctx context.Context, client *placement.Client, want wanted, missing *string) (have wanted, err error) {
	err = awaitNodes(ctx, client, nodesPoll, func(list []placement.NodeStatus) bool {
		have = countReady(list)
		short := want.shortOf(have)
		if short != "" && short != *missing {
			*missing = short
			c.Warnf("troupe: waiting: %s\n", short)
		}
		return short == ""
	})
	return have, err
}

// awaitNodes asks for the list of nodes until enough accepts it, the placement service refuses, or ctx ends.
func awaitNodes(ctx context.Context, client *placement.Client, poll time.Duration, enough func([]placement.NodeStatus) bool) error {
	for {
		list, err := client.Nodes(ctx)
		if err != nil || enough(list) {
			return err
		}
		if err := bus.Sleep(ctx, poll); err != nil {
			return err
		}
	}
}

// countReady counts the ready nodes and the healthy devices on them.
func countReady(list []placement.NodeStatus) (have wanted) {
	for _, n := range list {
		if n.Rank < 0 || n.State != placement.NodeReady {
			continue
		}
		have.nodes++
		for _, d := range n.Report.Devices {
			if len(n.Report.Unfit(d)) == 0 {
				have.gpus++
			}
		}
	}
	return have
}

// shortOf is what is missing, in words; empty if nothing is.
func (w wanted) shortOf(have wanted) string {
	var words []string
	if have.nodes < w.nodes {
		words = append(words, fmt.Sprintf("%d of %d nodes are there", have.nodes, w.nodes))
	}
	if have.gpus < w.gpus {
		words = append(words, fmt.Sprintf("%d of %d devices are there", have.gpus, w.gpus))
	}
	return strings.Join(words, ", ")
}
