// Package inspect is the commands that show the state of a head and change nothing, except for "namespaces rm": status, top, describe, doctor,
// roles, namespaces, gpus, reservations, weights and events.
package inspect

import (
	"github.com/spf13/cobra"

	"troupe/cmd/troupe/cli"
)

// command is the commands of this package.
type command struct{ *cli.CLI }

// Commands are the commands of this package.
func Commands(base *cli.CLI) []*cobra.Command {
	c := command{base}
	return []*cobra.Command{newStatus(c), newTop(c), newDescribe(c), newDoctor(c), newRoles(c), newNamespaces(c), newGPUs(c), newReservations(c), newWeights(c), newEvents(c)}
}
