package timeline

import (
	"cmp"
	"slices"
	"time"

	"troupe/bus/recorder"
)

// Timeline is what some processes did, on the clock of the process that collected it.
type Timeline struct {
	Namespace string    `json:"namespace"`
	Taken     time.Time `json:"taken"`
	LastS     float64   `json:"last_s"` // how far back it goes
	Failure   string    `json:"failure,omitempty"`
	Lanes     []Lane    `json:"lanes"`
	Silent    []Silent  `json:"silent"` // workers that did not answer
	Omitted   int       `json:"omitted,omitempty"`
}

// Lane is one rank of a role, or one process that is no worker.
type Lane struct {
	Role    string  `json:"role,omitempty"` // empty: a process
	Rank    int     `json:"rank"`           // -1: a process
	Process Process `json:"process"`
	Events  []Event `json:"events"` // by begin, the longer one first
}

// Name is the lane's name for display.
func (l Lane) Name() string {
	if l.Role == "" {
		return l.Process.Program
	}
	return "rank " + itoa(l.Rank)
}

// Process is the process of a lane, and its clock.
type Process struct {
	ID      string `json:"id"`
	PID     int    `json:"pid"`
	Host    string `json:"host"`
	Program string `json:"program"`
	Off     bool   `json:"off,omitempty"` // it does not record
	// OffsetS is how far its wall clock is ahead of the collecting one, and UncertaintyS by how much events may be misplaced: half
	// the round trip of the fastest of several requests.
	OffsetS      float64 `json:"offset_s"`
	UncertaintyS float64 `json:"uncertainty_s"`
	RoundTrips   int     `json:"round_trips"`
	// From is the time from which on its ring is complete, in nanoseconds since 1970; 0: from the beginning.
	From    int64  `json:"from_ns,omitempty"`
	Dropped uint64 `json:"dropped,omitempty"`
	Omitted int    `json:"omitted,omitempty"` // records that did not fit into its answer
}

// Event is one interval on a lane. Times are nanoseconds since 1970 by the clock of the collecting process.
type Event struct {
	Kind   string `json:"kind"`
	Name   string `json:"name"`
	Begin  int64  `json:"begin_ns"`
	End    int64  `json:"end_ns"`
	Queued int64  `json:"queued_ns,omitempty"`
	Bytes  int64  `json:"bytes,omitempty"`
	Open   bool   `json:"open,omitempty"` // it had not ended when the timeline was taken
	Failed bool   `json:"failed,omitempty"`
	To     string `json:"to,omitempty"`
	ToRank int    `json:"to_rank"`          // -1: several, or none
	Call   string `json:"call,omitempty"`   // SESSION/SEQUENCE
	Parent string `json:"parent,omitempty"` // the call in whose method it happened
}

// Silent is a worker without an answer.
type Silent struct {
	Role  string `json:"role"`
	Rank  int    `json:"rank"`
	Error string `json:"error"`
}

func idText(id recorder.ID) string {
	if id.Session == "" {
		return ""
	}
	return id.Session + "/" + utoa(id.Seq)
}

// sorted puts lanes and events in order.
func (t *Timeline) sort() {
	slices.SortFunc(t.Lanes, func(a, b Lane) int {
		return cmp.Or(cmp.Compare(a.Role, b.Role), cmp.Compare(a.Rank, b.Rank), cmp.Compare(a.Process.ID, b.Process.ID))
	})
	for i := range t.Lanes {
		slices.SortStableFunc(t.Lanes[i].Events, func(a, b Event) int {
			return cmp.Or(cmp.Compare(a.Begin, b.Begin), cmp.Compare(b.End, a.End), cmp.Compare(a.Kind, b.Kind))
		})
	}
	slices.SortFunc(t.Silent, func(a, b Silent) int { return cmp.Or(cmp.Compare(a.Role, b.Role), cmp.Compare(a.Rank, b.Rank)) })
}

// Events counts the events of all lanes.
func (t *Timeline) Events() int {
	n := 0
	for _, l := range t.Lanes {
		n += len(l.Events)
	}
	return n
}

// Bounds are the first begin and the last end of all events; both zero without events.
func (t *Timeline) Bounds() (from, to int64) {
	for _, l := range t.Lanes {
		for _, e := range l.Events {
			if from == 0 || e.Begin < from {
				from = e.Begin
			}
			to = max(to, e.End)
		}
	}
	return from, to
}

// Trim keeps at most n events, the newest ones, and counts the others as omitted.
func (t *Timeline) Trim(n int) {
	if t.Events() <= n {
		return
	}
	var ends []int64
	for _, l := range t.Lanes {
		for _, e := range l.Events {
			ends = append(ends, e.End)
		}
	}
	slices.Sort(ends)
	oldest := ends[len(ends)-n]
	for i := range t.Lanes {
		l := &t.Lanes[i]
		before := len(l.Events)
		l.Events = slices.DeleteFunc(l.Events, func(e Event) bool { return e.End < oldest })
		t.Omitted += before - len(l.Events)
	}
}
