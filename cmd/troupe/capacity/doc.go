// Package capacity is the commands that grant devices and close them to grants: explain, reserve, release, rules, ledger, cordon, uncordon and
// drain.
package capacity

import (
	"github.com/spf13/cobra"

	"troupe/cmd/troupe/cli"
)

// command is the commands of this package.
type command struct{ *cli.CLI }

// Commands are the commands of this package.
func Commands(base *cli.CLI) []*cobra.Command {
	c := command{base}
	return []*cobra.Command{newExplain(c), newReserve(c), newRelease(c), newRules(c), newLedger(c), newCordon(c), newUncordon(c), newDrain(c)}
}
