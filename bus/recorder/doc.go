// Package recorder is the flight recorder of a process: a bounded ring with the newest calls, transfers, restarts and user
// spans, with their times. It records all the time and is read when a timeline is asked for.
//
//	began := recorder.Now()
//	…
//	recorder.Add(&recorder.Record{Kind: recorder.Span, Namespace: "run", Name: "generate", Rank: -1, Begin: began, End: recorder.Now()})
//	snapshot := recorder.Take(recorder.Query{Namespace: "run", Last: time.Minute})
//
// Calls, parts and runs are written with AddEntry, whose texts are numbers that long-lived values keep: no pointer, no look-up.
// A writer with a lock of its own collects them in a Batch.
//
// TROUPE_RECORDER=0 turns it off; TROUPE_RECORDER=N keeps N records instead of 8,192.
package recorder
