// Package flow decides what a pipeline does next: which worker gets which item, what is committed together, what is
// retried, dropped or given up. It is pure: time comes in as a value, effects go out as values, and it does no I/O. The
// engine in package pipeline carries out the effects and reports their results:
//
//	f := flow.New(declared, checkpoint)
//	f.Now = time.Now()
//	f.Put(&flow.Put{Stream: f.StreamNamed("prompts"), Items: items, Token: request})
//	f.Schedule()
//	do := f.TakeEffects()      // start tasks, store bodies, read items, answer requests
//	commit := f.BuildCommit()  // write it to the log, then:
//	f.Committed(commit, first)
package flow
