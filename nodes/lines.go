package nodes

import "time"

const (
	lastLines = 50       // lines that an Exit carries
	lastBytes = 64 << 10 // and their bytes
)

// OutputStream is where a line was printed.
type OutputStream string

const (
	Stdout OutputStream = "stdout"
	Stderr OutputStream = "stderr"
)

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
