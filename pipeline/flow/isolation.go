package flow

// loner is work that has its last chance: it was in the hands of a function so often when the engine was killed that once
// more would be too often. It is handed out when no function has anything else in hand, so that nobody pays for another.
type isolatedRetry struct {
	stage   *StageState
	work    *Work
	started bool // it is in hand
}

// lastChance says that the work has to be handed out alone.
func (s *StageState) needsIsolation(w *Work) bool {
	return w.losses > 0 && w.losses+1 >= s.Spec.Losses && s.mayHaveCrashedEngine(w)
}

// sharedLimit is after how many deaths of workers that had other work in hand as well a work is handed out alone: if it is to
// blame, that shows then. After twice as many, because ranks die together, it is alone in its stage.
const sharedLossLimit = 3

// isSuspect says that the work has to be alone in the hand of a rank.
func (s *StageState) needsOwnWorker(w *Work) bool {
	return s.Spec.Func == nil && w.sharedLosses >= sharedLossLimit
}

// soloist is work that has to be alone in the stage, in hand or not; nil: there is none.
func (s *StageState) exclusiveWork() *Work {
	for _, h := range s.Workers.All {
		if h.isolated != nil && h.isolated.sharedLosses >= 2*sharedLossLimit {
			return h.isolated
		}
	}
	return nil
}

// startSolos hands work out that has to be alone, where a rank has finished what it had.
func (f *Flow) startIsolated(s *StageState) {
	for _, h := range s.Workers.All {
		if h.isolated == nil || h.isolatedStarted || h.Running > 0 || h.Draining || !f.mayStart(s) {
			continue
		}
		if only := s.exclusiveWork(); only != nil && (only != h.isolated || len(s.running) > 0) {
			continue
		}
		if w := h.isolated; f.filterStale(s, w) {
			h.isolatedStarted = true
			f.start(s, w, h)
		} else {
			h.isolated = nil
			s.leaveKey(w)
		}
	}
}

// runAlone hands the loner out if it is the stage's and nothing else is in hand. A stage that can hand nothing out now
// gives its place up: others must not wait for what waits for them.
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
