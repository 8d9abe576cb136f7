package roles

import (
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"troupe/actors"
	"troupe/bus"
)

// life follows the heartbeats of one role. A worker that says it failed, or says nothing for too long, is lost, and so
// is every call that waits for it.
type life struct {
	rt      *Runtime
	cluster *Cluster
	sub     *nats.Subscription
	stopCh  chan struct{}
	once    sync.Once

	mu      sync.Mutex
	beats   []beat
	changed chan struct{} // replaced and closed at each change of state
}

type beat struct {
	actors.Beat
	at time.Time // zero: none yet
}

func watchLife(rt *Runtime, c *Cluster) (*life, error) {
	l := &life{rt: rt, cluster: c, stopCh: make(chan struct{}), beats: make([]beat, c.rec.World), changed: make(chan struct{})}
	sub, err := rt.bus.Conn().Subscribe(c.rec.Address().Life(), l.receive)
	if err != nil {
		return nil, bus.Errorf(bus.CodeUnavailable, "subscribe to the life of %s: %w", c.rec.Name, err)
	}
	l.sub = sub
	rt.group.Go(l.judge)
	return l, nil
}

func (l *life) stop() {
	l.once.Do(func() {
		_ = l.sub.Unsubscribe() // fails only on a closed connection
		close(l.stopCh)
	})
}

func (l *life) receive(m *nats.Msg) {
	f, err := bus.ParseFrame(m.Data)
	if err != nil || f.Kind != bus.KindBeat {
		return // a stranger on our subject; the workers' silence would be noticed
	}
	var beats []actors.Beat
	if err := bus.Unmarshal(f.Body, &beats); err != nil {
		l.rt.log.Warn("roles: a heartbeat cannot be read", "role", l.cluster.rec.Name, "error", err)
		return
	}
	for _, b := range beats {
		l.note(b)
	}
}

func (l *life) note(b actors.Beat) {
	if b.Rank < 0 || b.Rank >= len(l.beats) {
		return
	}
	l.mu.Lock()
	old := l.beats[b.Rank]
	if b.Gen < old.Gen || old.State.Over() && b.Gen == old.Gen {
		l.mu.Unlock()
		return // an earlier worker's, or one after its last words
	}
	l.beats[b.Rank] = beat{Beat: b, at: time.Now()}
	if old.State != b.State {
		close(l.changed)
		l.changed = make(chan struct{})
	}
	l.mu.Unlock()
	if old.State == b.State || !b.State.Over() {
		return
	}
	why := bus.Errorf(bus.CodeWorkerLost, "the worker has stopped")
	if b.State == actors.Failed {
		why = bus.Errorf(bus.CodeWorkerLost, "the worker failed")
		if b.Err != nil {
			why = bus.Errorf(bus.CodeWorkerLost, "the worker failed: %s", b.Err.Message)
			why.Stack, why.Details = b.Err.Stack, b.Err.Details
		}
	}
	why.Role, why.Rank, why.Node = l.cluster.rec.Name, b.Rank, b.Node
	l.cluster.workerLost(b.Rank, b.Gen, why, b.State == actors.Failed)
}

// judge looks for silence. Nobody is judged for what was not heard while our own connection was down.
func (l *life) judge() {
	every := l.rt.cfg.LostAfter / 8
	t := time.NewTicker(every)
	defer t.Stop()
	listening := time.Now() // since when we could have heard a beat
	for {
		select {
		case <-l.stopCh:
			return
		case <-l.rt.ctx.Done():
			return
		case now := <-t.C:
			if !l.rt.bus.Conn().IsConnected() {
				listening = now
				continue
			}
			l.judgeAt(now, listening)
		}
	}
}

func (l *life) judgeAt(now, listening time.Time) {
	limit := l.rt.cfg.LostAfter
	if now.Sub(listening) < limit {
		return
	}
	for rank := range l.beats {
		l.mu.Lock()
		b := l.beats[rank]
		silent := b.State != "" && !b.State.Over() && now.Sub(b.at) > limit
		if silent {
			l.beats[rank].State = actors.Failed
			close(l.changed)
			l.changed = make(chan struct{})
		}
		l.mu.Unlock()
		if silent {
			why := bus.Errorf(bus.CodeWorkerLost, "no heartbeat for %s", now.Sub(b.at).Round(100*time.Millisecond))
			why.Role, why.Rank, why.Node = l.cluster.rec.Name, rank, b.Node
			l.cluster.workerLost(rank, b.Gen, why, true)
		}
	}
}

// states returns what was last heard of each rank, and a channel that is closed at the next change.
func (l *life) states() ([]actors.Beat, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]actors.Beat, len(l.beats))
	for i, b := range l.beats {
		out[i] = b.Beat
		out[i].Rank = i
	}
	return out, l.changed
}
