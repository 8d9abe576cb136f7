package calls

import (
	"cmp"
	"context"
	"strings"
	"time"

	"troupe/bus"
	"troupe/bus/recorder"
	"troupe/bus/wire"
)

// maxParts is the number of ranks up to which a call is recorded with all of its parts. Of a larger call the last answer is
// recorded, and at most so many parts without an answer: the workers record their runs anyway.
const maxParts = 16

// minPart is the shortest time of a part without an error that is recorded. The run of its worker shows as much of a shorter one, and
// parts are more than a third of the cost of recording a call.
const minPart = int64(time.Millisecond)

// recording is what the flight recorder needs of one call beside its Gather. Nil: the call is not recorded.
type recording struct {
	scope recorder.Scope // where the call was made
	// trace is the span of the call, which its frames carry, and parentSpan the one that it was made in. They are zero unless records are exported.
	trace      recorder.Trace
	parentSpan [8]byte
}

// outsideRecording is shared by the calls outside of methods; it is never changed.
var outsideRecording = &recording{scope: recorder.Outside}

// newRecording is the recording of a call. Control verbs and probes are not recorded: they are no work.
func newRecording(ctx context.Context, c *Call) *recording {
	if strings.HasPrefix(c.Method, "@") && (c.Control || c.Method == "@probe") {
		return nil
	}
	scope := recorder.ScopeOf(ctx)
	switch {
	case recorder.Exporting():
		parent := recorder.ParseTrace(c.Trace)
		if parent.IsZero() {
			parent = scope.Trace
		}
		r := &recording{scope: scope, trace: parent.Child(), parentSpan: parent.Span}
		c.Trace = r.trace.String()
		return r
	case c.Trace == "" && !scope.Trace.IsZero():
		c.Trace = scope.Trace.String() // a trace passes through processes that export nothing
	}
	switch {
	case !recorder.On():
		return nil
	case scope.Rank >= 0:
		return &recording{scope: scope}
	}
	return outsideRecording
}

// record is the record of the call, or of a part of it.
func (g *Gather) record(kind recorder.Kind, rank int, end int64) recorder.Record {
	s := &g.recording.scope
	return recorder.Record{
		Kind: kind, Rank: int32(s.Rank), ToRank: int32(rank), Begin: recorder.At(g.sentAt), End: end,
		Namespace: g.ep.Namespace(), Role: s.Role, Name: g.call.Method, To: g.call.To.Role,
		Call: recorder.ID{Session: g.ep.Session(), Seq: g.seq}, Parent: s.Call,
	}
}

// endpointTexts are the texts of an endpoint in the flight recorder.
type endpointTexts struct{ namespace, session recorder.Text }

// addRecord records the call, or a part of it.
func (g *Gather) addRecord(kind recorder.Kind, rank int, end int64, failed bool) {
	s := &g.recording.scope
	e := recorder.Entry{
		Kind: kind, Failed: failed, Rank: int32(s.Rank), ToRank: int32(rank), Begin: recorder.At(g.sentAt), End: end,
		Namespace: g.ep.texts.namespace, Name: recorder.TextOf(g.call.Method), To: g.sender.toText, CallSession: g.ep.texts.session, CallSeq: g.seq,
	}
	if s.Rank >= 0 {
		e.Role, e.ParentSession, e.ParentSeq = recorder.TextOf(s.Role), recorder.TextOf(s.Call.Session), s.Call.Seq
	}
	added, exporting := recorder.AddEntry(&e), !g.recording.trace.IsZero()
	if added && !exporting {
		return
	}
	rec := g.record(kind, rank, end)
	rec.Failed = failed
	if !added {
		recorder.Add(&rec)
	}
	if !exporting {
		return
	}
	rec.Trace, rec.ParentSpan = g.recording.trace, g.recording.parentSpan
	if kind == recorder.Part {
		rec.Trace, rec.ParentSpan = g.recording.trace.Child(), g.recording.trace.Span
	}
	recorder.ExportRecord(rec)
}

// recordPart records the answer of one rank, if it took long, has an error or is exported. It is called without the lock.
func (g *Gather) recordPart(rank int, err error, last bool) {
	if g.recording == nil || len(g.slots) == 1 || len(g.slots) > maxParts && !last {
		return
	}
	now := recorder.Now()
	if err == nil && now-recorder.At(g.sentAt) < minPart && g.recording.trace.IsZero() {
		return
	}
	g.addRecord(recorder.Part, rank, now, err != nil)
}

// recordOver records the call, of which good ranks have answered without an error, and the parts that have no answer.
func (g *Gather) recordOver(unanswered wire.RankSet, good int) {
	if g.recording == nil {
		return
	}
	rank, now := -1, recorder.Now()
	if len(g.slots) == 1 {
		rank = g.slots[0].answer.Rank
	} else if unanswered.Len() > 0 {
		for i, r := range unanswered.List() {
			if i == maxParts {
				break
			}
			g.addRecord(recorder.Part, r, now, true)
		}
	}
	g.addRecord(recorder.Call, rank, now, good < cmp.Or(g.call.Need, len(g.slots)))
}

// openRecords reports the pending calls and the ranks that they wait for.
func (e *Endpoint) openRecords(namespace string, add func(recorder.Record)) {
	if namespace != e.Namespace() {
		return
	}
	e.mu.Lock()
	all := e.pendingLocked()
	e.mu.Unlock()
	for _, g := range all {
		if g.recording == nil {
			continue
		}
		g.mu.Lock()
		rank, parts := -1, []int(nil)
		if len(g.slots) == 1 {
			rank = g.slots[0].answer.Rank
		} else {
			for i := range g.slots {
				if s := &g.slots[i]; !s.answered && len(parts) < maxParts {
					parts = append(parts, s.answer.Rank)
				}
			}
		}
		over := g.over
		call := g.record(recorder.Call, rank, 0)
		g.mu.Unlock()
		if over {
			continue
		}
		add(call)
		for _, r := range parts {
			call.Kind, call.ToRank = recorder.Part, int32(r)
			add(call)
		}
	}
}

// answerTimeline answers a request for the snapshot of this process. It does not block for long.
func (e *Endpoint) answerTimeline(m *bus.Msg) {
	if m.Reply == "" {
		return
	}
	e.Bus().Answer(m, func(m *bus.Msg) (any, error) {
		var q TimelineRequest
		if err := wire.Unmarshal(m.Data, &q); err != nil {
			return nil, err
		}
		limit := e.Bus().MaxPayload() - bus.MaxEnvelope
		if q.MaxBytes > 0 {
			limit = min(limit, q.MaxBytes)
		}
		return recorder.Take(recorder.Query{Namespace: e.Namespace(), Last: max(q.Last, 0), MaxBytes: limit}), nil
	})
}

// TimelineRequest asks a process for what its flight recorder has. It is also the argument of the worker's verb.
type TimelineRequest struct {
	Last     time.Duration `msgpack:"last"`      // how far back; 0: the clock alone
	MaxBytes int           `msgpack:"max_bytes"` // of the answer's records; 0: the default of the process
}

// AskTimeline asks the process of a session for the snapshot of its flight recorder. It fails at once if the session has ended.
func (e *Endpoint) AskTimeline(ctx context.Context, session string, q TimelineRequest) (s recorder.Snapshot, err error) {
	if err := bus.CheckName("session", session); err != nil {
		return s, err
	}
	data, err := wire.Marshal(q)
	if err == nil {
		err = e.Bus().AskOnce(ctx, replyTimeline(e.Namespace(), session), data, &s)
	}
	return s, err
}
