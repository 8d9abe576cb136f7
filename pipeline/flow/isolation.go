package flow

// isolatedRetry is work on its last attempt: it was running in a function at so many crashes of the engine that one
// more makes it a dead letter. It runs while no other function runs, so that a crash is charged to the right work.
type isolatedRetry struct {
	stage   *StageState
	work    *Work
	started bool // it is running
}

// needsIsolation reports whether the work has to be the only running function.
func (s *StageState) needsIsolation(w *Work) bool {
	return w.losses > 0 && w.losses+1 >= s.Spec.Losses && s.mayHaveCrashedEngine(w)
}

// sharedLossLimit is after how many worker deaths shared with other tasks work runs as the only task of a worker: if it
// is the cause, it is charged then. After twice as many it is the only task of its stage, because ranks die together.
const sharedLossLimit = 3

// needsOwnWorker reports whether the work has to be the only task of a rank.
func (s *StageState) needsOwnWorker(w *Work) bool {
	return s.Spec.Func == nil && w.sharedLosses >= sharedLossLimit
}

// exclusiveWork is work that has to be the only task of the stage, running or not; nil: none.
func (s *StageState) exclusiveWork() *Work {
	for _, slots := range s.Workers.All {
		if slots.isolated != nil && slots.isolated.sharedLosses >= 2*sharedLossLimit {
			return slots.isolated
		}
	}
	return nil
}

// startIsolated starts work that has to be the only task of its worker, where the worker is idle.
func (f *Flow) startIsolated(s *StageState) {
	for _, slots := range s.Workers.All {
		if slots.isolated == nil || slots.isolatedStarted || slots.Running > 0 || slots.Draining || !f.mayStart(s) {
			continue
		}
		if only := s.exclusiveWork(); only != nil && (only != slots.isolated || len(s.running) > 0) {
			continue
		}
		if w := slots.isolated; f.filterStale(s, w) {
			slots.isolatedStarted = true
			f.start(s, w, slots)
		} else {
			slots.isolated = nil
			s.leaveKey(w)
		}
	}
}

// startExclusive starts the isolated retry if it belongs to this stage and no function is running. If the stage cannot
// start tasks now, the retry is requeued: other stages must not wait for a stage that may be waiting for them.
func (f *Flow) startExclusive(s *StageState) {
	w := f.isolated.work
	if f.isolated.stage != s || f.isolated.started {
		return
	}
	busy := 0
	for _, o := range f.Stages {
		if o.Spec.Func != nil {
			busy += len(o.running)
		}
	}
	switch {
	case !f.canStart(s):
		f.isolated = nil
		s.runnable.pushFront(w)
	case busy == 0:
		f.isolated.started = true
		f.start(s, w, s.Workers.LeastLoaded())
	}
}
