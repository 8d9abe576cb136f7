package nodes

import (
	"maps"
	"slices"
	"time"

	"troupe/bus"
)

const sweepMost = 5 * time.Second // how long a process may survive SIGKILL while it waits for a device

// sweeper kills the rest of workers' process trees. One scan of all processes serves all pending requests.
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

// sweep kills every process with the marker, of the session or in the control group, and returns those that survive.
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
			continue // for requests that arrive at the same time
		case <-nextCh:
		}
		if killFor(asks) == 0 || pause == 0 {
			pause = time.Millisecond
		}
		pause = min(2*pause, 50*time.Millisecond)
	}
}

// killFor scans once, kills what it finds, answers requests without survivors or past their time, and returns the
// number of pending requests.
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

// treesOf finds the live processes of each request, by marker.
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
