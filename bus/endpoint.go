package bus

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"troupe/bus/wire"

	"github.com/nats-io/nats.go"
)

const (
	maxEnvelope    = 16 << 10        // what a frame's envelope may take of a message
	minPayload     = 2 * maxEnvelope // the smallest message a server must let through
	maxInlineRole  = 8 << 20         // the most bytes of such arguments on their way to one role
	maxInlineReply = 32 << 10        // the largest answer that travels in its frame
	minInlineReply = 1 << 10         // what an answer may always take
	maxInlineIn    = 24 << 20        // the most bytes of such answers on their way to one endpoint
	inboxBytes     = 256 << 20
	sweepEvery     = 200 * time.Millisecond
	maxCancels     = 256 // how many cancels are said again after a reconnect
)

// Endpoint is one process's place in one namespace: the session that its calls carry, the one inbox for all that comes
// back, and the bodies it holds and awaits. Callers and hosts of workers both have one. It is safe for concurrent use.
type Endpoint struct {
	bus         *Bus
	namespace   string
	session     string
	caller      string
	callPrefix  string
	knockPrefix string
	sub         *nats.Subscription
	receipts    *receipts
	store       *store
	sequencers  *sequencers
	bundler     *bundler
	lastGather  atomic.Pointer[Gather] // that was last answered, if it is not over
	onAbsent    atomic.Pointer[func(session string)]
	orders      atomic.Uint64 // the last place that was given, in any role: a role that was forgotten and is called again goes on from there

	mu          sync.Mutex // guards what follows
	seq         uint64     // the last sequence that was given out
	acked       uint64     // every call up to here is over
	pending     map[uint64]*Gather
	inlineIn    int64 // answer bytes that may come unasked
	targets     map[Address]*target
	err         error // why the endpoint is closed
	outageSince time.Time
	cancels     []lastWord  // said lately, and again after a reconnect
	cancelsAt   []time.Time // when: more than once, because the workers' own connections may be back later than ours
	stopped     bool        // no goroutine begins any more

	askCh    chan struct{} // holds one; ask about every pending call now
	workCh   chan struct{} // holds one; there is something to look after
	closedCh chan struct{}
	closing  sync.Once
	group    sync.WaitGroup
}

// Endpoint opens an endpoint in the namespace. It lives until it or its Bus is closed.
func (b *Bus) Endpoint(namespace string) (*Endpoint, error) {
	if err := CheckName("namespace", namespace); err != nil {
		return nil, err
	}
	host, _ := os.Hostname()
	e := &Endpoint{
		bus: b, namespace: namespace, session: NewID(),
		caller:  filepath.Base(os.Args[0]) + "@" + host,
		pending: map[uint64]*Gather{}, targets: map[Address]*target{},
		askCh: make(chan struct{}, 1), workCh: make(chan struct{}, 1), closedCh: make(chan struct{}),
	}
	e.callPrefix, e.knockPrefix = replyCallPrefix(namespace, e.session), replyKnockPrefix(namespace, e.session)
	e.receipts, e.store, e.sequencers, e.bundler = newReceipts(e), newStore(e), newSequencers(e), newBundler(e)
	sub, err := b.nc.Subscribe(replyAll(namespace, e.session), GuardMsg(e.receive))
	if err != nil {
		return nil, natsError("subscribe to the inbox", err)
	}
	if err := sub.SetPendingLimits(-1, inboxBytes); err != nil {
		return nil, natsError("subscribe to the inbox", err)
	}
	e.sub = sub
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		_ = sub.Unsubscribe()
		return nil, Errorf(CodeClosed, "the bus is closed")
	}
	b.endpoints[e] = struct{}{}
	e.spawn(e.sweepLoop)
	e.spawn(e.bundler.loop)
	return e, nil
}

// Bus is the connection the endpoint lives on.
func (e *Endpoint) Bus() *Bus { return e.bus }

// Namespace is the namespace the endpoint lives in.
func (e *Endpoint) Namespace() string { return e.namespace }

// Session is the endpoint's own name, new at each opening.
func (e *Endpoint) Session() string { return e.session }

// spawn runs do in a goroutine that Close waits for. In an endpoint that is closed it does nothing, and reports false.
func (e *Endpoint) spawn(do func()) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stopped {
		return false
	}
	e.group.Add(1)
	Go(func() {
		defer e.group.Done()
		do()
	})
	return true
}

// Close fails every pending call, lets go of every body and ends the subscription. It may be called more than once.
func (e *Endpoint) Close() {
	e.bus.mu.Lock()
	delete(e.bus.endpoints, e)
	e.bus.mu.Unlock()
	e.fail(Errorf(CodeClosed, "the endpoint is closed"))
	e.closing.Do(func() {
		e.mu.Lock()
		e.stopped = true
		e.mu.Unlock()
		close(e.closedCh)
		_ = e.sub.Unsubscribe() // fails only on a closed connection, where there is nothing to end
		e.sequencers.closeAll()
		e.receipts.failAll(ErrClosed)
		e.store.dropAll()
		e.group.Wait()
	})
}

// fail ends every pending call with err and lets no new one begin.
func (e *Endpoint) fail(err error) {
	e.mu.Lock()
	if e.err == nil {
		e.err = err
	}
	all := e.pendingLocked()
	e.mu.Unlock()
	for _, g := range all {
		g.abort(err)
	}
}

func (e *Endpoint) pendingLocked() []*Gather {
	all := make([]*Gather, 0, len(e.pending))
	for _, g := range e.pending {
		all = append(all, g)
	}
	return all
}

var frameBuffers = sync.Pool{New: func() any { b := make([]byte, 0, 4096); return &b }}

// send publishes one frame. NATS copies the bytes before it returns.
func (e *Endpoint) send(subject string, f *wire.Frame) error { return e.sendFrom(subject, "", f) }

func (e *Endpoint) sendFrom(subject, reply string, f *wire.Frame) error {
	buf := frameBuffers.Get().(*[]byte)
	*buf = f.Append((*buf)[:0])
	err := e.bus.publish(subject, reply, *buf)
	if cap(*buf) <= 1<<20 {
		frameBuffers.Put(buf)
	}
	return err
}

// Send publishes a frame that is no call: a host's status or beat.
func (e *Endpoint) Send(subject string, f *wire.Frame) error { return e.send(subject, f) }

// Tell publishes a frame to the inbox of another session in the namespace.
func (e *Endpoint) Tell(session string, f *wire.Frame) error {
	return e.send(replyIn(e.namespace, session), f)
}

// natsError gives an error of NATS one of our codes.
func natsError(doing string, err error) error {
	switch {
	case errors.Is(err, nats.ErrConnectionClosed), errors.Is(err, nats.ErrConnectionDraining):
		return Errorf(CodeClosed, "%s: the connection to the bus is closed (%w)", doing, err)
	case errors.Is(err, nats.ErrReconnectBufExceeded), errors.Is(err, nats.ErrDisconnected), errors.Is(err, nats.ErrConnectionReconnecting):
		return Errorf(CodeUnavailable, "%s: the server cannot be reached at the moment (%w)", doing, err)
	case errors.Is(err, nats.ErrNoResponders):
		e := Errorf(CodeUnavailable, "%s: no process serves it (%w)", doing, err)
		e.AppCode = ErrNoResponders.AppCode
		return e
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, nats.ErrTimeout):
		return Errorf(CodeTimedOut, "%s: %w", doing, err)
	case errors.Is(err, context.Canceled):
		return Errorf(CodeCancelled, "%s: %w", doing, err)
	}
	return Errorf(CodeInternal, "%s: %w", doing, err)
}

// receive runs on the inbox's one goroutine and must not block.
func (e *Endpoint) receive(m *nats.Msg) {
	switch {
	case strings.HasPrefix(m.Subject, e.callPrefix):
		e.receiveAside(m)
	case strings.HasPrefix(m.Subject, e.knockPrefix):
		e.knocked(m)
	default:
		e.receiveFrame(m.Data)
	}
}

func (e *Endpoint) receiveFrame(data []byte) {
	var f wire.Frame
	if err := f.Parse(data, nil); err != nil {
		e.bus.cfg.Logger.Warn("bus: a frame in the inbox cannot be read", "error", err)
		return
	}
	switch f.Kind {
	case wire.KindBundle:
		if !unbundle(f.Body, e.receiveBundled) {
			e.bus.cfg.Logger.Warn("bus: a bundle in the inbox is cut off")
		}
	case wire.KindAnswer:
		e.answered(&f)
	case wire.KindStatus:
		if g := e.gather(f.Header.Seq); g != nil {
			g.status(&f)
		}
	case wire.KindWant:
		e.store.wanted(&f)
	case wire.KindProgress:
		e.store.progressed(&f)
	case wire.KindDone:
		e.store.done(&f)
	case wire.KindGone:
		e.receipts.gone(f.Header.Ref)
	case wire.KindChunk:
		e.Chunk(&f)
	case wire.KindMissing:
		e.missing(&f)
	default:
		e.bus.cfg.Logger.Warn("bus: a frame of an unknown kind in the inbox", "kind", f.Kind.String())
	}
}

// receiveBundled takes one frame of a bundle; a bundle inside a bundle is refused, so that nothing nests.
func (e *Endpoint) receiveBundled(data []byte) {
	if len(data) >= wire.HeadSize && wire.Kind(data[3]) == wire.KindBundle {
		e.bus.cfg.Logger.Warn("bus: a bundle inside a bundle")
		return
	}
	e.receiveFrame(data)
}

// receiveAside takes what does not come from a peer of our version: the server's word that nobody listens, or a
// peer's that it cannot read us.
func (e *Endpoint) receiveAside(m *nats.Msg) {
	seq, part, ok := parseReplyCall(m.Subject[len(e.callPrefix):])
	g := e.gather(seq)
	if !ok || g == nil {
		return
	}
	if len(m.Data) == 0 && m.Header.Get("Status") == "503" {
		g.nobodyListens(part)
		return
	}
	if len(m.Data) >= wire.HeadSize && wire.Kind(m.Data[3]) == wire.KindVersion {
		g.abort(Errorf(CodeVersion, "%s speaks version %d of the wire, this side version %d; run the same major version on both", g.call.To.Role, m.Data[2], wire.Major))
	}
}

// Knock has the server asked whether anybody listens to the inbox of another session. If not, OnAbsent's function is
// told; if so, nothing happens.
func (e *Endpoint) Knock(session string) {
	_ = e.sendFrom(replyIn(e.namespace, session), e.knockPrefix+session, &wire.Frame{Kind: wire.KindProgress}) // whoever knocks does so again
}

// Knock has the server asked whether the inbox of a session has a subscriber: if not, an empty message with the status 503
// comes to reply, and otherwise nothing does. What is lost on the way is asked again by the caller.
func (b *Bus) Knock(namespace, session, reply string) {
	_ = b.publish(replyIn(namespace, session), reply, (&wire.Frame{Kind: wire.KindProgress}).Append(nil))
}

// OnAbsent sets who is told that nobody listens to a session's inbox. tell runs on the inbox's goroutine and must not
// block.
func (e *Endpoint) OnAbsent(tell func(session string)) { e.onAbsent.Store(&tell) }

func (e *Endpoint) knocked(m *nats.Msg) {
	tell := e.onAbsent.Load()
	if tell != nil && len(m.Data) == 0 && m.Header.Get("Status") == "503" {
		(*tell)(m.Subject[len(e.knockPrefix):])
	}
}

// AnswerVersion tells the sender of a frame we cannot read which version we speak. reply is the message's own.
func (e *Endpoint) AnswerVersion(reply string) {
	if reply != "" {
		_ = e.send(reply, &wire.Frame{Kind: wire.KindVersion}) // the caller asks again if this is lost
	}
}

// answered takes in an answer, which is mostly to the same call as the one before.
func (e *Endpoint) answered(f *wire.Frame) {
	g := e.lastGather.Load()
	if g == nil || g.seq != f.Header.Seq {
		if g = e.gather(f.Header.Seq); g != nil {
			e.lastGather.Store(g)
		}
	}
	if g != nil {
		if over := g.answer(f); over {
			e.lastGather.CompareAndSwap(g, nil) // what is over must not stay in memory
		}
		return
	}
	if f.Header.Ref.Owner != "" { // nobody waits for it any more
		e.release(f.Header.Ref, wire.RankSet{})
	}
}

func (e *Endpoint) gather(seq uint64) *Gather {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.pending[seq]
}

// register gives g its sequence, and promises room for its answers.
func (e *Endpoint) register(g *Gather) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.err != nil {
		return e.err
	}
	e.seq++
	g.seq = e.seq
	n := int64(len(g.slots))
	each := min(maxInlineReply, e.bus.nc.MaxPayload()-maxEnvelope, max((maxInlineIn-e.inlineIn)/n, minInlineReply))
	g.inline = uint32(each)
	e.inlineIn += each * n
	e.pending[g.seq] = g
	if len(e.pending) == 1 {
		e.wakeSweep()
	}
	return nil
}

// unregister forgets a gather that is over, and moves the mark up to which every answer is in.
func (e *Endpoint) unregister(g *Gather) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.pending[g.seq] != g {
		return
	}
	delete(e.pending, g.seq)
	e.lastGather.CompareAndSwap(g, nil)
	e.inlineIn -= int64(g.inline) * int64(len(g.slots))
	for e.acked < e.seq && e.pending[e.acked+1] == nil {
		e.acked++
	}
}

// Pending counts the calls that are not over; zero when nothing is under way.
func (e *Endpoint) Pending() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.pending)
}

// Lost fails what every pending call still expects of a rank that is known to be dead. A rank of a later generation
// is another worker and is left alone.
func (e *Endpoint) Lost(to Address, rank int, gen uint32, why error) {
	e.mu.Lock()
	all := e.pendingLocked()
	e.mu.Unlock()
	for _, g := range all {
		if g.call.To == to {
			g.lost(rank, gen, why)
		}
	}
}

// Forget drops what the endpoint remembers of a role that has ended.
func (e *Endpoint) Forget(to Address) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.targets, to)
}

// askNow has every pending call asked about at once: after a reconnect, or when messages were dropped.
func (e *Endpoint) askNow() {
	select {
	case e.askCh <- struct{}{}:
	default:
	}
}

// sweepLoop looks after what was lost: calls nobody answers, bodies that do not move, servers that do not come back.
// It sleeps while nothing is under way.
func (e *Endpoint) sweepLoop() {
	t := time.NewTimer(rand.N(sweepEvery))
	defer t.Stop()
	for {
		anew := false
		if e.idle() {
			select {
			case <-e.closedCh:
				return
			case <-e.askCh:
				anew = true
			case <-e.workCh:
			}
			e.awoke()
			t.Reset(sweepEvery)
		}
		if !anew {
			select {
			case <-e.closedCh:
				return
			case <-e.askCh:
				anew = true
			case <-t.C:
				t.Reset(sweepEvery)
			}
		}
		e.sweep(anew)
	}
}

// awoke forgets an outage that nobody has looked at since.
func (e *Endpoint) awoke() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.outageSince = time.Time{}
}

// idle reports whether nothing can have been lost.
func (e *Endpoint) idle() bool {
	e.mu.Lock()
	pending := len(e.pending) + len(e.cancelsAt)
	e.mu.Unlock()
	return pending == 0 && e.receipts.len() == 0 && !e.store.inUse()
}

// wakeSweep starts the sweep if it sleeps.
func (e *Endpoint) wakeSweep() {
	select {
	case e.workCh <- struct{}{}:
	default:
	}
}

// sweep does all that once. anew: messages may have been lost just now, by a reconnect or because they were dropped.
func (e *Endpoint) sweep(anew bool) {
	connected, now := e.bus.nc.IsConnected(), time.Now()
	e.receipts.sweep(now, connected, anew)
	e.store.remind(now)
	e.repeatCancels(now, connected, anew)
	e.mu.Lock()
	if connected {
		e.outageSince = time.Time{}
	} else if e.outageSince.IsZero() {
		e.outageSince = now
	}
	outage := !connected && now.Sub(e.outageSince) > e.bus.cfg.OutageLimit
	all := e.pendingLocked()
	e.mu.Unlock()
	for _, g := range all {
		switch {
		case outage:
			g.abort(Errorf(CodeUnavailable, "the server has been unreachable for %s%s; the call may or may not have run", e.bus.cfg.OutageLimit, e.bus.away()))
		case connected:
			g.ask(now, anew)
		}
	}
}
