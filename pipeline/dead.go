package pipeline

import (
	"encoding/json"
	"strconv"
	"time"

	"troupe/bus/wire"
)

// DeadLetter is an item that was given up, with what went wrong.
type DeadLetter struct {
	ID       string    `json:"id"`
	Stage    string    `json:"stage"`
	Stream   string    `json:"stream"` // where it was, and where it goes when it is tried again
	Reason   string    `json:"reason"` // failures, losses, rounds
	Attempts int       `json:"attempts"`
	Failures []Failure `json:"failures"`
	At       time.Time `json:"at"`
	Key      string    `json:"key,omitempty"`
	Group    string    `json:"group,omitempty"`
	Of       int       `json:"of,omitempty"`
	Priority int       `json:"priority,omitempty"`
	Version  Version   `json:"version"`
	Size     int       `json:"size"`
	Number   uint64    `json:"number,omitempty"` // of the item in its stream and priority
	Seq      uint64    `json:"seq"`              // its place in the log, and its name for show, retry and drop
	Body     wire.Raw  `json:"-"`

	ordinal uint64 // among the letters; 0: it was written by a version without
	subject string
	stash   *stash // where the body lies, if that is apart
}

// letterRecord is a dead letter in the log.
type letterRecord struct {
	DeadLetter
	At      place  `json:"body,omitempty"`
	Ordinal uint64 `json:"ordinal,omitempty"`
}

// encodeLetter keeps a letter with long stacks within what a header may be.
func encodeLetter(d *DeadLetter) (string, error) {
	r := letterRecord{DeadLetter: *d, Ordinal: d.ordinal}
	if d.stash != nil {
		r.At = d.stash.at
	}
	text, err := json.Marshal(r)
	if err != nil || len(text) <= headerRoom/2 {
		return string(text), err
	}
	r.Failures = nil
	for _, f := range d.Failures[max(0, len(d.Failures)-4):] {
		f.Stack, f.Error = clip(f.Stack, 600), clip(f.Error, 300)
		r.Failures = append(r.Failures, f)
	}
	text, err = json.Marshal(r)
	return string(text), err
}

func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return s[:n] + "…"
}

func letter(s *stage, e *entry, reason string, failures []Failure, now time.Time) *DeadLetter {
	return &DeadLetter{
		ID: e.ID, Stage: s.spec.Name, Stream: e.Stream, Reason: reason, Attempts: max(e.Attempt, len(failures)), Failures: failures,
		At: now.UTC(), Key: e.Key, Group: e.Group, Of: e.Of, Priority: e.Priority, Version: e.Version, Size: len(e.Body), Body: e.Body,
		Number: e.n,
	}
}

// item is the letter as an item again, with all its attempts before it.
func (d *DeadLetter) item() Item {
	return Item{ID: d.ID, Key: d.Key, Group: d.Group, Of: d.Of, Priority: d.Priority, Version: d.Version, Stamped: true, Body: d.Body}
}

func idOf(e *entry) string { return e.Stream + "-" + strconv.FormatUint(e.n, 10) }
