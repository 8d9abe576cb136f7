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
			h.beat(a, ws)
		}
	}
}

func (h *Host) beat(a bus.Address, workers []*Worker) {
	beats := make([]Beat, len(workers))
	for i, w := range workers {
		beats[i] = w.beatNow()
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
	b := Beat{Rank: w.spec.Rank, Gen: w.spec.Gen, State: w.state, Node: w.host.cfg.Node}
	for _, q := range w.queues {
		b.Queued += q.waiting.len()
	}
	now := instantOf(time.Now())
	for _, c := range w.active {
		if !isQuiet(c.header.Method) {
			b.Calls++
			b.Busy = max(b.Busy, now.sub(c.started), 1)
		}
	}
	if w.err != nil {
		b.Err = w.sayable(w.err)
	}
	return b
}
