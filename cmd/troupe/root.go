package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"troupe/cmd/troupe/bench"
	"troupe/cmd/troupe/capacity"
	"troupe/cmd/troupe/cli"
	"troupe/cmd/troupe/head"
	"troupe/cmd/troupe/inspect"
	"troupe/cmd/troupe/pipelines"
	"troupe/cmd/troupe/workers"
)

// command is the commands of this package.
type command struct{ *cli.CLI }

func newRoot(base *cli.CLI) *cobra.Command {
	base.NewRoot = newRoot
	c := command{base}
	root := &cobra.Command{
		Use:   "troupe",
		Short: "Named groups of GPU workers on a message bus",
		Long: `Troupe runs named groups of GPU workers (roles) on a message bus: it starts them, ranks them, calls one, some
or all of them, gathers the answers, and ends each group as a unit.

Commands that talk to a head find the head on this machine. These variables name another one:
  TROUPE_URL          its URL (or --url)
  TROUPE_TOKEN        its token, or
  TROUPE_TOKEN_FILE   a file with the token, or
  TROUPE_CREDS        a NATS credentials file (for an external NATS server)
  TROUPE_FINGERPRINT  SHA-256 of its certificate, as "troupe up" prints it
  TROUPE_NAMESPACE    the namespace (or --namespace)`,
		Example: `  troupe demo                                  # a small training job, nothing to configure
  troupe up                                    # a head on this machine, until Ctrl-C
  troupe roles                                 # what runs there
  troupe call actor_train train_step --args '[[1,2,3,4]]'
  source <(troupe completion bash)             # complete commands, roles, methods and modes`,
		Version:       cli.Version,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.PersistentFlags().BoolVar(&c.Raw, "raw", false, "pass on control characters in output of workers, names and errors, instead of escaping them")
	root.PersistentFlags().StringVar(&c.Config, "config", "", "configuration file (default $TROUPE_CONFIG, ~/.config/troupe/troupe.yaml or /etc/troupe/troupe.yaml)")
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		if !cmd.HasParent() || cmd.Hidden || cmd.Name() == "help" || cmd.Parent().Name() == "completion" || cmd.Parent().Name() == "config" {
			return nil
		}
		return c.LoadConfig(cmd)
	}
	root.SetVersionTemplate("troupe {{.Version}}\n")
	root.SetOut(c.Out)
	root.SetErr(c.Err)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return cli.Usagef("%w (see %s --help)", err, cmd.CommandPath())
	})
	root.AddCommand(head.Commands(base)...)
	root.AddCommand(workers.Commands(base)...)
	root.AddCommand(capacity.Commands(base)...)
	root.AddCommand(pipelines.Commands(base, hosted())...)
	root.AddCommand(inspect.Commands(base)...)
	root.AddCommand(bench.New(base), newConfig(c), newDemo(c), newMan(c), newVersion(c))
	root.InitDefaultCompletionCmd()
	strict(root)
	return root
}

// strict makes a wrong number of arguments and an unknown command usage errors.
func strict(cmd *cobra.Command) {
	check := cmd.Args
	if cmd.HasSubCommands() {
		check = noSuchCommand
		if cmd.RunE == nil {
			cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		}
	}
	if check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			if err := check(cmd, args); err != nil {
				return cli.Usagef("%w (see %s --help)", err, cmd.CommandPath())
			}
			return nil
		}
	}
	for _, sub := range cmd.Commands() {
		strict(sub)
	}
}

func noSuchCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	cmd.SuggestionsMinimumDistance = 2
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		return fmt.Errorf("%s has no command %q; did you mean %s?", cmd.CommandPath(), args[0], strings.Join(near, " or "))
	}
	var names []string
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() {
			names = append(names, sub.Name())
		}
	}
	return fmt.Errorf("%s has no command %q; it has %s", cmd.CommandPath(), args[0], strings.Join(names, ", "))
}
