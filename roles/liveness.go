package roles

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/roles/registry"
)

const (
	messagesLeast     = 512                     // queued messages about one role's workers, at least
	messagesPerWorker = 4                       // queued messages per worker: all may beat, fail and stop at the same time
	suspectAfter      = 1300 * time.Millisecond // a worker that has been silent for this long is probed: it beats once a second
	maxLosses         = 4 * registry.MaxWorld   // remembered losses, for calls sent while they became known
	maxFailures       = 4096                    // failed workers that Deaths returns
	goneAfter         = 800 * time.Millisecond  // a silent worker whose subject has had no subscriber for this long is lost
)

// liveness monitors the workers of one role: their heartbeats, and the exits that their agents publish. A worker that
// reports its failure, whose process has exited, or that is silent for too long is lost, and every call that waits for
// it fails. One goroutine handles all messages, because the last heartbeat of a worker precedes its exit.
type liveness struct {
	cluster *Cluster
	subs    []*bus.Subscription
	msgCh   chan *bus.Msg
	stopCh  chan struct{}
	once    sync.Once
	gens    atomic.Pointer[map[int]uint32] // of replaced ranks; nil: none

	mu      sync.Mutex // guards what follows
	beats   []rankState
	losses  []loss
	failed  []loss        // of workers that did not stop in order
	dropped int           // losses that are no longer in failed
	changed chan struct{} // closed and replaced at each change of state
	probing bool          // silent workers are being probed
}

type rankState struct {
	actors.Heartbeat
	at           time.Time // of the last heartbeat; zero: none is expected yet
	session      string    // of the worker's calls; empty: unknown
	awaitingExit bool      // it has stopped, and the exit from its agent is missing
}

// loss is the end of a worker.
type loss struct {
	rank   int
	gen    uint32
	why    *bus.Error
	failed bool // it did not stop in order

	killed  bool // on request, by SIGKILL: no answer of it is in transit
	evicted bool // an operator stopped it, and it cannot be started on its node again
	guessed bool // concluded from silence: neither the worker nor its agent reported it
}

func newLiveness(c *Cluster) *liveness {
	l := &liveness{
		cluster: c, msgCh: make(chan *bus.Msg, max(messagesLeast, messagesPerWorker*c.rec.World)), stopCh: make(chan struct{}), beats: make([]rankState, c.rec.World),
		changed: make(chan struct{}),
	}
	for len(l.beats) < len(c.rec.Placements) { // ranks that are being added or removed
		l.beats = append(l.beats, rankState{})
	}
	for rank, placed := range c.rec.Placements {
		l.beats[rank].Gen = placed.Gen
	}
	l.publishGensLocked()
	if c.origin != created { // workers of a role that is being created do not beat yet
		l.expectAll()
	}
	return l
}

// subscribe subscribes to heartbeats and exits of the role.
func (l *liveness) subscribe() error {
	to := l.cluster.to
	for _, subject := range []string{to.Life(), to.Exit()} {
		sub, err := l.cluster.rt.bus.SubscribeChan(subject, l.msgCh)
		if err != nil {
			l.stop()
			return err
		}
		l.subs = append(l.subs, sub)
	}
	return nil
}

func (l *liveness) stop() {
	l.once.Do(func() {
		for _, sub := range l.subs {
			_ = sub.Unsubscribe() // fails only on a closed connection
		}
		close(l.stopCh)
	})
}

// expectAll expects heartbeats of every rank from now on, also of one that has never sent any.
func (l *liveness) expectAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	for i := range l.beats {
		if l.beats[i].at.IsZero() && !l.beats[i].State.Over() {
			l.beats[i].at = now
		}
	}
}

// run handles messages about the workers, and detects silence. Silence counts up to the last answer of the server. None counts
// while the server did not answer, or while this process was suspended.
func (l *liveness) run() {
	rt := l.cluster.rt
	t := time.NewTicker(min(rt.cfg.LostAfter/8, suspectAfter/4))
	defer t.Stop()
	listening := time.Now() // since when heartbeats could arrive
	for {
		select {
		case <-l.stopCh:
			return
		case <-rt.ctx.Done():
			return
		case m := <-l.msgCh:
			l.handleMessage(m)
		case now := <-t.C:
			switch since, last := rt.bus.Answering(); {
			case since.IsZero():
				listening = now
			case last.Sub(listening) >= rt.cfg.LostAfter && last.Sub(since) >= rt.cfg.LostAfter:
				l.probeSilent(l.silent(last, suspectAfter))
				l.checkSilence(last, rt.cfg.LostAfter)
			}
		}
	}
}

func (l *liveness) handleMessage(m *bus.Msg) {
	if m.Subject == l.cluster.to.Exit() {
		l.receiveExit(m.Data)
		return
	}
	f, err := wire.ParseFrame(m.Data)
	if err != nil || f.Kind != wire.KindBeat {
		return // not a heartbeat; missing ones are noticed
	}
	var beats []actors.Heartbeat
	if err := wire.Unmarshal(f.Body, &beats); err != nil {
		l.cluster.rt.log.Warn("roles: a malformed heartbeat", "role", l.cluster.Name(), "error", err)
		return
	}
	for _, b := range beats {
		l.handleBeat(b, f.Header.Session)
	}
}

func (l *liveness) handleBeat(b actors.Heartbeat, session string) {
	if b.State == stateRestarting || b.State == stateRestarted { // about restarts, sent by the process that restarts workers
		if session != l.cluster.rt.ep.Session() {
			l.cluster.restartChanged()
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
		return // of an earlier generation, or after the last one
	}
	l.beats[b.Rank] = rankState{Heartbeat: b, at: time.Now(), session: session}
	if old.State != b.State || old.Gen != b.Gen {
		l.changedLocked()
	}
	replaced := old.Gen != b.Gen
	if replaced {
		l.publishGensLocked()
	}
	l.mu.Unlock()
	if replaced { // calls that wait for the earlier worker
		why := bus.Errorf(bus.CodeWorkerLost, "the worker has been replaced")
		why.Role, why.Rank, why.Node = l.cluster.Name(), b.Rank, old.Node
		l.cluster.failCalls(loss{rank: b.Rank, gen: old.Gen, why: why, failed: true})
	}
	switch {
	case b.State == actors.Stopped && l.cluster.Record().Process && !l.cluster.isOver():
		l.awaitExit(b)
	case b.State.Over():
		l.lost(lossOf(b, l.cluster.Name()), true)
	}
	if replaced && l.cluster.Record().ReplacesWorkers() && b.Rank < len(l.cluster.Record().Placements) && l.cluster.Record().Placements[b.Rank].Gen < b.Gen {
		l.cluster.restartChanged() // another process has replaced it
	}
}

// notifyChanged wakes the readers of states.
func (l *liveness) notifyChanged() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.changedLocked()
}

func (l *liveness) changedLocked() {
	close(l.changed)
	l.changed = make(chan struct{})
}

// lossOf is the loss that a worker's last heartbeat reports.
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

// lost records a loss and passes it to the cluster. After the last worker a cluster without an owner is released.
func (l *liveness) lost(one loss, certain bool) {
	l.mu.Lock()
	if len(l.losses) >= maxLosses {
		l.losses = slices.Delete(l.losses, 0, maxLosses/2) // their callers have been told
	}
	l.losses = append(l.losses, one)
	if one.failed || one.killed {
		if len(l.failed) >= maxFailures {
			l.failed, l.dropped = slices.Delete(l.failed, 0, maxFailures/2), l.dropped+maxFailures/2
		}
		l.failed = append(l.failed, one)
		l.changedLocked()
	}
	all := true
	for i := range l.beats {
		all = all && l.beats[i].State.Over()
	}
	l.mu.Unlock()
	l.cluster.workerLost(one, certain)
	if all && (l.cluster.origin == opened || l.cluster.origin == followed) && !l.cluster.Record().ReplacesWorkers() {
		l.cluster.release()
	}
}

// failures returns the workers that did not stop in order, the number of earlier ones that are no longer kept, and a channel that
// is closed at the next change.
func (l *liveness) failures() (failed []loss, dropped int, changedCh <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.failed), l.dropped, l.changed
}

// repeat reports the losses again, for a call that was sent while they became known.
func (l *liveness) repeat() {
	l.mu.Lock()
	losses := l.losses
	l.mu.Unlock()
	for _, one := range losses {
		l.cluster.failCalls(one)
	}
}

// expect expects a new worker of a rank.
func (l *liveness) expect(rank int, gen uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.beats[rank] = rankState{Heartbeat: actors.Heartbeat{Rank: rank, Gen: gen}}
	l.publishGensLocked()
}

// resize monitors at least this many ranks. Removed ranks stay: late messages of them are recognised.
func (l *liveness) resize(world int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for rank := len(l.beats); rank < world; rank++ {
		l.beats = append(l.beats, rankState{Heartbeat: actors.Heartbeat{Rank: rank}})
	}
}

// applyPlacements applies the generations of the registry where they are newer.
func (l *liveness) applyPlacements(placements []registry.RankPlacement) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for rank, placed := range placements {
		if l.beats[rank].Gen < placed.Gen {
			l.beats[rank] = rankState{Heartbeat: actors.Heartbeat{Rank: rank, Gen: placed.Gen}}
		}
	}
	l.publishGensLocked()
}

// retire expects nothing more of a rank.
func (l *liveness) retire(rank int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.beats[rank].State, l.beats[rank].at = actors.Stopped, time.Time{}
}

func (l *liveness) publishGensLocked() {
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

// generations is the generations of replaced ranks, for calls.
func (l *liveness) generations() map[int]uint32 {
	if gens := l.gens.Load(); gens != nil {
		return *gens
	}
	return nil
}

// lossOf is the first known reason of a rank's loss.
func (l *liveness) lossOf(rank int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, one := range l.losses {
		if one.rank == rank && one.gen == l.beats[rank].Gen {
			return one.why
		}
	}
	if b := l.beats[rank].Heartbeat; b.State.Over() { // its last heartbeat is being handled
		return lossOf(b, l.cluster.Name()).why
	}
	return bus.Errorf(bus.CodeWorkerLost, "rank %d is lost", rank)
}

// silent is the ranks whose heartbeat is overdue.
func (l *liveness) silent(now time.Time, limit time.Duration) []int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.probing {
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

// probeSilent probes silent workers. The server answers at once when a worker's subject has no subscriber, because its process
// and connection are gone; a slow or frozen worker keeps its subscription. An answer counts as a heartbeat.
func (l *liveness) probeSilent(ranks []int) {
	if len(ranks) == 0 {
		return
	}
	l.setProbing(true)
	if !l.cluster.rt.spawn(func() { l.probe(ranks) }) {
		l.setProbing(false)
	}
}

func (l *liveness) setProbing(on bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.probing = on
}

func (l *liveness) probe(ranks []int) {
	defer l.setProbing(false)
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
		return // probed again later
	}
	for {
		a, ok, err := g.Next(rt.ctx)
		if err != nil || !ok {
			return
		}
		switch {
		case a.Err == nil:
			l.countAsBeat(a.Rank)
		case errors.Is(a.Err, bus.ErrWorkerLost):
			l.declareLost(a.Rank, bus.Errorf(bus.CodeWorkerLost, "its process is gone: it sent no heartbeat and its subject has no subscriber"))
		}
	}
}

// countAsBeat counts an answer as a heartbeat.
func (l *liveness) countAsBeat(rank int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if b := &l.beats[rank]; !b.at.IsZero() && !b.State.Over() {
		b.at = time.Now()
	}
}

func (l *liveness) checkSilence(now time.Time, limit time.Duration) {
	l.mu.Lock()
	beats := slices.Clone(l.beats)
	l.mu.Unlock()
	for rank, b := range beats {
		if silence := now.Sub(b.at); !b.at.IsZero() && !b.State.Over() && silence > limit {
			l.declareLost(rank, bus.Errorf(bus.CodeWorkerLost, "no heartbeat for %s", silence.Round(100*time.Millisecond)))
		}
	}
}

// declareLost declares a silent worker lost.
func (l *liveness) declareLost(rank int, why *bus.Error) {
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

// states returns the last heartbeat of each rank, and a channel that is closed at the next change.
func (l *liveness) states() ([]actors.Heartbeat, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]actors.Heartbeat, len(l.beats))
	for i, b := range l.beats {
		out[i] = b.Heartbeat
		out[i].Rank = i
	}
	return out, l.changed
}

// notOver is the given ranks that have not ended, and a channel that is closed at the next change.
func (l *liveness) notOver(ranks []int) ([]int, <-chan struct{}) {
	states, changedCh := l.states()
	var left []int
	for _, rank := range ranks {
		if !states[rank].State.Over() {
			left = append(left, rank)
		}
	}
	return left, changedCh
}
