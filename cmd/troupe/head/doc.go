// Package head is the commands that run a head, the agents of its nodes, or both: up, join, agent and launch; and those around them:
// wait, backup, restore and auth.
package head

import (
	"github.com/spf13/cobra"

	"troupe/cmd/troupe/cli"
)

// command is the commands of this package.
type command struct{ *cli.CLI }

// Commands are the commands of this package.
func Commands(base *cli.CLI) []*cobra.Command {
	c := command{base}
	return []*cobra.Command{
		newUp(c), newJoin(c), newAgent(c), newDataPort(c), newLaunch(c), newWait(c), newBackup(c), newRestore(c), newCluster(c), newAuth(c),
	}
}
