package nodes

import (
	"cmp"
	"slices"
	"sync"
	"syscall"
	"time"

	"troupe/nodes/protocol"
)

// tellWait is how long the answer to a stop waits until the node's report says that the workers are gone. A report that
// takes longer is made up for by the next: the devices are only granted a little later.
const tellWait = 200 * time.Millisecond

// telling is how far the reports are with what runs.
type telling struct {
	mu     sync.Mutex // guards what follows
	asked  uint64     // how often somebody has waited
	read   uint64     // of those, how many before the reading that is being reported
	told   uint64     // and how many before one that has been
	doneCh chan struct{}
}

// begin is called before what runs is read.
func (t *telling) begin() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.read = t.asked
}

// done is called when what was read last has been reported.
func (t *telling) done() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.told = t.read; t.doneCh != nil {
		close(t.doneCh)
		t.doneCh = nil
	}
}

// wait returns when what runs now has been reported, or so much time has passed.
func (t *telling) wait(wakeCh chan struct{}, most time.Duration) {
	timer := time.NewTimer(most)
	defer timer.Stop()
	t.mu.Lock()
	t.asked++
	mine := t.asked
	t.mu.Unlock()
	wake(wakeCh)
	for {
		t.mu.Lock()
		if t.told >= mine {
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

// oversMost is how many ended grants a site remembers, the newest.
const oversMost = 4096

// running is the grants under which something of a worker may be there, for the node's reports: from the moment a worker
// is enlisted until its whole tree is gone. Those with devices come first.
func (s *site) running() []protocol.RunningGrant {
	s.told.begin()
	var list []protocol.RunningGrant
	at := map[grant]int{}
	for _, w := range s.all() {
		l := &w.launch
		if l.Reservation == "" || l.Token == 0 || !w.lingers() {
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

// withShare adds a worker's share of a device to those of its reservation, by UUID. No more than the whole can be held.
func withShare(devices []protocol.DeviceShare, uuid string, milli int) []protocol.DeviceShare {
	i, found := slices.BinarySearchFunc(devices, uuid, func(d protocol.DeviceShare, uuid string) int { return cmp.Compare(d.UUID, uuid) })
	if found {
		devices[i].Milli = min(devices[i].Milli+milli, wholeDevice)
		return devices
	}
	return slices.Insert(devices, i, protocol.DeviceShare{UUID: uuid, Milli: min(milli, wholeDevice)})
}

// lingers reports whether something of the worker may be there: it runs, or processes of it could not be killed.
func (w *worker) lingers() bool {
	if w.running() {
		return true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(w.left, func(pid int) bool { return syscall.Kill(pid, 0) == nil })
}

// endUnder kills the workers that run under grants that are over, and forbids later starts under them. It does not wait
// for their end, which the next report shows. A repeat changes nothing, and a grant of the same reservation under another
// token is left alone.
func (s *site) endUnder(all []protocol.KillOrder) {
	why := map[grant]string{}
	s.mu.Lock()
	for _, e := range all {
		key := grant{e.Reservation, e.Token}
		why[key] = cmp.Or(e.Why, "its reservation "+e.Reservation+" has ended")
		if !s.over[key] {
			s.over[key] = true
			s.overed = append(s.overed, key)
		}
	}
	for len(s.overed) > oversMost {
		delete(s.over, s.overed[0])
		s.overed = s.overed[1:]
	}
	found := slices.Clone(s.order)
	s.mu.Unlock()
	for _, w := range found {
		words, ended := why[grant{w.launch.Reservation, w.launch.Token}]
		if !ended || w.launch.Reservation == "" || !w.running() {
			continue
		}
		s.agent.cfg.Logger.Warn("nodes: a worker is killed: its reservation has ended", "worker", w.ID.String(), "reservation", w.launch.Reservation, "token", w.launch.Token, "why", words)
		w.stop(0, words)
	}
}
