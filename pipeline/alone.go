package pipeline

// loner is work that has its last chance: it was in the hands of a function so often when the engine was killed that once
// more would be too often. It is handed out when no function has anything else in hand, so that nobody pays for another.
type loner struct {
	stage *stage
	work  *work
	out   bool // it is in hand
}

// lastChance says that the work has to be handed out alone.
func (s *stage) lastChance(w *work) bool {
	return w.losses > 0 && w.losses+1 >= s.spec.Losses && s.suspects(w)
}

// sharedLimit is after how many deaths of workers that had other work in hand as well a work is handed out alone: if it is to
// blame, that shows then. After twice as many, because ranks die together, it is alone in its stage.
const sharedLimit = 3

// isSuspect says that the work has to be alone in the hand of a rank.
func (s *stage) isSuspect(w *work) bool { return s.spec.Func == nil && w.shared >= sharedLimit }

// soloist is work that has to be alone in the stage, in hand or not; nil: there is none.
func (s *stage) soloist() *work {
	for _, h := range s.hands.all {
		if h.solo != nil && h.solo.shared >= 2*sharedLimit {
			return h.solo
		}
	}
	return nil
}

// startSolos hands work out that has to be alone, where a rank has finished what it had.
func (f *flow) startSolos(s *stage) {
	for _, h := range s.hands.all {
		if h.solo == nil || h.soloOut || h.running > 0 || h.draining || !f.mayStart(s) {
			continue
		}
		if only := s.soloist(); only != nil && (only != h.solo || len(s.running) > 0) {
			continue
		}
		if w := h.solo; f.sift(s, w) {
			h.soloOut = true
			f.start(s, w, h)
		} else {
			h.solo = nil
			s.leave(w)
		}
	}
}

// runAlone hands the loner out if it is the stage's and nothing else is in hand. A stage that can hand nothing out now
// gives its place up: others must not wait for what waits for them.
func (f *flow) runAlone(s *stage) {
	w := f.alone.work
	if f.alone.stage != s || f.alone.out {
		return
	}
	busy := 0
	for _, o := range f.stages {
		if o.spec.Func != nil {
			busy += len(o.running)
		}
	}
	switch {
	case !f.open(s):
		f.alone = nil
		s.runnable.pushFront(w)
	case busy == 0:
		f.alone.out = true
		f.start(s, w, s.hands.least())
	}
}
