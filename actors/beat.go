package actors

import (
	"math/rand/v2"
	"time"

	"troupe/bus"
	"troupe/bus/wire"
)

// Beat is what a host says of one of its workers, regularly and when its state changes. It tells busy from dead: a
// worker that is deep in a call of hours still beats, because the host's goroutine does it.
type Beat struct {
	Rank   int           `msgpack:"rank" json:"rank"`
	Gen    uint32        `msgpack:"gen" json:"gen"`
	State  State         `msgpack:"state" json:"state"`
	Busy   time.Duration `msgpack:"busy" json:"busy"`     // how long its oldest call has been running; 0: idle
	Calls  int           `msgpack:"calls" json:"calls"`   // running
	Queued int           `msgpack:"queued" json:"queued"` // waiting
	Node   string        `msgpack:"node" json:"node"`
	// Method is that of the oldest running call, Done counts the calls that have ended, and Stats has the counters that
	// changed since the last heartbeat; every sixteenth has all of them, for observers that came later or missed one.
	Method string        `msgpack:"method,omitempty" json:"method,omitempty"`
	Done   uint64        `msgpack:"done,omitempty" json:"done,omitempty"`
	Stats  []MethodStats `msgpack:"stats,omitempty" json:"stats,omitempty"`
	Err    *bus.Error    `msgpack:"err,omitempty" json:"err,omitempty"`
}

// beatLoop beats for all workers, one message a role, and looks after the intake. It starts at a random moment so that hosts do not beat together.
func (h *Host) beatLoop() {
	t := time.NewTimer(rand.N(h.cfg.BeatEvery))
	defer t.Stop()
	for n := 0; ; n++ {
		select {
		case <-h.closedCh:
			return
		case <-t.C:
			t.Reset(h.cfg.BeatEvery)
		}
		h.rescue()
		byRole := map[bus.Address][]*Worker{}
		for _, w := range h.Workers() {
			byRole[w.spec.Address] = append(byRole[w.spec.Address], w)
			w.knock(time.Now())
			if n%64 == 63 {
				w.purge(time.Now())
			}
		}
		for a, ws := range byRole {
			h.beat(a, ws, n%16 == 0)
		}
	}
}

func (h *Host) beat(a bus.Address, workers []*Worker, allStats bool) {
	beats := make([]Beat, len(workers))
	for i, w := range workers {
		beats[i] = w.beatNow()
		beats[i].Stats = w.reportStats(allStats)
	}
	body, err := wire.Marshal(beats)
	if err != nil {
		h.cfg.Logger.Error("actors: a beat cannot be encoded", "error", err)
		return
	}
	_ = h.ep.Send(a.Life(), &wire.Frame{Kind: wire.KindBeat, Header: wire.Header{Session: h.ep.Session()}, Body: body}) // the next one comes soon
}

func (w *Worker) beatNow() Beat {
	w.mu.Lock()
	defer w.mu.Unlock()
	b := Beat{Rank: w.spec.Rank, Gen: w.spec.Gen, State: w.state, Node: w.host.cfg.Node, Done: w.stats.done}
	for _, q := range w.queues {
		b.Queued += q.waiting.len()
	}
	now := instantOf(time.Now())
	for _, c := range w.active {
		if !isQuiet(c.header.Method) {
			b.Calls++
			if busy := max(now.sub(c.started), 1); busy > b.Busy {
				b.Busy, b.Method = busy, c.header.Method
			}
		}
	}
	if w.err != nil {
		b.Err = w.sayable(w.err)
	}
	return b
}
