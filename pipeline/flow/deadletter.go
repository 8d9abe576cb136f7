package flow

import (
	"encoding/json"
	"strconv"
	"time"

	"troupe/bus/wire"
	"troupe/pipeline/spec"
)

// DeadLetter is an item that was given up, with its failures.
type DeadLetter struct {
	ID       string       `json:"id"`
	Stage    string       `json:"stage"`
	Stream   string       `json:"stream"` // where it was, and where a retry puts it
	Reason   string       `json:"reason"` // failures, losses, rounds
	Attempts int          `json:"attempts"`
	Failures []Failure    `json:"failures"`
	At       time.Time    `json:"at"`
	Key      string       `json:"key,omitempty"`
	Group    string       `json:"group,omitempty"`
	Of       int          `json:"of,omitempty"`
	Priority int          `json:"priority,omitempty"`
	Version  spec.Version `json:"version"`
	Size     int          `json:"size"`
	Number   uint64       `json:"number,omitempty"` // ordinal of the item in its stream and priority
	Seq      uint64       `json:"seq"`              // sequence in the log; identifies the dead letter for show, retry and drop
	Body     wire.Raw     `json:"-"`

	Ordinal uint64       `json:"-"` // among the dead letters; 0: written by a version without ordinals
	Subject string       `json:"-"`
	BodyRef *PendingBody `json:"-"` // location of a large body; nil: the body is in the message
}

// storedLetter is a dead letter as stored in the log.
type storedLetter struct {
	DeadLetter
	Body    SeqRanges `json:"body,omitempty"`
	Ordinal uint64    `json:"ordinal,omitempty"`
}

// Encode is the JSON of a dead letter; if that exceeds limit, older failures and long texts are cut.
func (d *DeadLetter) Encode(limit int) (string, error) {
	r := storedLetter{DeadLetter: *d, Ordinal: d.Ordinal}
	if d.BodyRef != nil {
		r.Body = d.BodyRef.Seqs
	}
	text, err := json.Marshal(r)
	if err != nil || len(text) <= limit {
		return string(text), err
	}
	r.Failures = nil
	for _, f := range d.Failures[max(0, len(d.Failures)-4):] {
		f.Stack, f.Error = truncate(f.Stack, 600), truncate(f.Error, 300)
		r.Failures = append(r.Failures, f)
	}
	text, err = json.Marshal(r)
	return string(text), err
}

// DecodeLetter is the reverse of Encode.
func DecodeLetter(text string) (DeadLetter, error) {
	var r storedLetter
	err := json.Unmarshal([]byte(text), &r)
	d := r.DeadLetter
	d.Ordinal = r.Ordinal
	if len(r.Body) > 0 {
		d.BodyRef = &PendingBody{Seqs: r.Body}
	}
	return d, err
}

// Cause is the text of the last failure, cut to limit bytes.
func (d *DeadLetter) Cause(limit int) string {
	if n := len(d.Failures); n > 0 {
		return truncate(d.Failures[n-1].Error, limit)
	}
	return ""
}

func truncate(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return s[:n] + "…"
}

func newDeadLetter(s *StageState, e *Entry, reason string, failures []Failure, now time.Time) *DeadLetter {
	return &DeadLetter{
		ID: e.ID, Stage: s.Spec.Name, Stream: e.Stream, Reason: reason, Attempts: max(e.Attempt, len(failures)), Failures: failures,
		At: now.UTC(), Key: e.Key, Group: e.Group, Of: e.Of, Priority: e.Priority, Version: e.Version, Size: len(e.Body), Body: e.Body,
		Number: e.Ordinal,
	}
}

// item is the item to put back for a retry.
func (d *DeadLetter) item() spec.Item {
	return spec.Item{ID: d.ID, Key: d.Key, Group: d.Group, Of: d.Of, Priority: d.Priority, Version: d.Version, Stamped: true, Body: d.Body}
}

func defaultID(e *Entry) string { return e.Stream + "-" + strconv.FormatUint(e.Ordinal, 10) }
