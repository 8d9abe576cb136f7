package actors

import (
	"math/rand/v2"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
)

// Heartbeat is a host's report on one worker, sent regularly and when the state changes. A worker that is busy for
// hours still has heartbeats, because the host sends them.
type Heartbeat struct {
	Rank   int           `msgpack:"rank" json:"rank"`
	Gen    uint32        `msgpack:"gen" json:"gen"`
	State  State         `msgpack:"state" json:"state"`
	Busy   time.Duration `msgpack:"busy" json:"busy"`     // running time of the oldest call; 0: idle
	Calls  int           `msgpack:"calls" json:"calls"`   // running calls
	Queued int           `msgpack:"queued" json:"queued"` // queued calls
	Node   string        `msgpack:"node" json:"node"`
	// Method is that of the oldest running call, Done counts the calls that have ended, and Stats has the counters that
	// changed since the last heartbeat; every sixteenth has all of them, for observers that came later or missed one.
	Method string        `msgpack:"method,omitempty" json:"method,omitempty"`
	Done   uint64        `msgpack:"done,omitempty" json:"done,omitempty"`
	Stats  []MethodStats `msgpack:"stats,omitempty" json:"stats,omitempty"`
	Err    *bus.Error    `msgpack:"err,omitempty" json:"err,omitempty"`
}

// heartbeatLoop sends the heartbeats of all workers, one message a role, and does the periodic checks. It starts at a
// random offset so that hosts do not send at the same time.
func (h *Host) heartbeatLoop() {
	t := time.NewTimer(rand.N(h.cfg.HeartbeatEvery))
	defer t.Stop()
	for n := 0; ; n++ {
		select {
		case <-h.closedCh:
			return
		case <-t.C:
			t.Reset(h.cfg.HeartbeatEvery)
		}
		byRole := map[bus.Address][]*Worker{}
		for _, w := range h.Workers() {
			byRole[w.spec.Address] = append(byRole[w.spec.Address], w)
			w.probeSilentCallers(time.Now())
			if n%64 == 63 {
				w.purge(time.Now())
			}
		}
		if n%16 == 0 {
			h.runners.trim()
		}
		for a, ws := range byRole {
			h.sendHeartbeat(a, ws, n%16 == 0)
		}
	}
}

func (h *Host) sendHeartbeat(a bus.Address, workers []*Worker, allStats bool) {
	beats := make([]Heartbeat, len(workers))
	for i, w := range workers {
		beats[i] = w.heartbeat()
		beats[i].Stats = w.reportStats(allStats)
	}
	body, err := wire.Marshal(beats)
	if err != nil {
		h.cfg.Logger.Error("actors: encode heartbeat", "error", err)
		return
	}
	_ = h.ep.Send(a.Life(), &wire.Frame{Kind: wire.KindBeat, Header: wire.Header{Session: h.ep.Session()}, Body: body}) // a lost heartbeat is followed by the next
}

func (w *Worker) heartbeat() Heartbeat {
	w.mu.Lock()
	defer w.mu.Unlock()
	b := Heartbeat{Rank: w.spec.Rank, Gen: w.spec.Gen, State: w.state, Node: w.host.cfg.Node, Done: w.stats.done}
	for _, q := range w.queues {
		b.Queued += q.waiting.len()
	}
	now := instantOf(time.Now())
	for _, c := range w.active {
		if !c.binding.controlVerb {
			b.Calls++
			if busy := max(now.sub(c.started), 1); busy > b.Busy {
				b.Busy, b.Method = busy, c.header.Method
			}
		}
	}
	if w.err != nil {
		b.Err = w.boundedError(w.err)
	}
	return b
}
