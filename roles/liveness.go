package roles

import (
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/calls"
	"troupe/bus/wire"
	"troupe/nodes/evidence"
	"troupe/roles/life"
	"troupe/roles/registry"
)

const (
	messagesLeast     = 512 // queued messages about one role's workers, at least
	messagesPerWorker = 4   // queued messages per worker: all may beat, fail and stop at the same time
)

// liveness is the evidence of one role's workers: their heartbeats, the exits that their agents publish, and silence. It reports
// all of it to the life of the role. One goroutine handles all messages, because the last heartbeat of a worker precedes its
// exit.
type liveness struct {
	cluster *Cluster
	subs    []*bus.Subscription
	msgCh   chan *bus.Msg
	stopCh  chan struct{}
	once    sync.Once

	mu      sync.Mutex // guards what follows
	signs   []lifeSign // by rank
	probing bool       // silent workers are being probed
}

// lifeSign is the last that was heard of a worker. It counts if its generation is the rank's.
type lifeSign struct {
	actors.Heartbeat
	at      time.Time // zero: nothing is expected of it yet
	session string    // of the worker's calls; empty: unknown
}

func newLiveness(c *Cluster) *liveness {
	l := &liveness{cluster: c, msgCh: make(chan *bus.Msg, max(messagesLeast, messagesPerWorker*c.record.rec.World)), stopCh: make(chan struct{})}
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
	if l.cluster.origin == created && l.cluster.Record().Process {
		serves := map[string]func(*bus.Msg){ownerSubject(to): l.cluster.members.serve, storeSubject(to): l.cluster.members.serveStore}
		for subject, serve := range serves {
			sub, err := l.cluster.rt.bus.Subscribe(subject, serve)
			if err != nil {
				l.stop()
				return err
			}
			l.subs = append(l.subs, sub)
		}
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
	ranks, _ := l.cluster.life.ranks()
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	for rank, k := range ranks {
		if sign := l.signLocked(rank); sign.Gen < k.Gen || sign.at.IsZero() {
			*sign = lifeSign{Heartbeat: actors.Heartbeat{Rank: rank, Gen: k.Gen}, at: now}
		}
	}
}

// signLocked is the sign of a rank.
func (l *liveness) signLocked(rank int) *lifeSign {
	for len(l.signs) <= rank {
		l.signs = append(l.signs, lifeSign{})
	}
	return &l.signs[rank]
}

// run handles messages about the workers, and detects silence. Silence counts up to the last answer of the server. None counts
// while the server did not answer, or while this process was suspended.
func (l *liveness) run() {
	rt := l.cluster.rt
	t := time.NewTicker(min(rt.cfg.LostAfter/8, evidence.WorkerSuspect/4))
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
			since, last := rt.bus.Answering()
			if since.IsZero() {
				listening = now
				continue
			}
			heard := min(last.Sub(listening), last.Sub(since))
			if heard >= rt.cfg.LostAfter {
				l.probeSilent(slices.Sorted(maps.Keys(l.silent(last, evidence.WorkerSuspect))))
			}
			if after := rt.cfg.LostAfter; heard >= min(after, l.cluster.stallAfter(after)) {
				l.cluster.members.watchStalls(last)
			}
			for rank, silence := range l.silent(last, rt.cfg.LostAfter) {
				l.judge(rank, evidence.Signs{Silence: silence, Heard: heard})
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

// said is what a state in a heartbeat means.
var said = map[actors.State]life.Kind{
	actors.Created: life.SaysLoading, actors.Initialising: life.SaysLoading, actors.Ready: life.SaysReady, actors.Stopping: life.SaysStopping,
	actors.Stopped: life.SaysStopped, actors.Failed: life.SaysFailed,
}

func (l *liveness) handleBeat(b actors.Heartbeat, session string) {
	c := l.cluster
	if b.State == stateRestarting || b.State == stateRestarted || b.State == stateResized { // sent by the process that changed the record
		if session != c.rt.ep.Session() {
			c.restartChanged()
		}
		return
	}
	if b.State == actors.Ready && b.Rank >= c.WorldSize() && b.Rank < registry.MaxWorld && c.origin != created {
		c.rt.spawn(func() { c.performer.reloadRecord() }) // another process may have grown the role
	}
	k, known := c.life.rank(b.Rank)
	if !known || b.Gen < k.Gen || b.Gen == k.Gen && k.State.Over() {
		return // of an earlier generation, or after the last one
	}
	l.mu.Lock()
	*l.signLocked(b.Rank) = lifeSign{Heartbeat: b, at: time.Now(), session: session}
	l.mu.Unlock()
	if kind, ok := said[b.State]; ok {
		c.life.feed(life.Event{Kind: kind, Rank: b.Rank, Gen: b.Gen, Loss: life.Loss{Why: lossOf(b, c.Name())}})
	}
}

// lossOf is the loss that a worker's last heartbeat reports; nil: it is not the last.
func lossOf(b actors.Heartbeat, role string) error {
	var why *bus.Error
	switch {
	case !b.State.Over():
		return nil
	case b.State == actors.Stopped:
		why = bus.Errorf(bus.CodeWorkerLost, "the worker has stopped")
	case b.Err == nil:
		why = bus.Errorf(bus.CodeWorkerLost, "the worker failed")
	default:
		why = bus.Errorf(bus.CodeWorkerLost, "the worker failed: %s", b.Err.Message).WithCause(b.Err)
		why.Stack, why.Details = b.Err.Stack, b.Err.Details
	}
	why.Role, why.Rank, why.Node = role, b.Rank, b.Node
	return why
}

// silent is the ranks whose heartbeat is overdue, and for how long.
func (l *liveness) silent(now time.Time, limit time.Duration) map[int]time.Duration {
	ranks, _ := l.cluster.life.ranks()
	l.mu.Lock()
	defer l.mu.Unlock()
	out := map[int]time.Duration{}
	for rank, sign := range l.signs {
		if silence := now.Sub(sign.at); rank < len(ranks) && !ranks[rank].State.Over() && sign.Gen == ranks[rank].Gen && !sign.at.IsZero() && silence > limit {
			out[rank] = silence
		}
	}
	return out
}

// probeSilent probes silent workers. The server answers at once when a worker's subject has no subscriber, because its process
// and connection are gone; a slow or frozen worker keeps its subscription. An answer counts as a heartbeat.
func (l *liveness) probeSilent(ranks []int) {
	if len(ranks) > 0 && !l.setProbing(true) && !l.cluster.rt.spawn(func() { l.probe(ranks) }) {
		l.setProbing(false)
	}
}

func (l *liveness) setProbing(on bool) (before bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before, l.probing = l.probing, on
	return before
}

func (l *liveness) probe(ranks []int) {
	defer l.setProbing(false)
	rt, to := l.cluster.rt, l.cluster.to
	parts := make([]calls.Part, len(ranks))
	for i, rank := range ranks {
		parts[i] = calls.Part{Scope: calls.OneRank(rank), Ranks: []int{rank}}
	}
	g, err := rt.ep.Scatter(rt.ctx, calls.Call{
		To: to, Method: actors.VerbProbe, Control: true, World: l.cluster.WorldSize(), Parts: parts, Gens: l.cluster.life.generations(),
		Timeout: 2 * evidence.WorkerAbsent, AskAfter: evidence.WorkerAbsent / 4, GoneAfter: evidence.WorkerAbsent,
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
			l.judge(a.Rank, evidence.Signs{Absent: evidence.WorkerAbsent, Heard: rt.cfg.LostAfter})
		}
	}
}

// countAsBeat counts an answer as a heartbeat.
func (l *liveness) countAsBeat(rank int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if sign := l.signLocked(rank); !sign.at.IsZero() {
		sign.at = time.Now()
	}
}

// judge declares a worker lost if the signs say so.
func (l *liveness) judge(rank int, s evidence.Signs) {
	if v := evidence.Judge(s, evidence.Limits{Silence: l.cluster.rt.cfg.LostAfter, Absent: evidence.WorkerAbsent}); v.Dead {
		l.declareLost(rank, bus.Errorf(bus.CodeWorkerLost, "%s", v.Why))
	}
}

// declareLost declares a silent worker lost.
func (l *liveness) declareLost(rank int, why *bus.Error) {
	l.mu.Lock()
	sign := *l.signLocked(rank)
	l.mu.Unlock()
	why.Role, why.Rank, why.Node = l.cluster.Name(), rank, sign.Node
	l.cluster.life.feed(life.Event{Kind: life.Silent, Rank: rank, Gen: sign.Gen, Loss: life.Loss{Why: why, Guessed: true}})
}

// health is the last heartbeat of each of so many ranks.
func (l *liveness) health(world int) []actors.Heartbeat {
	ranks, _ := l.cluster.life.ranks()
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]actors.Heartbeat, min(world, len(ranks)))
	for rank := range out {
		k, b := ranks[rank], l.signLocked(rank).Heartbeat
		if b.Gen != k.Gen {
			b = actors.Heartbeat{Gen: k.Gen}
		}
		b.Rank = rank
		switch {
		case k.State == life.Lost && b.State != actors.Failed:
			b.State, b.Err = actors.Failed, bus.AsError(k.Loss.Why)
		case k.State.Over() && !b.State.Over():
			b.State = actors.Stopped
		}
		out[rank] = b
	}
	return out
}
