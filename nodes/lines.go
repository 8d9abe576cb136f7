package nodes

import (
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

const (
	lineMost  = 16 << 10 // bytes of a line; the rest is counted and dropped
	lastLines = 50       // lines that an Exit carries
	lastBytes = 64 << 10 // and their bytes
)

// OutputStream is where a line was printed.
type OutputStream string

const (
	Stdout OutputStream = "stdout"
	Stderr OutputStream = "stderr"
)

// splitter splits bytes into lines, which end with
//
//	or with \r as progress bars write it. A line that is too long is cut and says so.
type splitter struct {
	line    []byte
	cut     int  // bytes dropped from this line
	carried bool // the last byte was a \r, so that a \n after it ends no line
}

// write adds bytes and calls emit with each complete line.
func (s *splitter) write(p []byte, emit func(string)) {
	for _, b := range p {
		switch {
		case b == '\n' && s.carried:
		case b == '\n' || b == '\r':
			emit(s.take())
		case len(s.line) < lineMost:
			s.line = append(s.line, b)
		default:
			s.cut++
		}
		s.carried = b == '\r'
	}
}

// flush emits an incomplete line.
func (s *splitter) flush(emit func(string)) {
	if len(s.line) > 0 {
		emit(s.take())
	}
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

// tail is the last lines of a worker, in bounded memory.
type tail struct {
	lines []string
	bytes int
}

func (t *tail) add(line string) {
	t.lines = append(t.lines, line)
	t.bytes += len(line)
	for len(t.lines) > lastLines || t.bytes > lastBytes && len(t.lines) > 1 {
		t.bytes -= len(t.lines[0])
		t.lines = t.lines[1:]
	}
}

// Line is one line of a worker's output.
type Line struct {
	ID     WorkerID     `json:"id" msgpack:"id"`
	Name   string       `json:"name" msgpack:"name"`
	Node   string       `json:"node" msgpack:"node"`
	Stream OutputStream `json:"stream" msgpack:"stream"`
	At     time.Time    `json:"at" msgpack:"at"`
	Seq    uint64       `json:"seq" msgpack:"seq"` // counts the worker's lines
	Text   string       `json:"text" msgpack:"text"`
}
