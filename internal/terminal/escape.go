// Package terminal makes text of workers, names and errors safe to print: a terminal obeys control characters, which can
// write to the clipboard (OSC 52), change the title, clear the screen, or show other text than was printed.
package terminal

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// Line returns text with every control character replaced by its escape sequence in Go syntax, as in \x1b or \n. Tabs, other
// printable characters and backslashes are unchanged.
func Line(text string) string { return escape(text, false) }

// Text is Line for text of several lines: newlines are unchanged too.
func Text(text string) string { return escape(text, true) }

// JSON escapes the control characters that encoding/json leaves in its output: DEL, C1 and the characters that change the
// direction of text. The result is the same JSON value.
func JSON(data []byte) []byte {
	if !strings.ContainsFunc(string(data), obeyed) {
		return data
	}
	var out strings.Builder
	for _, r := range string(data) {
		if r >= 0x7f && obeyed(r) {
			fmt.Fprintf(&out, `\u%04x`, r)
		} else {
			out.WriteRune(r)
		}
	}
	return []byte(out.String())
}

func escape(text string, newlines bool) string {
	var out strings.Builder
	from := 0 // text up to here is in out
	for i := 0; i < len(text); {
		r, size := utf8.DecodeRuneInString(text[i:])
		end := i + size
		switch {
		case r == utf8.RuneError && size == 1:
			out.WriteString(text[from:i])
			fmt.Fprintf(&out, `\x%02x`, text[i])
			from = end
		case r == '\t', r == '\n' && newlines, !obeyed(r):
		default:
			out.WriteString(text[from:i])
			out.WriteString(sequence(r))
			from = end
		}
		i = end
	}
	if from == 0 {
		return text
	}
	out.WriteString(text[from:])
	return out.String()
}

// obeyed reports whether terminals act on a character: C0, DEL, C1, separators of lines, and characters that change the direction
// of text.
func obeyed(r rune) bool {
	switch {
	case r < 0x20, r >= 0x7f && r <= 0x9f, r >= 0x200e && r <= 0x200f, r >= 0x2028 && r <= 0x202e, r >= 0x2066 && r <= 0x2069, r == 0x061c:
		return true
	}
	return false
}

func sequence(r rune) string {
	switch {
	case r == '\n':
		return `\n`
	case r == '\r':
		return `\r`
	case r < 0x80:
		return fmt.Sprintf(`\x%02x`, r)
	}
	return fmt.Sprintf(`\u%04x`, r)
}
