package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"troupe/cmd/troupe/cli"
)

// newMan is hidden: make man runs it.
func newMan(c command) *cobra.Command {
	return &cobra.Command{
		Use:    "man DIR",
		Short:  "Write a man page for every command",
		Long:   "Man writes troupe.1 and one page for each command into a folder, from the texts of --help.",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return err
			}
			n, err := writeManPages(cmd.Root(), args[0])
			if err == nil {
				c.Printf("%s in %s\n", cli.Counted(n, "page"), args[0])
			}
			return err
		},
	}
}

func writeManPages(cmd *cobra.Command, dir string) (n int, err error) {
	if cmd.Hidden || cmd.Name() == "help" {
		return 0, nil
	}
	for _, sub := range cmd.Commands() {
		more, err := writeManPages(sub, dir)
		if n += more; err != nil {
			return n, err
		}
	}
	return n + 1, os.WriteFile(filepath.Join(dir, manName(cmd)+".1"), []byte(manPage(cmd)), 0o644) //nolint:gosec // a public page
}

func manName(cmd *cobra.Command) string { return strings.ReplaceAll(cmd.CommandPath(), " ", "-") }

// manPage is the page of a command in roff.
func manPage(cmd *cobra.Command) string {
	var out strings.Builder
	fmt.Fprintf(&out, ".TH %q 1 %q %q\n", strings.ToUpper(manName(cmd)), manDate(), "troupe "+cli.Version)
	fmt.Fprintf(&out, ".SH NAME\n%s \\- %s\n", roff(manName(cmd)), roff(cmd.Short))
	fmt.Fprintf(&out, ".SH SYNOPSIS\n.B %s\n", roff(cmd.UseLine()))
	text := cmd.Long
	if text == "" {
		text = cmd.Short
	}
	out.WriteString(".SH DESCRIPTION\n")
	for _, paragraph := range strings.Split(text, "\n\n") {
		fmt.Fprintf(&out, ".PP\n%s\n", roff(paragraph))
	}
	manOptions(&out, "OPTIONS", cmd.NonInheritedFlags())
	manOptions(&out, "OPTIONS OF EVERY COMMAND", cmd.InheritedFlags())
	if cmd.Example != "" {
		fmt.Fprintf(&out, ".SH EXAMPLES\n.nf\n%s\n.fi\n", roff(cmd.Example))
	}
	var also []string
	if cmd.HasParent() {
		also = append(also, manName(cmd.Parent()))
	}
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() && sub.Name() != "help" {
			also = append(also, manName(sub))
		}
	}
	for i := range also {
		also[i] = "\\fB" + roff(also[i]) + "\\fR(1)"
	}
	if len(also) > 0 {
		fmt.Fprintf(&out, ".SH SEE ALSO\n%s\n", strings.Join(also, ", "))
	}
	return out.String()
}

func manOptions(out *strings.Builder, heading string, flags *pflag.FlagSet) {
	if !flags.HasAvailableFlags() {
		return
	}
	fmt.Fprintf(out, ".SH %s\n", heading)
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Hidden {
			return
		}
		name, usage := pflag.UnquoteUsage(f)
		words := "--" + f.Name
		if f.Shorthand != "" {
			words = "-" + f.Shorthand + ", " + words
		}
		if name != "" {
			words += " " + name
		}
		if f.DefValue != "" && f.DefValue != "false" && f.DefValue != "[]" && f.DefValue != "0" && !strings.Contains(usage, "default") {
			usage += " (default " + f.DefValue + ")"
		}
		fmt.Fprintf(out, ".TP\n\\fB%s\\fR\n%s\n", roff(words), roff(usage))
	})
}

// manDate is the date of the page: SOURCE_DATE_EPOCH makes builds repeatable.
func manDate() string {
	at := time.Now()
	var seconds int64
	if _, err := fmt.Sscan(os.Getenv("SOURCE_DATE_EPOCH"), &seconds); err == nil {
		at = time.Unix(seconds, 0)
	}
	return at.UTC().Format(time.DateOnly)
}

// roff escapes text: backslashes, hyphens, and dots and quotes at the beginning of a line, which would be commands.
func roff(text string) string {
	text = strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(text)
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		if strings.HasPrefix(line, ".") || strings.HasPrefix(line, "'") {
			lines[i] = `\&` + line
		}
	}
	return strings.Join(lines, "\n")
}
