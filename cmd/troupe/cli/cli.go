// Package cli is what the commands of troupe share: output, flags and variables, the configuration file, errors with exit codes, and the
// way to the head. Each family of commands is a package that embeds a CLI, and main puts them together.
package cli

import (
	"io"
	"log/slog"

	"github.com/spf13/cobra"
)

// Version is the version of the program; main sets it.
var Version = "dev"

// CLI is shared by all commands: output, environment and the flags of the server.
type CLI struct {
	Out io.Writer
	Err io.Writer
	Env func(string) string

	NewRoot func(*CLI) *cobra.Command // makes the whole command line, to check the configuration file; main sets it
	Unread  func()                    // called when Out is closed; nil for commands that run on then

	URL       string
	Namespace string
	OwnHead   bool   // the command starts a head of its own rather than use a driver's private one
	run       string // id of the run of a private head; empty: not given
	JSON      bool
	Config    string          // file; empty: the default ones
	kept      *keptConnection // of a live view
	logLevel  *slog.Level     // nil: that of the command
	JSONLogs  bool
	Raw       bool // control characters are passed on unchanged
}
