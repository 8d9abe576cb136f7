package capacity

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/user"
	"strings"

	"github.com/spf13/cobra"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
	"troupe/nodes"
	"troupe/placement"
	"troupe/placement/planner"
)

func newCordon(c command) *cobra.Command {
	var one placement.Cordon
	cmd := &cobra.Command{
		Use:   "cordon NODE[/DEVICE]",
		Short: "Close a node, or one device of it, to new grants",
		Long: `Cordon excludes a node, or one device of it (its index or UUID), from new reservations. Present reservations stay. The cordon
outlives restarts of the head and of the node, until "troupe uncordon" removes it. "troupe gpus" and "troupe explain" show its
author, time and reason.`,
		Example: "  troupe cordon box-1 --why 'a new fan'\n  troupe cordon box-0/3",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if one.Node, one.Device, err = nodeAndDevice(args[0]); err != nil {
				return err
			}
			one.By = cmp.Or(one.By, c.whoami())
			return c.cordon(cmd.Context(), one)
		},
		ValidArgsFunction: c.CompleteNode,
	}
	cmd.Flags().StringVar(&one.Why, "why", "", "the reason, shown to waiting requests")
	cmd.Flags().StringVar(&one.By, "by", "", "name of the operator (default you)")
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print one JSON object: the cordon as it is kept")
	return cmd
}

func newUncordon(c command) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "uncordon NODE[/DEVICE]",
		Short:   "Open a node or a device again",
		Long:    `Uncordon removes a cordon. It may be repeated. Cordons of single devices stay when the cordon of their node is removed.`,
		Example: "  troupe uncordon box-1\n  troupe uncordon box-0/3",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			node, device, err := nodeAndDevice(args[0])
			if err != nil {
				return err
			}
			return c.uncordon(cmd.Context(), node, device)
		},
		ValidArgsFunction: c.CompleteNode,
	}
	c.ServerFlags(cmd)
	c.JSONFlag(cmd, "print one JSON object: node, device and uncordoned, whether it was cordoned")
	return cmd
}

// nodeAndDevice splits NODE[/DEVICE].
func nodeAndDevice(text string) (node, device string, err error) {
	node, device, found := strings.Cut(text, "/")
	if node == "" || found && device == "" {
		return "", "", cli.Usagef("%q: give NODE, or NODE/DEVICE with the device's index or UUID", text)
	}
	return node, device, nil
}

// unknownNode makes the refusal of an unknown node bus.ErrNotFound: an unknown role, node or reservation has exit code 1.
func unknownNode(err error) error {
	if e, ok := errors.AsType[*placement.RequestError](err); ok && e.Problem == planner.ErrUnknownNode {
		return bus.Errorf(bus.CodeNotFound, "%s", err.Error())
	}
	return err
}

// whoami is the user and the host of this process.
func (c command) whoami() string {
	name := cmp.Or(c.Env("USER"), c.Env("LOGNAME"))
	if name == "" {
		name = fmt.Sprintf("uid-%d", os.Getuid())
		if u, err := user.Current(); err == nil {
			name = u.Username
		}
	}
	return name + "@" + nodes.HostName()
}

func (c command) cordon(ctx context.Context, one placement.Cordon) error {
	return c.WithPlacement(ctx, true, func(client *placement.Client) error {
		kept, err := client.Cordon(ctx, one)
		if err != nil {
			return unknownNode(err)
		}
		if c.JSON {
			return c.PrintJSON(kept)
		}
		c.Printf("%s is cordoned %s\n", placeName(kept.Node, kept.Device), kept)
		return nil
	})
}

func (c command) uncordon(ctx context.Context, node, device string) error {
	return c.WithPlacement(ctx, true, func(client *placement.Client) error {
		was, err := client.Uncordon(ctx, node, device)
		if err != nil {
			return unknownNode(err)
		}
		if c.JSON {
			return c.PrintJSON(struct {
				Node       string `json:"node"`
				Device     string `json:"device,omitempty"`
				Uncordoned bool   `json:"uncordoned"`
			}{node, device, was})
		}
		if was {
			c.Printf("%s is open again\n", placeName(node, device))
		} else {
			c.Printf("%s was not cordoned\n", placeName(node, device))
		}
		return nil
	})
}

func placeName(node, device string) string {
	if device == "" {
		return "node " + node
	}
	return "device " + device + " of node " + node
}
