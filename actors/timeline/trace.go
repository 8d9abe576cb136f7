package timeline

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"time"
)

// traceEvent is one event of the Chrome trace event format.
type traceEvent struct {
	Phase string         `json:"ph"`
	Name  string         `json:"name"`
	Cat   string         `json:"cat,omitempty"`
	PID   int            `json:"pid"`
	TID   int            `json:"tid"`
	TS    float64        `json:"ts"` // microseconds since the first event
	Dur   *float64       `json:"dur,omitempty"`
	ID    int            `json:"id,omitempty"`
	Bind  string         `json:"bp,omitempty"`
	Args  map[string]any `json:"args,omitempty"`
}

const sublanes = 1 << 10 // thread ids of one lane: events that overlap without being nested are on threads of their own

// WriteTrace writes the timeline in the Chrome trace event format, which Perfetto and chrome://tracing read: a process for each
// role and for each other process, a thread for each rank, and arrows from calls to their runs.
func (t *Timeline) WriteTrace(w io.Writer) error {
	tr := &trace{from: 0, calls: map[string]traceEvent{}, parts: map[partID]traceEvent{}, runs: map[*Event]traceEvent{}}
	tr.from, _ = t.Bounds()
	tr.place(t)
	slices.SortStableFunc(tr.events, func(a, b traceEvent) int {
		return cmp.Or(cmp.Compare(a.TS, b.TS), cmp.Compare(durOf(b), durOf(a)))
	})
	out := bufio.NewWriter(w)
	head, err := json.Marshal(t.metadata(tr.from))
	if err != nil {
		return err
	}
	_, _ = fmt.Fprintf(out, "{\"displayTimeUnit\":\"ms\",\"otherData\":%s,\"traceEvents\":[", head)
	for i, e := range append(tr.names, tr.events...) {
		line, err := json.Marshal(e)
		if err != nil {
			return err
		}
		if i > 0 {
			_, _ = out.WriteString(",")
		}
		_, _ = out.WriteString("\n")
		_, _ = out.Write(line)
	}
	_, _ = out.WriteString("\n]}\n")
	return out.Flush() // has the error of every write before
}

func durOf(e traceEvent) float64 {
	if e.Dur == nil {
		return 0
	}
	return *e.Dur
}

// metadata says where the times come from.
func (t *Timeline) metadata(from int64) map[string]any {
	type clockLine struct {
		Lane         string  `json:"lane"`
		Process      string  `json:"process"`
		OffsetS      float64 `json:"offset_s"`
		UncertaintyS float64 `json:"uncertainty_s"`
		RoundTrips   int     `json:"round_trips"`
		CompleteFrom string  `json:"complete_from,omitempty"`
		Omitted      int     `json:"omitted,omitempty"`
		Dropped      uint64  `json:"dropped,omitempty"`
		Off          bool    `json:"off,omitempty"`
	}
	clocks := []clockLine{}
	for _, l := range t.Lanes {
		c := clockLine{
			Lane: l.title(), Process: l.Process.ID, OffsetS: l.Process.OffsetS, UncertaintyS: l.Process.UncertaintyS, RoundTrips: l.Process.RoundTrips,
			Omitted: l.Process.Omitted, Dropped: l.Process.Dropped, Off: l.Process.Off,
		}
		if l.Process.From > 0 {
			c.CompleteFrom = time.Unix(0, l.Process.From).UTC().Format(time.RFC3339Nano)
		}
		clocks = append(clocks, c)
	}
	out := map[string]any{
		"namespace": t.Namespace, "taken": t.Taken.Format(time.RFC3339Nano), "start": time.Unix(0, from).UTC().Format(time.RFC3339Nano),
		"last_s": t.LastS, "clocks": clocks, "silent": t.Silent, "late": t.Late(), "omitted": t.Omitted,
		"clock_note": "times are on the clock of the process that collected them; offset_s is how far a process's wall clock is ahead of it, events of a lane may be misplaced by uncertainty_s",
	}
	if t.Failure != "" {
		out["failure"] = t.Failure
	}
	return out
}

func (l Lane) title() string {
	if l.Role == "" {
		return fmt.Sprintf("%s (pid %d on %s)", l.Process.Program, l.Process.PID, l.Process.Host)
	}
	return fmt.Sprintf("%s rank %d (pid %d on %s)", l.Role, l.Rank, l.Process.PID, l.Process.Host)
}

// partID is a part of a call.
type partID struct {
	call string
	to   string
	rank int
}

type trace struct {
	from   int64
	names  []traceEvent
	events []traceEvent
	calls  map[string]traceEvent
	parts  map[partID]traceEvent
	runs   map[*Event]traceEvent
	arrows int
}

// place makes the slices of all lanes, and then the arrows between them.
func (tr *trace) place(t *Timeline) {
	pids := map[string]int{}
	for i := range t.Lanes {
		l := &t.Lanes[i]
		group, tid := "role "+l.Role, l.Rank
		if l.Role == "" {
			group, tid = l.title(), 0
		}
		pid := pids[group]
		if pid == 0 {
			pid = len(pids) + 1
			pids[group] = pid
			tr.names = append(tr.names, named("process_name", pid, 0, group), sortKey("process_sort_index", pid, 0, pid))
		}
		tr.lane(l, pid, tid)
	}
	for i := range t.Lanes {
		tr.arrowsTo(&t.Lanes[i])
	}
}

func named(what string, pid, tid int, name string) traceEvent {
	return traceEvent{Phase: "M", Name: what, PID: pid, TID: tid, Args: map[string]any{"name": name}}
}

func sortKey(what string, pid, tid, key int) traceEvent {
	return traceEvent{Phase: "M", Name: what, PID: pid, TID: tid, Args: map[string]any{"sort_index": key}}
}

// lane makes the slices of a lane. Slices of one thread must be nested, so an event goes to the first thread where it is.
func (tr *trace) lane(l *Lane, pid, rank int) {
	var ends [][]int64 // of the slices that enclose the present one, by thread
	for i := range l.Events {
		e := &l.Events[i]
		sub := 0
		for ; sub < len(ends); sub++ {
			stack := ends[sub]
			for len(stack) > 0 && stack[len(stack)-1] <= e.Begin {
				stack = stack[:len(stack)-1]
			}
			ends[sub] = stack
			if len(stack) == 0 || stack[len(stack)-1] >= e.End || sub == sublanes-1 {
				break
			}
		}
		if sub == len(ends) {
			ends = append(ends, nil)
			tr.thread(l, pid, rank, sub)
		}
		ends[sub] = append(ends[sub], e.End)
		tr.slice(e, pid, rank*sublanes+sub)
	}
	if len(ends) == 0 {
		tr.thread(l, pid, rank, 0)
	}
}

func (tr *trace) thread(l *Lane, pid, rank, sub int) {
	name := l.Name()
	if l.Role != "" {
		name = fmt.Sprintf("%s (%s, pid %d)", name, l.Process.Host, l.Process.PID)
	}
	if sub > 0 {
		name = fmt.Sprintf("%s #%d", name, sub+1)
	}
	tid := rank*sublanes + sub
	tr.names = append(tr.names, named("thread_name", pid, tid, name), sortKey("thread_sort_index", pid, tid, tid))
}

func (tr *trace) micros(at int64) float64 { return float64(at-tr.from) / 1000 }

func (tr *trace) slice(e *Event, pid, tid int) {
	dur := float64(e.End-e.Begin) / 1000
	out := traceEvent{Phase: "X", Name: e.title(), Cat: e.Kind, PID: pid, TID: tid, TS: tr.micros(e.Begin), Dur: &dur, Args: map[string]any{}}
	for key, value := range map[string]string{"call": e.Call, "parent": e.Parent, "to": e.To} {
		if value != "" {
			out.Args[key] = value
		}
	}
	if e.Queued > 0 {
		out.Args["queued_ms"] = float64(e.Queued) / 1e6
	}
	if e.Bytes > 0 {
		out.Args["bytes"] = e.Bytes
	}
	if e.Open {
		out.Args["running"] = true
	}
	if e.Failed {
		out.Args["failed"] = true
	}
	tr.events = append(tr.events, out)
	switch e.Kind {
	case "call":
		tr.calls[e.Call] = out
	case "part":
		tr.parts[partID{e.Call, e.To, e.ToRank}] = out
	case "run":
		tr.runs[e] = out
	}
}

// title is the name of a slice.
func (e *Event) title() string {
	switch {
	case e.Kind == "call":
		return e.To + "." + e.Name
	case e.Kind == "part":
		return fmt.Sprintf("%s.%s → rank %d", e.To, e.Name, e.ToRank)
	case e.Kind == "restart":
		return "restart of " + e.To
	}
	return e.Name
}

// arrowsTo draws an arrow to each run of a lane, from its part, or from the call if the part is not recorded.
func (tr *trace) arrowsTo(l *Lane) {
	for i := range l.Events {
		e := &l.Events[i]
		if e.Kind != "run" {
			continue
		}
		from, ok := tr.parts[partID{e.Call, l.Role, l.Rank}]
		if !ok {
			from, ok = tr.calls[e.Call]
		}
		to, found := tr.runs[e]
		if !ok || !found {
			continue
		}
		tr.arrows++
		begin := traceEvent{Phase: "s", Name: e.Name, Cat: "call", PID: from.PID, TID: from.TID, TS: from.TS, ID: tr.arrows}
		end := traceEvent{Phase: "f", Name: e.Name, Cat: "call", PID: to.PID, TID: to.TID, TS: max(to.TS, from.TS), ID: tr.arrows, Bind: "e"}
		tr.events = append(tr.events, begin, end)
	}
}
