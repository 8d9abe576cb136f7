package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/nodes"
	"troupe/placement"
)

const waitLook = 100 * time.Millisecond // between two looks at the nodes

// wanted is what is waited for.
type wanted struct {
	nodes int
	gpus  int
}

func newWait(c *cli) *cobra.Command {
	var want wanted
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "wait",
		Short: "Wait until enough nodes and devices are there",
		Long: `Wait returns when so many nodes are ready and so many fit devices are on them, also if the head itself is yet to come. While
it waits it says what is missing, whenever that changes.`,
		Example: "  troupe wait --nodes 4 --gpus 32 --timeout 10m",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case want.nodes < 0 || want.gpus < 0 || want == wanted{}:
				return usagef("give --nodes, --gpus or both, as whole numbers")
			case timeout <= 0:
				return usagef("--timeout %v: must be positive", timeout)
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			return c.wait(ctx, want)
		},
	}
	cmd.Flags().IntVar(&want.nodes, "nodes", 0, "how many nodes must be ready")
	cmd.Flags().IntVar(&want.gpus, "gpus", 0, "how many fit devices must be on them")
	cmd.Flags().DurationVar(&timeout, "timeout", 5*time.Minute, "give up after this time")
	c.serverFlags(cmd)
	c.jsonFlag(cmd, "print one JSON object when they are there: nodes and gpus")
	return cmd
}

// wait looks for the head, and then at its nodes, until they are there or ctx ends.
func (c *cli) wait(ctx context.Context, want wanted) error {
	missing := "the head"
	for {
		err := c.withPlacement(ctx, true, func(client *placement.Client) error {
			have, err := c.awaitNodes(ctx, client, want, &missing)
			if err != nil {
				return err
			}
			if c.json {
				return c.printJSON(map[string]int{"nodes": have.nodes, "gpus": have.gpus})
			}
			c.printf("%d nodes with %d devices are there\n", have.nodes, have.gpus)
			return nil
		})
		if err == nil || ctx.Err() == nil && !waitsFor(err) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("gave up waiting: %s", missing)
		case <-time.After(waitLook):
		}
	}
}

// waitsFor reports whether a head that is yet to come would help.
func waitsFor(err error) bool {
	return errors.Is(err, bus.ErrUnavailable) || errors.Is(err, bus.ErrTimedOut) || errors.Is(err, nodes.ErrNoHead)
}

// awaitNodes returns when enough is there. missing is what is not, in words, and is said whenever it changes.
func (c *cli) awaitNodes(ctx context.Context, client *placement.Client, want wanted, missing *string) (wanted, error) {
	for {
		list, err := client.Nodes(ctx)
		if err != nil {
			return wanted{}, err
		}
		have := countReady(list)
		short := want.shortOf(have)
		if short == "" {
			return have, nil
		}
		if short != *missing {
			*missing = short
			c.warnf("troupe: waiting: %s\n", short)
		}
		select {
		case <-ctx.Done():
			return have, ctx.Err()
		case <-time.After(waitLook):
		}
	}
}

// countReady counts the nodes that are ready, and what is fit on them.
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

// shortOf says what is missing; empty if nothing is.
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
