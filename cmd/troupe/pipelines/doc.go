// Package pipelines is the commands that run a pipeline from a file, and that watch and control one that runs: run and pipeline.
package pipelines

import (
	"github.com/spf13/cobra"

	"troupe/actors"
	"troupe/cmd/troupe/cli"
)

// command is the commands of this package.
type command struct {
	*cli.CLI
	classes []*actors.Class // worker classes of this program
}

// Commands are the commands of this package. Roles of a file may have the classes, as goroutines of this process.
func Commands(base *cli.CLI, classes []*actors.Class) []*cobra.Command {
	c := command{base, classes}
	return []*cobra.Command{newRun(c), newPipeline(c)}
}
