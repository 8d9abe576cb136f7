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
