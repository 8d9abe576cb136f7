package nodes

import (
	"maps"
	"slices"
	"time"

	"troupe/bus"
)

const sweepMost = 5 * time.Second // for what does not die by KILL: it waits for a device that does not answer

// sweeper ends what is left of workers' trees. It looks through all processes, once for all workers that ask at a time.
type sweeper struct {
	askCh  chan sweepAsk
	doneCh chan struct{}
}

type sweepAsk struct {
	marker  string
	session int
	cgroup  string
	until   time.Time
	leftCh  chan []int // holds one
}

func newSweeper() *sweeper {
	s := &sweeper{askCh: make(chan sweepAsk), doneCh: make(chan struct{})}
	bus.Go(s.run)
	return s
}

func (s *sweeper) close() {
	close(s.askCh)
	<-s.doneCh
}

// sweep kills every process with that marker, of that session or in that control group, and returns those that are left.
func (s *sweeper) sweep(marker string, session int, cgroup string) []int {
	leftCh := make(chan []int, 1)
	s.askCh <- sweepAsk{marker, session, cgroup, time.Now().Add(sweepMost), leftCh}
	return <-leftCh
}

func (s *sweeper) run() {
	defer close(s.doneCh)
	asks, pause := map[string]sweepAsk{}, time.Millisecond
	for {
		var nextCh <-chan time.Time
		if len(asks) > 0 {
			nextCh = time.After(pause)
		}
		select {
		case ask, ok := <-s.askCh:
			if !ok {
				return
			}
			asks[ask.marker] = ask
			pause = 0
			continue // for others that come with it
		case <-nextCh:
		}
		if killFor(asks) == 0 || pause == 0 {
			pause = time.Millisecond
		}
		pause = min(2*pause, 50*time.Millisecond)
	}
}

// killFor looks once, kills what it finds, answers those who have nothing left or have waited long enough, and returns
// how many wait.
func killFor(asks map[string]sweepAsk) int {
	found := treesOf(asks)
	for _, marker := range slices.Collect(maps.Keys(asks)) {
		ask, left := asks[marker], found[marker]
		for _, pid := range left {
			killPID(pid)
		}
		if len(left) == 0 || time.Now().After(ask.until) {
			ask.leftCh <- left
			delete(asks, marker)
		}
	}
	return len(asks)
}

// treesOf finds the living processes of the asks, by marker.
func treesOf(asks map[string]sweepAsk) map[string][]int {
	sessions, members := map[int]string{}, map[int]string{}
	for marker, ask := range asks {
		sessions[ask.session] = marker
		for _, pid := range cgroupPIDs(ask.cgroup) {
			members[pid] = marker
		}
	}
	found := map[string][]int{}
	for _, pid := range pids() {
		session, zombie, ok := sessionOf(pid)
		if !ok || zombie {
			continue
		}
		marker, mine := sessions[session]
		if !mine {
			marker, mine = members[pid]
		}
		if !mine {
			marker = markerOf(pid)
			_, mine = asks[marker]
		}
		if mine {
			found[marker] = append(found[marker], pid)
		}
	}
	return found
}
