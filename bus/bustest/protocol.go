package bustest

import (
	"bytes"
	"strconv"
)

// element is the first element of a NATS protocol stream: a line, or a message with its line. Its fields are views of
// the stream.
type element struct {
	size                            int // its length; 0: it is incomplete
	need                            int // of an incomplete element: its length if known, or 0
	message                         bool
	subject, reply, header, payload []byte
}

// scan never fails: it treats unknown input as a line, for the peer to refuse.
func scan(b []byte, toward Direction) element {
	end := bytes.IndexByte(b, '\n') + 1
	e := element{size: end}
	verb, args := "PUB ", 2 // the least number of arguments
	if toward == ToClient {
		verb, args = "MSG ", 3
	}
	line := b[:end]
	headed := bytes.HasPrefix(line, []byte("H"+verb))
	if !headed && !bytes.HasPrefix(line, []byte(verb)) {
		return e
	}
	words := bytes.Fields(line)[1:]
	head := 0
	if headed && len(words) > args {
		head, _ = strconv.Atoi(string(words[len(words)-2]))
		words = append(words[:len(words)-2], words[len(words)-1])
	}
	if len(words) != args && len(words) != args+1 {
		return e
	}
	total, err := strconv.Atoi(string(words[len(words)-1]))
	if err != nil || head < 0 || total < head {
		return e
	}
	e.size = end + total + 2
	if len(b) < e.size {
		return element{need: e.size}
	}
	e.message, e.subject, e.payload = true, words[0], b[end+head:end+total]
	if headed {
		e.header = b[end : end+head]
	}
	if len(words) == args+1 {
		e.reply = words[args-1]
	}
	return e
}
