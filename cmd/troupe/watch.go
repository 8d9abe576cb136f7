package main

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

// watchFlags makes a command repeat its output.
type watchFlags struct {
	on    bool
	every time.Duration
}

func (w *watchFlags) add(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&w.on, "watch", false, "refresh the output until Ctrl-C, cut to the size of the terminal")
	cmd.Flags().DurationVar(&w.every, "every", 2*time.Second, "time between two refreshes")
}

func (w watchFlags) check() error {
	if w.every < 100*time.Millisecond {
		return usagef("--every %v: give 100ms or more", w.every)
	}
	return nil
}

// repeat calls show once, or with --watch until ctx ends, over one connection. The first error of --watch ends it; later ones are
// shown, because the head may come back.
func (c *cli) repeat(ctx context.Context, w watchFlags, show func(context.Context) error) error {
	if err := w.check(); err != nil {
		return err
	}
	if !w.on {
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
		if c.json {
			c.write(text)
		} else {
			c.write(redraw(c.fit(text)))
		}
		if bus.Sleep(ctx, w.every) != nil {
			return nil
		}
	}
}

// frame is the output of show.
func (c *cli) frame(ctx context.Context, show func(context.Context) error) (string, error) {
	var text bytes.Buffer
	out := c.out
	c.out = &text
	defer func() { c.out = out }()
	err := show(ctx)
	return text.String(), err
}

// keepConnection lets all further calls of open share one connection, until the returned function closes it.
func (c *cli) keepConnection() (end func()) {
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
	s server
}

// redraw overwrites the terminal line by line, without flicker.
func redraw(text string) string {
	const home, clearLine, clearBelow = "\x1b[H", "\x1b[K\n", "\x1b[J"
	return home + strings.ReplaceAll(text, "\n", clearLine) + clearBelow
}

// fit cuts text to the size of the terminal, if there is one: longer lines would wrap, and more lines would scroll.
func (c *cli) fit(text string) string {
	columns, lines := c.terminalSize()
	return cut(text, columns, lines)
}

// terminalSize is the size of the terminal of the output, or that of COLUMNS and LINES; zero: unknown.
func (c *cli) terminalSize() (columns, lines int) {
	if f, ok := c.out.(*os.File); ok {
		if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil { //nolint:gosec // a descriptor
			columns, lines = int(size.Col), int(size.Row)
		}
	}
	wide, _ := strconv.Atoi(c.env("COLUMNS")) // zero, unless it is a number
	high, _ := strconv.Atoi(c.env("LINES"))
	return cmp.Or(columns, wide), cmp.Or(lines, high)
}

// cut shortens lines to a number of columns and text to a number of lines; zero is no limit.
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
