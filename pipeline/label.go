package pipeline

import (
	"encoding/json"
	"time"

	"troupe/pipeline/flow"
	"troupe/pipeline/spec"
)

// itemLabel is an item without its body, in a header of its message.
type itemLabel struct {
	N       uint64         `json:"n"`
	Size    int            `json:"size,omitempty"` // length of a large body
	Body    flow.SeqRanges `json:"body,omitempty"` // and its sequences
	ID      string         `json:"id,omitempty"`
	Key     string         `json:"key,omitempty"`
	Group   string         `json:"group,omitempty"`
	Of      int            `json:"of,omitempty"`
	Rounds  int            `json:"rounds,omitempty"`
	Version spec.Version   `json:"v"`
	Stored  int64          `json:"at"` // milliseconds since 1970
}

func labelOf(e *flow.Entry) (string, error) {
	l := itemLabel{N: e.Ordinal, ID: e.ID, Key: e.Key, Group: e.Group, Of: e.Of, Rounds: e.Rounds, Version: e.Version, Stored: e.Stored.UnixMilli()}
	if e.BodyRef != nil {
		l.Size, l.Body = len(e.Body), e.BodyRef.Seqs
	}
	text, err := json.Marshal(l)
	return string(text), err
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
