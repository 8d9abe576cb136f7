package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"syscall"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"troupe/internal/terminal"
)

// Printf writes to standard output. Control characters are escaped, except with --raw.
func (c *CLI) Printf(format string, args ...any) { c.write(c.safe(fmt.Sprintf(format, args...))) }

// Warnf writes to standard error, or to the log with --log-format json.
func (c *CLI) Warnf(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if c.JSONLogs {
		c.Logger(slog.LevelWarn).Warn(strings.TrimPrefix(strings.TrimSuffix(text, "\n"), "troupe: "))
		return
	}
	_, _ = io.WriteString(c.Err, c.safe(text))
}

func (c *CLI) safe(text string) string {
	if c.Raw {
		return text
	}
	return terminal.Text(text)
}

// write writes text of the program itself, which may control the terminal, to standard output.
func (c *CLI) write(text string) {
	_, err := io.WriteString(c.Out, text)
	c.noteUnread(err)
}

// noteUnread ends the command when its output is closed, as in "troupe logs -f | head".
func (c *CLI) noteUnread(err error) {
	if c.Unread != nil && errors.Is(err, syscall.EPIPE) {
		c.Unread()
	}
}

// JSONFlag adds --json with a description.
func (c *CLI) JSONFlag(cmd *cobra.Command, does string) {
	cmd.Flags().BoolVar(&c.JSON, "json", false, does)
}

// PrintJSON prints a value as one line of JSON.
func (c *CLI) PrintJSON(v any) error {
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return err
	}
	data := text.Bytes()
	if !c.Raw {
		data = terminal.JSON(data)
	}
	_, err := c.Out.Write(data)
	c.noteUnread(err)
	return err
}

// Table prints rows under a header, aligned. A cell is one line: its control characters are escaped.
func (c *CLI) Table(header string, rows [][]string) error {
	var text bytes.Buffer
	w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	lines := []string{strings.ReplaceAll(header, " ", "\t")}
	for _, r := range rows {
		cells := make([]string, len(r))
		for i, cell := range r {
			cells[i] = strings.ReplaceAll(cell, "\t", " ")
			if !c.Raw {
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
		c.Printf("%s\n", strings.TrimRight(line, " \n"))
	}
	return nil
}

// TableOr prints a table, or the text none if it has no rows.
func (c *CLI) TableOr(none, header string, rows [][]string) error {
	if len(rows) == 0 {
		c.Printf("%s\n", none)
		return nil
	}
	return c.Table(header, rows)
}
