package sessions

import (
	"maps"
	"slices"
	"time"

	"troupe/bus"
)

// turnPatience is how long a request waits for an earlier one of its caller that does not come.
const turnPatience = 10 * time.Second

// turns are the requests of one caller, which begin in the order of their numbers.
type turns struct {
	next  int64
	early map[int64]*call
	last  time.Time
}

// turn begins a request of a caller, or holds it until those before it have come.
func (s *service) turn(caller string, number int64, c *call) {
	t := s.turns[caller]
	if t == nil {
		t = &turns{early: map[int64]*call{}}
		s.turns[caller] = t
	}
	t.last = time.Now()
	if number == 0 && c.method == "rejoin" { // the caller had lost this service, and counts from the beginning again
		t.runEarly()
		t.next = 0
	}
	if number > t.next && s.isKnown(caller) { // of a process that has ended, none is waited for
		t.early[number] = c
		time.AfterFunc(turnPatience, bus.Guard(func() {
			s.do(func() {
				if t.early[number] == c {
					t.begin(number)
				}
			})
		}))
		return
	}
	t.next = max(t.next, number+1)
	c.run()
	t.begin(t.next)
}

// begin begins an early request, and those that follow it without a gap.
func (t *turns) begin(number int64) {
	for c := t.early[number]; c != nil; c = t.early[number] {
		delete(t.early, number)
		number++
		t.next = max(t.next, number)
		c.run()
	}
}

// runEarly begins the requests that wait for others.
func (t *turns) runEarly() {
	for _, number := range slices.Sorted(maps.Keys(t.early)) {
		c := t.early[number]
		delete(t.early, number)
		c.run()
	}
}

// forgetCallers drops the turns of callers that are no process of a job and have not asked for long.
func (s *service) forgetCallers(now time.Time) {
	for caller, t := range s.turns {
		if _, known := s.processes[caller]; !known && len(t.early) == 0 && now.Sub(t.last) > 6*turnPatience {
			delete(s.turns, caller)
		}
	}
}
