package cli

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"troupe/bus"
)

// WatchFlags makes a command repeat its output.
type WatchFlags struct {
	On    bool
	Every time.Duration
}

func (w *WatchFlags) Add(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&w.On, "watch", false, "refresh the output until Ctrl-C, cut to the size of the terminal")
	cmd.Flags().DurationVar(&w.Every, "every", 2*time.Second, "time between two refreshes")
}

func (w WatchFlags) Check() error {
	if w.Every < 100*time.Millisecond {
		return Usagef("--every %v: give 100ms or more", w.Every)
	}
	return nil
}

// Repeat calls show once, or with --watch until ctx ends, over one connection. The first error of --watch ends it; later ones are
// shown, because the head may come back.
func (c *CLI) Repeat(ctx context.Context, w WatchFlags, show func(context.Context) error) error {
	if err := w.Check(); err != nil {
		return err
	}
	if !w.On {
		return show(ctx)
	}
	defer c.keepConnection()()
	for drawn := false; ; drawn = true {
		text, err := c.frame(ctx, show)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && !drawn:
			return err
		case err != nil:
			text = c.safe(fmt.Sprintf("%s: %v\n", time.Now().Format(time.TimeOnly), err))
		}
		c.write(c.live(text, drawn))
		if bus.Sleep(ctx, w.Every) != nil {
			return nil
		}
	}
}

// frame is the output of show.
func (c *CLI) frame(ctx context.Context, show func(context.Context) error) (string, error) {
	var text bytes.Buffer
	out := c.Out
	c.Out = &text
	defer func() { c.Out = out }()
	err := show(ctx)
	return text.String(), err
}

// keepConnection lets all further calls of open share one connection, until the returned function closes it.
func (c *CLI) keepConnection() (end func()) {
	c.kept = &keptConnection{}
	return func() {
		if c.kept.b != nil {
			_ = c.kept.b.Close() // fails only if the server is gone
		}
		c.kept = nil
	}
}

// keptConnection is a connection that several frames of a live view share.
type keptConnection struct {
	b *bus.Bus
	s Server
}

// live is one frame of a live view: drawn over the last one on a terminal, below it in a file or pipe.
func (c *CLI) live(text string, drawn bool) string {
	columns, lines := c.terminalSize()
	switch {
	case c.JSON:
		return text
	case columns > 0 || lines > 0:
		return redraw(cut(text, columns, lines))
	case drawn:
		return "\n" + text
	}
	return text
}

// redraw overwrites the terminal line by line, without flicker.
func redraw(text string) string {
	const home, clearLine, clearBelow = "\x1b[H", "\x1b[K\n", "\x1b[J"
	return home + strings.ReplaceAll(text, "\n", clearLine) + clearBelow
}

// terminalSize is the size of the terminal of the output, or that of COLUMNS and LINES; zero: unknown.
func (c *CLI) terminalSize() (columns, lines int) {
	if f, ok := c.Out.(*os.File); ok {
		if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil { //nolint:gosec // a descriptor
			columns, lines = int(size.Col), int(size.Row)
		}
	}
	wide, _ := strconv.Atoi(c.Env("COLUMNS")) // zero, unless it is a number
	high, _ := strconv.Atoi(c.Env("LINES"))
	return cmp.Or(columns, wide), cmp.Or(lines, high)
}

// cut shortens lines to a number of columns, as longer ones would wrap, and text to a number of lines, as more would scroll; zero is no limit.
func cut(text string, columns, lines int) string {
	all := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	if lines > 2 && len(all) >= lines {
		more := len(all) - (lines - 2)
		all = append(all[:lines-2:lines-2], fmt.Sprintf("… %d more lines", more))
	}
	for i, line := range all {
		if columns > 1 && utf8.RuneCountInString(line) > columns {
			all[i] = string([]rune(line)[:columns-1]) + "…"
		}
	}
	return strings.Join(all, "\n") + "\n"
}
