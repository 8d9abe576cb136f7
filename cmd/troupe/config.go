package main

import (
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"troupe/bus"
	"troupe/cmd/troupe/cli"
)

func newConfig(c command) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "config",
		Short:   "Check the configuration file",
		Example: "  troupe config check\n  troupe config check deploy/troupe.yaml",
	}
	check := &cobra.Command{
		Use:   "check [FILE]",
		Short: "Check a configuration file without running anything",
		Long: `Check reads a configuration file and reports the first mistake: a key that no command has, with the nearest that there is, or a value that its
flag refuses. Without FILE it checks the file that commands read: --config or TROUPE_CONFIG, ~/.config/troupe/troupe.yaml, or
/etc/troupe/troupe.yaml.`,
		Example: "  troupe config check\n  troupe config check troupe.yaml --json",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			path, _ := c.ConfigPath()
			if len(args) > 0 {
				path = args[0]
			}
			return c.showConfig(path)
		},
	}
	c.JSONFlag(check, "print one JSON object: path and settings, the number of them")
	cmd.AddCommand(check)
	return cmd
}

func (c command) showConfig(path string) error {
	if path == "" {
		return bus.Errorf(bus.CodeNotFound, "there is no configuration file; name one, or write ~/.config/troupe/%s", cli.ConfigName)
	}
	root, err := c.CheckConfig(path)
	if err != nil {
		return err
	}
	n := 0
	var count func(cmd *cobra.Command)
	seen := map[*pflag.Flag]bool{}
	count = func(cmd *cobra.Command) {
		for _, flags := range []*pflag.FlagSet{cmd.PersistentFlags(), cmd.Flags()} {
			flags.VisitAll(func(f *pflag.Flag) {
				if f.Changed && !seen[f] {
					seen[f] = true
					n++
				}
			})
		}
		for _, sub := range cmd.Commands() {
			count(sub)
		}
	}
	count(root)
	if c.JSON {
		return c.PrintJSON(struct {
			Path     string `json:"path"`
			Settings int    `json:"settings"`
		}{path, n})
	}
	c.Printf("%s is valid: %s\n", path, cli.Counted(n, "setting"))
	return nil
}
