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
	cluster *Cluster
	sub     *nats.Subscription
	stopCh  chan struct{}
	once    sync.Once

	mu      sync.Mutex // guards what follows
	beats   []beat
	losses  []loss
	changed chan struct{} // replaced and closed at each change of state
}

type beat struct {
	actors.Beat
	at time.Time // zero: nothing is expected yet
}

// loss is a worker that is gone.
type loss struct {
	rank   int
	gen    uint32
	why    *bus.Error
	failed bool // and did not stop in order
}

func newLife(c *Cluster) *life {
	l := &life{cluster: c, stopCh: make(chan struct{}), beats: make([]beat, c.WorldSize()), changed: make(chan struct{})}
	if c.tie != created { // a role that runs beats; one that is being created does not yet
		l.expectAll()
	}
	return l
}

// listen begins to follow the role.
func (l *life) listen() error {
	sub, err := l.cluster.rt.bus.Conn().Subscribe(l.cluster.group.To.Life(), l.receive)
	if err != nil {
		return bus.Errorf(bus.CodeUnavailable, "subscribe to the life of %s: %w", l.cluster.Name(), err)
	}
	l.sub = sub
	return nil
}

func (l *life) stop() {
	l.once.Do(func() {
		_ = l.sub.Unsubscribe() // fails only on a closed connection
		close(l.stopCh)
	})
}

// expectAll has every rank judged by its silence from now on, also one that has never been heard.
func (l *life) expectAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	for i := range l.beats {
		if l.beats[i].at.IsZero() {
			l.beats[i].at = now
		}
	}
}

func (l *life) receive(m *nats.Msg) {
	f, err := bus.ParseFrame(m.Data)
	if err != nil || f.Kind != bus.KindBeat {
		return // a stranger on our subject; the workers' silence would be noticed
	}
	var beats []actors.Beat
	if err := bus.Unmarshal(f.Body, &beats); err != nil {
		l.cluster.rt.log.Warn("roles: a heartbeat cannot be read", "role", l.cluster.Name(), "error", err)
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
		l.changedLocked()
	}
	l.mu.Unlock()
	if b.State.Over() {
		l.lost(lossOf(b, l.cluster.Name()), true)
	}
}

func (l *life) changedLocked() {
	close(l.changed)
	l.changed = make(chan struct{})
}

// lossOf reads a worker's last words.
func lossOf(b actors.Beat, role string) loss {
	out := loss{rank: b.Rank, gen: b.Gen, failed: b.State == actors.Failed}
	switch {
	case !out.failed:
		out.why = bus.Errorf(bus.CodeWorkerLost, "the worker has stopped")
	case b.Err == nil:
		out.why = bus.Errorf(bus.CodeWorkerLost, "the worker failed")
	default:
		out.why = bus.Errorf(bus.CodeWorkerLost, "the worker failed: %s", b.Err.Message).WithCause(b.Err)
		out.why.Stack, out.why.Details = b.Err.Stack, b.Err.Details
	}
	out.why.Role, out.why.Rank, out.why.Node = role, b.Rank, b.Node
	return out
}

// lost notes a loss and tells the cluster. When nobody is left, a cluster that nobody closes is let go of.
func (l *life) lost(one loss, certain bool) {
	l.mu.Lock()
	l.losses = append(l.losses, one)
	all := true
	for i := range l.beats {
		all = all && l.beats[i].State.Over()
	}
	l.mu.Unlock()
	l.cluster.workerLost(one, certain)
	if all && (l.cluster.tie == opened || l.cluster.tie == followed) {
		l.cluster.release()
	}
}

// repeat tells the bus of the losses again, for a call that was sent while they became known.
func (l *life) repeat() {
	l.mu.Lock()
	losses := l.losses
	l.mu.Unlock()
	for _, one := range losses {
		l.cluster.failCalls(one)
	}
}

// judge looks for silence. Nobody is judged for what was not heard while our own connection was down.
func (l *life) judge() {
	rt := l.cluster.rt
	t := time.NewTicker(rt.cfg.LostAfter / 8)
	defer t.Stop()
	listening := time.Now() // since when we could have heard a beat
	for {
		select {
		case <-l.stopCh:
			return
		case <-rt.ctx.Done():
			return
		case now := <-t.C:
			if !rt.bus.Conn().IsConnected() {
				listening = now
				continue
			}
			if now.Sub(listening) >= rt.cfg.LostAfter {
				l.judgeAt(now, rt.cfg.LostAfter)
			}
		}
	}
}

func (l *life) judgeAt(now time.Time, limit time.Duration) {
	for rank := range l.beats {
		l.mu.Lock()
		b := l.beats[rank]
		silent := !b.at.IsZero() && !b.State.Over() && now.Sub(b.at) > limit
		if silent {
			l.beats[rank].State = actors.Failed
			l.changedLocked()
		}
		l.mu.Unlock()
		if silent {
			why := bus.Errorf(bus.CodeWorkerLost, "no heartbeat for %s", now.Sub(b.at).Round(100*time.Millisecond))
			why.Role, why.Rank, why.Node = l.cluster.Name(), rank, b.Node
			l.lost(loss{rank: rank, gen: b.Gen, why: why, failed: true}, false)
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

// notOver is those of the ranks that have not ended, and a channel that is closed at the next change.
func (l *life) notOver(ranks []int) ([]int, <-chan struct{}) {
	states, changedCh := l.states()
	var left []int
	for _, rank := range ranks {
		if !states[rank].State.Over() {
			left = append(left, rank)
		}
	}
	return left, changedCh
}
