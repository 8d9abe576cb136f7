package roles

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
)

const (
	lifeBuffer   = 512                     // messages about one role's workers that wait to be looked at, at least
	lifeEach     = 4                       // and for each worker: all of them may beat, fail and stop at the same time
	suspectAfter = 1300 * time.Millisecond // a worker that has been silent for so long is asked: it beats once a second
	maxLosses    = 4 * maxWorld            // that are remembered, for calls that were sent while they became known
	goneAfter    = 800 * time.Millisecond  // and is gone, if the server says for so long that nobody listens there
)

// life follows the workers of one role: their heartbeats, and what their agents say of their ends. A worker that says it
// failed, or whose process has ended, or who says nothing for too long, is lost, and so is every call that waits for it.
// One goroutine takes it all in, because the last words of a worker come before the news of its end.
type life struct {
	cluster *Cluster
	subs    []*nats.Subscription
	msgCh   chan *nats.Msg
	stopCh  chan struct{}
	once    sync.Once
	gens    atomic.Pointer[map[int]uint32] // of ranks that have been replaced; nil: none has

	mu      sync.Mutex // guards what follows
	beats   []beat
	losses  []loss
	changed chan struct{} // replaced and closed at each change of state
	asking  bool          // silent workers are being asked
}

type beat struct {
	actors.Heartbeat
	at      time.Time // zero: nothing is expected yet
	session string    // under which the worker makes its calls; empty: it has not been heard
	unsaid  bool      // it has stopped, and its agent is yet to say why
}

// loss is a worker that is gone.
type loss struct {
	rank   int
	gen    uint32
	why    *bus.Error
	failed bool // and did not stop in order

	evicted bool // it was ended by an operator, and cannot be started on its node again
	guessed bool // from its silence: neither it nor its agent has said so
}

func newLife(c *Cluster) *life {
	l := &life{
		cluster: c, msgCh: make(chan *nats.Msg, max(lifeBuffer, lifeEach*c.rec.World)), stopCh: make(chan struct{}), beats: make([]beat, c.rec.World),
		changed: make(chan struct{}),
	}
	for len(l.beats) < len(c.rec.Seats) { // some are just coming to the role, or leaving it
		l.beats = append(l.beats, beat{})
	}
	for rank, seat := range c.rec.Seats {
		l.beats[rank].Gen = seat.Gen
	}
	l.publishGensLocked()
	if c.tie != created { // a role that runs beats; one that is being created does not yet
		l.expectAll()
	}
	return l
}

// listen begins to follow the role.
func (l *life) listen() error {
	to := l.cluster.to
	for _, subject := range []string{to.Life(), to.Exit()} {
		sub, err := l.cluster.rt.bus.Conn().ChanSubscribe(subject, l.msgCh)
		if err != nil {
			l.stop()
			return bus.Errorf(bus.CodeUnavailable, "subscribe to the life of %s: %w", l.cluster.Name(), err)
		}
		l.subs = append(l.subs, sub)
	}
	return nil
}

func (l *life) stop() {
	l.once.Do(func() {
		for _, sub := range l.subs {
			_ = sub.Unsubscribe() // fails only on a closed connection
		}
		close(l.stopCh)
	})
}

// expectAll has every rank judged by its silence from now on, also one that has never been heard.
func (l *life) expectAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	for i := range l.beats {
		if l.beats[i].at.IsZero() && !l.beats[i].State.Over() {
			l.beats[i].at = now
		}
	}
}

// run takes in what is said of the workers, and looks for silence. Nobody is judged for what was not heard while our own
// connection was down.
func (l *life) run() {
	rt := l.cluster.rt
	t := time.NewTicker(min(rt.cfg.LostAfter/8, suspectAfter/4))
	defer t.Stop()
	listening := time.Now() // since when we could have heard a beat
	for {
		select {
		case <-l.stopCh:
			return
		case <-rt.ctx.Done():
			return
		case m := <-l.msgCh:
			l.receive(m)
		case now := <-t.C:
			switch {
			case !rt.bus.Conn().IsConnected():
				listening = now
			case now.Sub(listening) >= rt.cfg.LostAfter:
				l.ask(l.silent(now, suspectAfter))
				l.judgeAt(now, rt.cfg.LostAfter)
			}
		}
	}
}

func (l *life) receive(m *nats.Msg) {
	if m.Subject == l.cluster.to.Exit() {
		l.receiveExit(m.Data)
		return
	}
	f, err := wire.ParseFrame(m.Data)
	if err != nil || f.Kind != wire.KindBeat {
		return // a stranger on our subject; the workers' silence would be noticed
	}
	var beats []actors.Heartbeat
	if err := wire.Unmarshal(f.Body, &beats); err != nil {
		l.cluster.rt.log.Warn("roles: a heartbeat cannot be read", "role", l.cluster.Name(), "error", err)
		return
	}
	for _, b := range beats {
		l.note(b, f.Header.Session)
	}
}

func (l *life) note(b actors.Heartbeat, session string) {
	if b.State == noteBegun || b.State == noteFinished { // of a process that restarts workers, about them
		if session != l.cluster.rt.ep.Session() {
			l.cluster.restartNews()
		}
		return
	}
	if b.State == actors.Ready && b.Rank >= l.cluster.WorldSize() {
		l.cluster.grewElsewhere(b.Rank)
	}
	l.mu.Lock()
	if b.Rank < 0 || b.Rank >= len(l.beats) {
		l.mu.Unlock()
		return
	}
	old := l.beats[b.Rank]
	if b.Gen < old.Gen || old.State.Over() && b.Gen == old.Gen {
		l.mu.Unlock()
		return // an earlier worker's, or one after its last words
	}
	l.beats[b.Rank] = beat{Heartbeat: b, at: time.Now(), session: session}
	if old.State != b.State || old.Gen != b.Gen {
		l.changedLocked()
	}
	replaced := old.Gen != b.Gen
	if replaced {
		l.publishGensLocked()
	}
	l.mu.Unlock()
	if replaced { // whoever still waits for the one before
		why := bus.Errorf(bus.CodeWorkerLost, "the worker has been replaced by another")
		why.Role, why.Rank, why.Node = l.cluster.Name(), b.Rank, old.Node
		l.cluster.failCalls(loss{rank: b.Rank, gen: old.Gen, why: why, failed: true})
	}
	switch {
	case b.State == actors.Stopped && l.cluster.Record().Process && !l.cluster.isOver():
		l.awaitExit(b)
	case b.State.Over():
		l.lost(lossOf(b, l.cluster.Name()), true)
	}
	if replaced && l.cluster.Record().restarts() && b.Rank < len(l.cluster.Record().Seats) && l.cluster.Record().Seats[b.Rank].Gen < b.Gen {
		l.cluster.restartNews() // another process has replaced it
	}
}

func (l *life) changedLocked() {
	close(l.changed)
	l.changed = make(chan struct{})
}

// lossOf reads a worker's last words.
func lossOf(b actors.Heartbeat, role string) loss {
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
	if len(l.losses) >= maxLosses {
		l.losses = slices.Delete(l.losses, 0, maxLosses/2) // whoever called those has been told
	}
	l.losses = append(l.losses, one)
	all := true
	for i := range l.beats {
		all = all && l.beats[i].State.Over()
	}
	l.mu.Unlock()
	l.cluster.workerLost(one, certain)
	if all && (l.cluster.tie == opened || l.cluster.tie == followed) && !l.cluster.Record().restarts() {
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

// renew expects another worker in the place of one that is gone.
func (l *life) renew(rank int, gen uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.beats[rank] = beat{Heartbeat: actors.Heartbeat{Rank: rank, Gen: gen}}
	l.publishGensLocked()
}

// makeRoom follows so many ranks. Those that are gone stay: what is heard of them late is known for what it is.
func (l *life) makeRoom(world int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for rank := len(l.beats); rank < world; rank++ {
		l.beats = append(l.beats, beat{Heartbeat: actors.Heartbeat{Rank: rank}})
	}
}

// adopt takes the generations that the registry knows, where they are newer than what was heard.
func (l *life) adopt(seats []Seat) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for rank, seat := range seats {
		if l.beats[rank].Gen < seat.Gen {
			l.beats[rank] = beat{Heartbeat: actors.Heartbeat{Rank: rank, Gen: seat.Gen}}
		}
	}
	l.publishGensLocked()
}

// retire expects nothing more of a rank.
func (l *life) retire(rank int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.beats[rank].State, l.beats[rank].at = actors.Stopped, time.Time{}
}

func (l *life) publishGensLocked() {
	gens := map[int]uint32{}
	for rank := range l.beats {
		if g := l.beats[rank].Gen; g != 0 {
			gens[rank] = g
		}
	}
	if len(gens) > 0 {
		l.gens.Store(&gens)
	}
}

// generations are those of ranks that have been replaced, for calls.
func (l *life) generations() map[int]uint32 {
	if gens := l.gens.Load(); gens != nil {
		return *gens
	}
	return nil
}

// lossOf is why a rank is gone, the first if there are several.
func (l *life) lossOf(rank int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, one := range l.losses {
		if one.rank == rank && one.gen == l.beats[rank].Gen {
			return one.why
		}
	}
	if b := l.beats[rank].Heartbeat; b.State.Over() { // its last words were heard, and are about to be noted
		return lossOf(b, l.cluster.Name()).why
	}
	return bus.Errorf(bus.CodeWorkerLost, "rank %d is gone", rank)
}

// silent is the ranks that should have been heard in the last while and were not.
func (l *life) silent(now time.Time, limit time.Duration) []int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.asking {
		return nil
	}
	var ranks []int
	for rank := range l.beats {
		if b := &l.beats[rank]; !b.at.IsZero() && !b.State.Over() && now.Sub(b.at) > limit {
			ranks = append(ranks, rank)
		}
	}
	return ranks
}

// ask finds out about silent workers. The server knows at once when nobody listens in their place any more, because the
// process, and with it its connection, is gone; one that is only slow, or frozen, has still its subscription. An answer is
// as good as a beat.
func (l *life) ask(ranks []int) {
	if len(ranks) == 0 {
		return
	}
	l.setAsking(true)
	if !l.cluster.rt.spawn(func() { l.inquire(ranks) }) {
		l.setAsking(false)
	}
}

func (l *life) setAsking(on bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asking = on
}

func (l *life) inquire(ranks []int) {
	defer l.setAsking(false)
	rt, to := l.cluster.rt, l.cluster.to
	parts := make([]bus.Part, len(ranks))
	for i, rank := range ranks {
		parts[i] = bus.Part{Scope: bus.OneRank(rank), Ranks: []int{rank}}
	}
	g, err := rt.ep.Scatter(rt.ctx, bus.Call{
		To: to, Method: actors.VerbProbe, Control: true, World: l.cluster.WorldSize(), Parts: parts, Gens: l.generations(),
		Timeout: 2 * goneAfter, AskAfter: goneAfter / 4, GoneAfter: goneAfter,
	})
	if err != nil {
		return // the next time
	}
	for {
		a, ok, err := g.Next(rt.ctx)
		if err != nil || !ok {
			return
		}
		switch {
		case a.Err == nil:
			l.heard(a.Rank)
		case errors.Is(a.Err, bus.ErrWorkerLost):
			l.judge(a.Rank, bus.Errorf(bus.CodeWorkerLost, "its process is gone: it has been silent and nobody listens in its place"))
		}
	}
}

// heard takes an answer for a beat.
func (l *life) heard(rank int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if b := &l.beats[rank]; !b.at.IsZero() && !b.State.Over() {
		b.at = time.Now()
	}
}

func (l *life) judgeAt(now time.Time, limit time.Duration) {
	l.mu.Lock()
	beats := slices.Clone(l.beats)
	l.mu.Unlock()
	for rank, b := range beats {
		if silence := now.Sub(b.at); !b.at.IsZero() && !b.State.Over() && silence > limit {
			l.judge(rank, bus.Errorf(bus.CodeWorkerLost, "no heartbeat for %s", silence.Round(100*time.Millisecond)))
		}
	}
}

// judge gives up a worker that has not said itself that it is over.
func (l *life) judge(rank int, why *bus.Error) {
	l.mu.Lock()
	b := l.beats[rank]
	if b.State.Over() || b.at.IsZero() {
		l.mu.Unlock()
		return
	}
	l.beats[rank].State = actors.Failed
	l.changedLocked()
	l.mu.Unlock()
	why.Role, why.Rank, why.Node = l.cluster.Name(), rank, b.Node
	l.lost(loss{rank: rank, gen: b.Gen, why: why, failed: true, guessed: true}, false)
}

// states returns what was last heard of each rank, and a channel that is closed at the next change.
func (l *life) states() ([]actors.Heartbeat, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]actors.Heartbeat, len(l.beats))
	for i, b := range l.beats {
		out[i] = b.Heartbeat
		out[i].Rank = i
	}
	return out, l.changed
}

// heardFrom says whether one of the workers makes its calls under that session.
func (l *life) heardFrom(session string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.ContainsFunc(l.beats, func(b beat) bool { return b.session == session && !b.State.Over() })
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
