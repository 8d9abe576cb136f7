package actors

import (
	"context"
	"time"

	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/recorder"
)

// workerTexts are the texts of a worker in the flight recorder.
type workerTexts struct{ namespace, role recorder.Text }

func textsOf(a bus.Address) workerTexts {
	return workerTexts{recorder.TextOf(a.Namespace), recorder.TextOf(a.Role)}
}

// recordRun records a call that has ended. w.mu is held.
func (w *Worker) recordRun(c *call, name recorder.Text, end int64, failed bool) {
	e := recorder.Entry{
		Kind: recorder.Run, Failed: failed, Rank: int32(w.spec.Rank), ToRank: -1, Begin: startOf(c), End: end, Queued: int64(c.started.sub(c.arrived)),
		Namespace: w.texts.namespace, Role: w.texts.role, Name: name, CallSession: c.caller.text, CallSeq: c.header.Seq,
	}
	added, exporting := w.runs.Add(&e), recorder.Exporting() && c.header.Trace != ""
	if w.cause != nil {
		w.runs.Flush() // the worker ends: nothing may flush it later
	}
	if added && !exporting {
		return
	}
	rec := w.runRecord(c)
	rec.Begin, rec.End, rec.Failed = e.Begin, end, failed
	if !added {
		recorder.Add(&rec)
	}
	if exporting {
		rec.Trace = recorder.RunTrace(c.header.Trace, rec.Call, rec.Role, w.spec.Rank)
		rec.ParentSpan = recorder.ParseTrace(c.header.Trace).Span
		recorder.ExportRecord(rec)
	}
}

// runRecord is the record of a call without its times.
func (w *Worker) runRecord(c *call) recorder.Record {
	return recorder.Record{
		Kind: recorder.Run, Rank: int32(w.spec.Rank), ToRank: -1, Queued: int64(c.started.sub(c.arrived)),
		Namespace: w.spec.Address.Namespace, Role: w.spec.Address.Role, Name: c.header.Method,
		Call: recorder.ID{Session: c.header.Session, Seq: c.header.Seq},
	}
}

// startOf is when a call started, on the clock of the flight recorder.
func startOf(c *call) int64 { return recordedClockStart + int64(c.started) - 1 }

var recordedClockStart = recorder.At(clockStart)

// openRecords reports the running calls of all workers.
func (h *Host) openRecords(namespace string, add func(recorder.Record)) {
	if namespace != h.ep.Namespace() {
		return
	}
	for _, w := range h.Workers() {
		w.mu.Lock()
		for _, c := range w.active {
			if c.binding.controlVerb {
				continue
			}
			rec := w.runRecord(c)
			rec.Begin = startOf(c)
			add(rec)
		}
		w.mu.Unlock()
	}
}

// flushRecords adds the recorded runs of all workers to the ring of the process.
func (h *Host) flushRecords() {
	for _, w := range h.Workers() {
		w.mu.Lock()
		w.runs.Flush()
		w.mu.Unlock()
	}
}

// timeline is the verb. Records that belong to the process are those of its first worker of the role, so that each of them is
// answered once.
func (w *Worker) timeline(_ context.Context, r calls.TimelineRequest) (recorder.Snapshot, error) {
	if r.Last < 0 || r.MaxBytes < 0 {
		return recorder.Snapshot{}, bus.Errorf(bus.CodeInvalid, "last %s and max_bytes %d must not be negative", r.Last, r.MaxBytes)
	}
	q := recorder.Query{
		Namespace: w.spec.Address.Namespace, Role: w.spec.Address.Role, Rank: w.spec.Rank,
		Last: min(r.Last, maxTimeline), MaxBytes: r.MaxBytes, Process: w.host.firstOf(w.spec.Address) == w,
	}
	s := recorder.Take(q)
	s.Host, s.OwnProcess = w.host.cfg.Node, w.host.cfg.OwnProcess
	return s, nil
}

const maxTimeline = 24 * time.Hour

// firstOf is the worker of a role with the lowest rank in this host.
func (h *Host) firstOf(a bus.Address) *Worker {
	for _, w := range h.Workers() {
		if w.spec.Address == a {
			return w
		}
	}
	return nil
}
