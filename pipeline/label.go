package pipeline

import (
	"encoding/json"
	"strconv"
	"strings"
	"time"

	"troupe/pipeline/flow"
	"troupe/pipeline/spec"
)

// itemLabel is an item without its body, in a header of its message.
type itemLabel struct {
	N       uint64         `json:"n"`
	Body    flow.SeqRanges `json:"body,omitempty"` // sequences of a large body
	Size    int            `json:"size,omitempty"` // and its length
	ID      string         `json:"id,omitempty"`
	Key     string         `json:"key,omitempty"`
	Group   string         `json:"group,omitempty"`
	Of      int            `json:"of,omitempty"`
	Version spec.Version   `json:"v"`
	Rounds  int            `json:"rounds,omitempty"`
	Stored  int64          `json:"at"` // milliseconds since 1970
}

// appendLabel encodes an itemLabel.
func appendLabel(dst []byte, n uint64, apart *flow.PendingBody, it *spec.Item) []byte {
	dst = strconv.AppendUint(append(dst, `{"n":`...), n, 10)
	if apart != nil {
		dst = strconv.AppendInt(append(dst, `,"size":`...), int64(len(it.Body)), 10)
		dst = append(appendRanges(append(dst, `,"body":[`...), apart.Seqs), ']')
	}
	text := func(name, value string) {
		if value != "" {
			dst = appendJSONString(append(append(append(dst, `,"`...), name...), `":`...), value)
		}
	}
	number := func(name string, value int) {
		if value != 0 {
			dst = strconv.AppendInt(append(append(append(dst, `,"`...), name...), `":`...), int64(value), 10)
		}
	}
	text("id", it.ID)
	text("key", it.Key)
	text("group", it.Group)
	number("of", it.Of)
	number("rounds", it.Rounds)
	dst = strconv.AppendFloat(append(dst, `,"v":`...), it.Version.Float(), 'f', -1, 64)
	dst = strconv.AppendInt(append(dst, `,"at":`...), it.Stored.UnixMilli(), 10)
	return append(dst, '}')
}

func appendRanges(dst []byte, at flow.SeqRanges) []byte {
	for i, r := range at {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendUint(append(dst, '['), r[0], 10)
		dst = strconv.AppendUint(append(dst, ','), r[1], 10)
		dst = append(dst, ']')
	}
	return dst
}

// appendText quotes s. What is not plain goes the long way, which also keeps line ends out of the header.
func appendJSONString(dst []byte, s string) []byte {
	if strings.IndexFunc(s, func(r rune) bool { return r < ' ' || r > '~' || r == '"' || r == '\\' }) < 0 {
		return append(append(append(dst, '"'), s...), '"')
	}
	quoted, _ := json.Marshal(s) // a string always can be
	return append(dst, quoted...)
}

func parseLabel(text string) (itemLabel, error) {
	var l itemLabel
	err := json.Unmarshal([]byte(text), &l)
	return l, err
}

func (l itemLabel) item(stream string, priority int, body []byte) spec.Item {
	return spec.Item{
		ID: l.ID, Key: l.Key, Group: l.Group, Of: l.Of, Priority: priority, Version: l.Version, Stamped: true, Body: body,
		Stream: stream, Stored: time.UnixMilli(l.Stored), Rounds: l.Rounds,
	}
}
