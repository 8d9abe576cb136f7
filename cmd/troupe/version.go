package main

import (
	"runtime"

	"github.com/spf13/cobra"

	"troupe/bus/wire"
	"troupe/cmd/troupe/cli"
)

func newVersion(c command) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Print the versions of the program and of the wire",
		Example: "  troupe version\n  troupe version --json",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if c.JSON {
				return c.PrintJSON(map[string]any{"version": cli.Version, "wire": wire.Major, "go": runtime.Version()})
			}
			c.Printf("troupe %s, wire %d, %s %s/%s\n", cli.Version, wire.Major, runtime.Version(), runtime.GOOS, runtime.GOARCH)
			return nil
		},
	}
	c.JSONFlag(cmd, "print a JSON object")
	return cmd
}
