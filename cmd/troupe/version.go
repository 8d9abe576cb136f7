package main

import (
	"runtime"

	"troupe/bus/wire"

	"github.com/spf13/cobra"
)

func newVersion(c *cli) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Print the versions of the program and of the wire",
		Example: "  troupe version\n  troupe version --json",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if c.json {
				return c.printJSON(map[string]any{"version": version, "wire": wire.Major, "go": runtime.Version()})
			}
			c.printf("troupe %s, wire %d, %s %s/%s\n", version, wire.Major, runtime.Version(), runtime.GOOS, runtime.GOARCH)
			return nil
		},
	}
	c.jsonFlag(cmd, "print a JSON object")
	return cmd
}
