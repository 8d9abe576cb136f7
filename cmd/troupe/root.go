package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"troupe/internal/terminal"
)

// cli is shared by all commands: output, environment and the flags of the server.
type cli struct {
	out io.Writer
	err io.Writer
	env func(string) string

	unread func() // called when out is closed; nil for commands that run on then

	url       string
	namespace string
	ownHead   bool   // the command starts a head of its own rather than use a driver's private one
	run       string // id of the run of a private head; empty: not given
	json      bool
	config    string          // file; empty: the default ones
	kept      *keptConnection // of a live view
	logLevel  *slog.Level     // nil: that of the command
	jsonLogs  bool
	raw       bool // control characters are passed on unchanged
}

// usageError is a mistake on the command line; the exit code is 2.
type usageError struct{ error }

func (e *usageError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error { return &usageError{fmt.Errorf(format, args...)} }

func newRoot(c *cli) *cobra.Command {
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
		Version:       version,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.PersistentFlags().BoolVar(&c.raw, "raw", false, "pass on control characters in output of workers, names and errors, instead of escaping them")
	root.PersistentFlags().StringVar(&c.config, "config", "", "configuration file (default $TROUPE_CONFIG, ~/.config/troupe/troupe.yaml or /etc/troupe/troupe.yaml)")
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		if !cmd.HasParent() || cmd.Hidden || cmd.Name() == "help" || cmd.Parent().Name() == "completion" || cmd.Parent().Name() == "config" {
			return nil
		}
		return c.loadConfig(cmd)
	}
	root.SetVersionTemplate("troupe {{.Version}}\n")
	root.SetOut(c.out)
	root.SetErr(c.err)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usagef("%w (see %s --help)", err, cmd.CommandPath())
	})
	root.AddCommand(newUp(c), newRoles(c), newCall(c), newTimeline(c), newDestroy(c), newDemo(c), newBench(c), newVersion(c))
	root.AddCommand(newExplain(c), newReserve(c), newRelease(c), newReservations(c), newGPUs(c), newRules(c), newLedger(c), newCordon(c), newUncordon(c))
	root.AddCommand(newJoin(c), newAgent(c), newWait(c), newStatus(c), newDrain(c), newLogs(c), newStacks(c), newInterrupt(c), newDebug(c), newEvents(c), newLaunch(c))
	root.AddCommand(newRun(c), newPipeline(c), newNamespaces(c))
	root.AddCommand(newDoctor(c), newTop(c), newDescribe(c), newConfig(c), newBackup(c), newRestore(c))
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

// jsonFlag adds --json with a description.
func (c *cli) jsonFlag(cmd *cobra.Command, does string) {
	cmd.Flags().BoolVar(&c.json, "json", false, does)
}

func (c *cli) printJSON(v any) error {
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return err
	}
	data := text.Bytes()
	if !c.raw {
		data = terminal.JSON(data)
	}
	_, err := c.out.Write(data)
	c.noteUnread(err)
	return err
}

// table prints rows under a header, aligned. A cell is one line: its control characters are escaped.
func (c *cli) table(header string, rows [][]string) error {
	var text bytes.Buffer
	w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	lines := []string{strings.ReplaceAll(header, " ", "\t")}
	for _, r := range rows {
		cells := make([]string, len(r))
		for i, cell := range r {
			cells[i] = strings.ReplaceAll(cell, "\t", " ")
			if !c.raw {
				cells[i] = terminal.Line(cells[i])
			}
		}
		lines = append(lines, strings.Join(cells, "\t"))
	}
	if _, err := io.WriteString(w, strings.Join(lines, "\n")+"\n"); err != nil {
		return err
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for line := range strings.Lines(text.String()) { // tabwriter pads an empty last column
		c.printf("%s\n", strings.TrimRight(line, " \n"))
	}
	return nil
}
