// Package workers is the commands that act on the workers of a role: call, logs, stacks, interrupt, debug, timeline, resize, replace and destroy.
package workers

import (
	"github.com/spf13/cobra"

	"troupe/cmd/troupe/cli"
)

// command is the commands of this package.
type command struct{ *cli.CLI }

// Commands are the commands of this package.
func Commands(base *cli.CLI) []*cobra.Command {
	c := command{base}
	return []*cobra.Command{newCall(c), newLogs(c), newStacks(c), newInterrupt(c), newDebug(c), newTimeline(c), newResize(c), newReplace(c), newDestroy(c)}
}
