package nodes

import (
	"cmp"
	"slices"
	"sync"
	"syscall"
	"time"

	"troupe/nodes/protocol"
)

// reportWait is how long the answer to a stop waits for a report without the stopped workers. A later report only delays
// the next grant of their devices.
const reportWait = 200 * time.Millisecond

// reportProgress tracks which reports of running workers have been published.
type reportProgress struct {
	mu        sync.Mutex // guards what follows
	asked     uint64     // calls of wait
	read      uint64     // of those, the calls before the reading in progress
	published uint64     // of those, the calls before the last published reading
	doneCh    chan struct{}
}

// begin is called before running workers are read.
func (t *reportProgress) begin() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.read = t.asked
}

// done is called when the last reading has been published.
func (t *reportProgress) done() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.published = t.read; t.doneCh != nil {
		close(t.doneCh)
		t.doneCh = nil
	}
}

// wait returns when a reading made after this call has been published, or after the limit.
func (t *reportProgress) wait(wakeCh chan struct{}, limit time.Duration) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	t.mu.Lock()
	t.asked++
	mine := t.asked
	t.mu.Unlock()
	wake(wakeCh)
	for {
		t.mu.Lock()
		if t.published >= mine {
			t.mu.Unlock()
			return
		}
		if t.doneCh == nil {
			t.doneCh = make(chan struct{})
		}
		ch := t.doneCh
		t.mu.Unlock()
		select {
		case <-ch:
		case <-timer.C:
			return
		}
	}
}

// endedGrantsMost is the number of ended grants that are remembered.
const endedGrantsMost = 4096

// runningGrants is the grants with worker processes, for the node's reports: from the moment a worker is added until its
// whole tree is gone. Grants with devices come first.
func (s *localNode) runningGrants() []protocol.RunningGrant {
	s.reported.begin()
	var list []protocol.RunningGrant
	at := map[grant]int{}
	for _, w := range s.all() {
		l := &w.launch
		if l.Reservation == "" || l.Token == 0 || !w.mayHaveProcesses() {
			continue
		}
		key := grant{l.Reservation, l.Token}
		i, known := at[key]
		if !known {
			i = len(list)
			at[key] = i
			list = append(list, protocol.RunningGrant{Reservation: l.Reservation, Token: l.Token, Namespace: w.ID.Namespace, SharesWith: l.Over})
		}
		for _, uuid := range w.Devices {
			list[i].Devices = withShare(list[i].Devices, uuid, cmp.Or(w.Share, wholeDevice))
		}
	}
	slices.SortFunc(list, func(a, b protocol.RunningGrant) int {
		return cmp.Or(
			cmp.Compare(min(len(b.Devices), 1), min(len(a.Devices), 1)),
			cmp.Compare(a.Reservation, b.Reservation),
			cmp.Compare(a.Token, b.Token),
		)
	})
	return list
}

// idle reports whether there is no worker process.
func (s *localNode) idle() bool { return !slices.ContainsFunc(s.all(), (*worker).mayHaveProcesses) }

// withShare adds a worker's share of a device to those of its reservation, at most the whole device.
func withShare(devices []protocol.DeviceShare, uuid string, milli int) []protocol.DeviceShare {
	i, found := slices.BinarySearchFunc(devices, uuid, func(d protocol.DeviceShare, uuid string) int { return cmp.Compare(d.UUID, uuid) })
	if found {
		devices[i].Milli = min(devices[i].Milli+milli, wholeDevice)
		return devices
	}
	return slices.Insert(devices, i, protocol.DeviceShare{UUID: uuid, Milli: min(milli, wholeDevice)})
}

// mayHaveProcesses reports whether processes of the worker may exist: it runs, or some survived SIGKILL.
func (w *worker) mayHaveProcesses() bool {
	if w.running() {
		return true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(w.survivors, func(pid int) bool { return syscall.Kill(pid, 0) == nil })
}

// endGrants kills the workers that run under ended grants, and refuses later starts under them. It does not wait for
// their exits, which the next report shows. It may be repeated, and ignores grants of the same reservation under
// another token.
func (s *localNode) endGrants(all []protocol.KillOrder) {
	why := map[grant]string{}
	s.mu.Lock()
	for _, e := range all {
		key := grant{e.Reservation, e.Token}
		why[key] = cmp.Or(e.Why, "its reservation "+e.Reservation+" has ended")
		if !s.endedGrants[key] {
			s.endedGrants[key] = true
			s.endedOrder = append(s.endedOrder, key)
		}
	}
	for len(s.endedOrder) > endedGrantsMost {
		delete(s.endedGrants, s.endedOrder[0])
		s.endedOrder = s.endedOrder[1:]
	}
	found := slices.Clone(s.order)
	s.mu.Unlock()
	for _, w := range found {
		words, ended := why[grant{w.launch.Reservation, w.launch.Token}]
		if !ended || w.launch.Reservation == "" || !w.running() {
			continue
		}
		s.agent.cfg.Logger.Warn("nodes: killing a worker whose reservation has ended", "worker", w.ID.String(), "reservation", w.launch.Reservation, "token", w.launch.Token, "why", words)
		w.stop(0, words)
	}
}
