package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
)

// cli is what every command shares: where it writes, and what it was told about the server.
type cli struct {
	out io.Writer
	err io.Writer
	env func(string) string

	unread func() // called when nobody reads out any more; nil for commands that go on then

	url       string
	namespace string
	json      bool
}

// usageError is a mistake on the command line; the program ends with 2.
type usageError struct{ error }

func (e *usageError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error { return &usageError{fmt.Errorf(format, args...)} }

func newRoot(c *cli) *cobra.Command {
	root := &cobra.Command{
		Use:   "troupe",
		Short: "Named groups of GPU workers on a message bus",
		Long: `Troupe runs named groups of GPU workers (roles) on a message bus: it starts them, ranks them, calls one, some
or all of them, gathers the answers, and takes each group down as a unit.

Commands that talk to a head find the one on this machine by themselves. These variables name another:
  TROUPE_URL          where it is (or --url)
  TROUPE_TOKEN        its token (for a head), or
  TROUPE_TOKEN_FILE   the file that holds it, or
  TROUPE_CREDS        a NATS credentials file (for a NATS of your own)
  TROUPE_FINGERPRINT  SHA-256 of its certificate, as "troupe up" prints it
  TROUPE_NAMESPACE    the namespace to work in (or --namespace)`,
		Example: `  troupe demo                                  # a small training job, nothing to configure
  troupe up                                    # a head on this machine, until Ctrl-C
  troupe roles                                 # what runs there
  troupe call actor_train train_step --args '[[1,2,3,4]]'
  source <(troupe completion bash)             # complete commands, roles, methods and modes`,
		Version:       version,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetVersionTemplate("troupe {{.Version}}\n")
	root.SetOut(c.out)
	root.SetErr(c.err)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usagef("%w (see %s --help)", err, cmd.CommandPath())
	})
	root.AddCommand(newUp(c), newRoles(c), newCall(c), newDestroy(c), newDemo(c), newBench(c), newVersion(c))
	root.AddCommand(newExplain(c), newReserve(c), newRelease(c), newReservations(c), newGPUs(c), newRules(c), newLedger(c), newCordon(c), newUncordon(c))
	root.AddCommand(newJoin(c), newAgent(c), newWait(c), newStatus(c), newDrain(c), newLogs(c), newEvents(c), newLaunch(c))
	root.AddCommand(newRun(c), newPipeline(c), newNamespaces(c))
	root.InitDefaultCompletionCmd()
	strict(root)
	return root
}

// strict makes every mistake in a command's words a usage error: a wrong number of arguments, or an unknown command.
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
				return usagef("%w (see %s --help)", err, cmd.CommandPath())
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

// jsonFlag adds --json, with what it changes.
func (c *cli) jsonFlag(cmd *cobra.Command, does string) {
	cmd.Flags().BoolVar(&c.json, "json", false, does)
}

func (c *cli) printJSON(v any) error {
	enc := json.NewEncoder(c.out)
	enc.SetEscapeHTML(false)
	err := enc.Encode(v)
	c.noteUnread(err)
	return err
}

// table prints rows under a header, aligned.
func (c *cli) table(header string, rows [][]string) error {
	var text bytes.Buffer
	w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	lines := []string{strings.ReplaceAll(header, " ", "\t")}
	for _, r := range rows {
		lines = append(lines, strings.Join(r, "\t"))
	}
	if _, err := io.WriteString(w, strings.Join(lines, "\n")+"\n"); err != nil {
		return err
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for line := range strings.Lines(text.String()) { // an empty last column leaves spaces
		c.printf("%s\n", strings.TrimRight(line, " \n"))
	}
	return nil
}
