package capture

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

const lineMost = 16 << 10 // bytes of a line; the rest is counted and dropped

// splitter splits bytes into lines, which end with \n, or with \r as progress bars write it. A line that is too long is cut and
// says so.
type splitter struct {
	line    []byte // of a line whose end has not come
	cut     int    // bytes dropped from this line
	carried bool   // the last byte was a \r, so that a \n after it ends no line
}

// split adds bytes and returns the lines that they complete.
func (s *splitter) split(p []byte) (lines []string) {
	for text := string(p); text != ""; {
		if s.carried && text[0] == '\n' {
			s.carried, text = false, text[1:]
			continue
		}
		end := strings.IndexAny(text, "\r\n")
		if end < 0 {
			s.carried = false
			s.keep(text)
			break
		}
		s.carried = text[end] == '\r'
		lines = append(lines, s.complete(text[:end]))
		text = text[end+1:]
	}
	return lines
}

// keep adds to the line whose end has not come.
func (s *splitter) keep(text string) {
	kept := min(len(text), lineMost-len(s.line))
	s.line = append(s.line, text[:kept]...)
	s.cut += len(text) - kept
}

// complete is the line that ends with this text.
func (s *splitter) complete(text string) string {
	if len(s.line) == 0 && len(text) <= lineMost {
		return strings.ToValidUTF8(text, "\uFFFD")
	}
	s.keep(text)
	return s.take()
}

// rest is an incomplete line, if there is one.
func (s *splitter) rest() []string {
	if len(s.line) == 0 {
		return nil
	}
	return []string{s.take()}
}

func (s *splitter) take() string {
	text := string(s.line)
	if s.cut > 0 {
		for len(text) > 0 && !utf8.ValidString(text[max(0, len(text)-utf8.UTFMax):]) && len(s.line)-len(text) < utf8.UTFMax {
			text = text[:len(text)-1] // a truncated rune
		}
		text += fmt.Sprintf(" … [cut: %d bytes more]", s.cut+len(s.line)-len(text))
	}
	s.line, s.cut = s.line[:0], 0
	return strings.ToValidUTF8(text, "\uFFFD") // messages carry valid text only
}
