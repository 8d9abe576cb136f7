package cli

import (
	"cmp"
	"log/slog"
	"strings"

	"github.com/spf13/cobra"
)

// LoggingFlags are the flags of commands that run for long.
type LoggingFlags struct {
	Level  string `json:"level,omitempty"`  // debug, info, warn or error; empty: warn
	Format string `json:"format,omitempty"` // text or json; empty: text
}

func (f *LoggingFlags) Add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.Level, "log-level", "", "least level of the log: debug, info, warn or error (default $TROUPE_LOG_LEVEL, or warn)")
	cmd.Flags().StringVar(&f.Format, "log-format", "", "format of the log: text, or json for one object a line (default $TROUPE_LOG_FORMAT, or text)")
}

// SetLogging sets how this command logs. Everything that it writes to standard error follows, its last error too.
func (c *CLI) SetLogging(f LoggingFlags) (LoggingFlags, error) {
	f.Level, f.Format = cmp.Or(f.Level, c.Env("TROUPE_LOG_LEVEL")), cmp.Or(f.Format, c.Env("TROUPE_LOG_FORMAT"))
	if f.Level != "" {
		var level slog.Level
		if !strings.Contains("debug info warn error", strings.ToLower(f.Level)) || level.UnmarshalText([]byte(f.Level)) != nil {
			return f, Usagef("--log-level %q: give debug, info, warn or error", f.Level)
		}
		c.logLevel = &level
	}
	switch f.Format {
	case "", "text":
		c.JSONLogs = false
	case "json":
		c.JSONLogs = true
	default:
		return f, Usagef("--log-format %q: give text or json", f.Format)
	}
	return f, nil
}

// Logger is a logger with a level that may change. --log-level takes precedence over it, except for a higher level.
func (c *CLI) Logger(level slog.Leveler) *slog.Logger {
	options := &slog.HandlerOptions{Level: level}
	if c.logLevel != nil {
		options.Level = chosenLevel{chosen: *c.logLevel, own: level, normal: level.Level()}
	}
	if c.JSONLogs {
		return slog.New(slog.NewJSONHandler(c.Err, options))
	}
	return slog.New(slog.NewTextHandler(c.Err, options))
}

// chosenLevel is the operator's level until the program raises its own above its normal one, as a head does while it closes.
type chosenLevel struct {
	chosen, normal slog.Level
	own            slog.Leveler
}

func (l chosenLevel) Level() slog.Level {
	if own := l.own.Level(); own > l.normal {
		return max(own, l.chosen)
	}
	return l.chosen
}
