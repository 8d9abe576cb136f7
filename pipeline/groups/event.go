package groups

import (
	"maps"
	"slices"
	"time"

	"troupe/pipeline/flow"
	"troupe/pipeline/spec"
)

// Kind is the kind of an event.
type Kind string

const (
	Put     Kind = "put"     // a group exists
	Granted Kind = "granted" // a sample was given to a worker; earlier attempts are fenced
	Turn    Kind = "turn"    // a turn is finished
	Field   Kind = "field"   // a field of a sample is set
	Closed  Kind = "closed"  // a group is complete without its unfinished siblings
	Loaned  Kind = "loaned"  // a complete group was given to a trainer; earlier loans are fenced
)

// Event is one stored step of a group. To apply it again changes nothing, so events of a commit that was stored in part, or
// twice, are harmless. The end of a group is in the Checkpoint, because events may be restored after their deletion.
type Event struct {
	Kind    Kind         `json:"k"`
	Group   uint64       `json:"g"`
	Index   int          `json:"i,omitempty"` // of the sample in its group
	Attempt int          `json:"a,omitempty"`
	Turn    int          `json:"t,omitempty"`
	Last    bool         `json:"last,omitempty"` // no turn follows
	Ticket  string       `json:"ticket,omitempty"`
	Version spec.Version `json:"v,omitempty"`  // of the weights that made the part
	At      int64        `json:"at,omitempty"` // milliseconds since 1970
	Body    Body         `json:"b,omitzero"`

	// Of a put.
	Name     string `json:"name,omitempty"` // of the group on the bus
	Siblings int    `json:"n,omitempty"`
	Turns    int    `json:"turns,omitempty"`
	Source   string `json:"source,omitempty"`
	Number   uint64 `json:"number,omitempty"`

	body *Body // in the state; gets its sequence when the event is stored
}

// Stored notes the sequence of an event in the log, where a small body lies.
func (e *Event) Stored(seq uint64) {
	if e.body != nil && len(e.Body.Large) == 0 {
		e.body.Seq, e.body.At = seq, e.Body.At
	}
}

// Body says where the parts of one write lie: the one stored copy. A small body lies in the message of its event, a large one in
// the stream of bodies.
type Body struct {
	Parts []Part         `json:"f,omitempty" msgpack:"parts"` // one after the other
	Seq   uint64         `json:"-" msgpack:"seq"`             // of the event in the log; 0: not stored yet
	At    int            `json:"at,omitempty" msgpack:"at"`   // where it begins in that message
	Large flow.SeqRanges `json:"l,omitempty" msgpack:"large"` // sequences of a large body
}

// Part is one named field in a body.
type Part struct {
	Name string `json:"n" msgpack:"name"`
	Size int    `json:"s" msgpack:"size"`
}

// Size is the length of the body.
func (b Body) Size() (n int) {
	for _, p := range b.Parts {
		n += p.Size
	}
	return n
}

// Checkpoint is what remains of groups that have ended, and what else outlives its events. It is written when it changes by more than what the events say.
type Checkpoint struct {
	Engine  string            `json:"engine"`
	By      string            `json:"by"`
	At      time.Time         `json:"at"`
	Last    uint64            `json:"last"` // group
	Ended   flow.OrdinalSet   `json:"ended"`
	Version spec.Version      `json:"version"`
	Sources map[string]Source `json:"sources,omitempty"`
	Batches []string          `json:"batches,omitempty"` // tickets of the latest batches that were trained
	Counts  Counts            `json:"counts"`
}

func (c Checkpoint) clone() Checkpoint {
	c.Ended, c.Batches = c.Ended.Clone(), slices.Clone(c.Batches)
	sources := make(map[string]Source, len(c.Sources))
	maps.Copy(sources, c.Sources)
	c.Sources = sources
	return c
}

// Source is the last put of one producer.
type Source struct {
	Number uint64 `json:"n"`
	At     int64  `json:"at"`
}

// Counts are of groups that have ended; of late answers, of all.
type Counts struct {
	Trained      uint64 `json:"trained"`
	Stale        uint64 `json:"stale"` // dropped groups
	Turns        uint64 `json:"turns"` // finished
	Late         uint64 `json:"late"`  // answers of fenced attempts that were dropped
	Redispatched uint64 `json:"redispatched"`
}

// add counts a group.
func (c *Counts) add(g *Group) {
	for _, m := range g.Samples {
		c.Turns += uint64(len(m.Turns))
		c.Redispatched += uint64(max(0, m.Attempt-1))
	}
}
