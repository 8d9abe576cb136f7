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

	"troupe/bus/recorder"
	"troupe/bus/wire"

	"github.com/nats-io/nats.go"
)

const (
	maxEnvelope    = 16 << 10        // largest envelope of a frame
	minPayload     = 2 * maxEnvelope // smallest max_payload of a server
	maxInlineRole  = 8 << 20         // bytes of inline arguments in flight to one role
	maxInlineReply = 32 << 10        // largest answer that travels in its frame
	minInlineReply = 1 << 10         // inline limit of an answer that every call allows
	maxInlineIn    = 24 << 20        // bytes of inline answers in flight to one endpoint
	inboxBytes     = 256 << 20
	sweepEvery     = 200 * time.Millisecond
	maxCancels     = 256 // cancels that are sent again after a reconnect
)

// Endpoint is the presence of one process in one namespace: the session of its calls, one inbox for all answers, and
// its uploads and downloads. Callers and hosts of workers both have one. It is safe for concurrent use.
type Endpoint struct {
	bus         *Bus
	namespace   string
	session     string
	caller      string
	callPrefix  string
	probePrefix string
	texts       endpointTexts
	timeline    string // subject of requests for the flight recorder
	sub         *nats.Subscription
	downloads   *downloads
	uploads     *uploads
	references  *References
	sequencers  *sequencers
	batcher     *answerBatcher
	traffic     traffic
	lastGather  atomic.Pointer[Gather] // of the last answer, if it is not over
	onAbsent    atomic.Pointer[func(session string)]

	forgetRecords func() // ends the reports of pending calls to the flight recorder

	orders atomic.Uint64 // the last position that was assigned, in any role: it continues when a forgotten role is called again

	mu          sync.Mutex // guards what follows
	seq         uint64     // the last sequence that was assigned
	acked       uint64     // every call up to here is over
	pending     map[uint64]*Gather
	inlineIn    int64 // bytes of inline answers that may arrive
	senders     map[Address]*roleSender
	err         error // the reason for closing
	outageSince time.Time
	cancels     []cancelFrame // the last cancels, sent again after a reconnect
	cancelsAt   []time.Time   // times of the repetitions; several, because workers may reconnect later
	stopped     bool          // no goroutine starts any more

	askCh    chan struct{} // holds one; request the status of every pending call now
	workCh   chan struct{} // holds one; the sweep has work
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
		pending: map[uint64]*Gather{}, senders: map[Address]*roleSender{},
		askCh: make(chan struct{}, 1), workCh: make(chan struct{}, 1), closedCh: make(chan struct{}),
	}
	e.callPrefix, e.probePrefix = replyCallPrefix(namespace, e.session), replyProbePrefix(namespace, e.session)
	e.timeline = replyTimeline(namespace, e.session)
	e.texts = endpointTexts{recorder.TextOf(namespace), recorder.TextOf(e.session)}
	e.downloads, e.uploads, e.sequencers, e.batcher = newDownloads(e), newUploads(e), newSequencers(e), newAnswerBatcher(e)
	e.references = newReferences(e)
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
	e.spawn(e.batcher.loop)
	e.spawn(e.reportLoop)
	e.forgetRecords = recorder.Register(recorder.Source{OpenFunc: e.openRecords})
	return e, nil
}

// Bus is the bus of the endpoint.
func (e *Endpoint) Bus() *Bus { return e.bus }

// Namespace is the namespace of the endpoint.
func (e *Endpoint) Namespace() string { return e.namespace }

// Session is the name of the endpoint, new at each opening.
func (e *Endpoint) Session() string { return e.session }

// spawn runs do in a goroutine that Close waits for. It does nothing and reports false if the endpoint is closed.
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

// Close fails every pending call, ends every upload and download, and unsubscribes. It may be called more than once.
func (e *Endpoint) Close() {
	e.bus.mu.Lock()
	delete(e.bus.endpoints, e)
	e.bus.mu.Unlock()
	e.fail(Errorf(CodeClosed, "the endpoint is closed"))
	e.closing.Do(func() {
		e.references.Close()
		e.mu.Lock()
		e.stopped = true
		e.mu.Unlock()
		close(e.closedCh)
		e.forgetRecords()
		_ = e.sub.Unsubscribe() // fails only on a closed connection
		e.sequencers.closeAll()
		e.downloads.failAll(ErrClosed)
		e.uploads.dropAll()
		e.group.Wait()
	})
}

// fail ends every pending call with err and refuses new ones.
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
	if path, ok := pathOf(f.Kind); ok && err == nil {
		e.countSent(path, int64(len(f.Body)))
	}
	if cap(*buf) <= 1<<20 {
		frameBuffers.Put(buf)
	}
	return err
}

// sendChunk publishes a chunk of a body, without a copy where the connection allows it.
func (e *Endpoint) sendChunk(subject string, f *wire.Frame) error {
	head := wire.Frame{Kind: f.Kind, Header: f.Header}
	err := e.bus.publishBody(subject, head.Append(make([]byte, 0, 128)), f.Body)
	if err == nil {
		e.countSent(PathChunks, int64(len(f.Body)))
	}
	return err
}

// Send publishes a frame that is not a call: a host's status or heartbeat.
func (e *Endpoint) Send(subject string, f *wire.Frame) error { return e.send(subject, f) }

// Tell publishes a frame to the inbox of another session of the namespace.
func (e *Endpoint) Tell(session string, f *wire.Frame) error {
	return e.send(replyIn(e.namespace, session), f)
}

// natsError converts an error of NATS into an *Error.
func natsError(doing string, err error) error {
	switch {
	case errors.Is(err, nats.ErrConnectionClosed), errors.Is(err, nats.ErrConnectionDraining):
		return Errorf(CodeClosed, "%s: the connection to the bus is closed (%w)", doing, err)
	case errors.Is(err, nats.ErrReconnectBufExceeded), errors.Is(err, nats.ErrDisconnected), errors.Is(err, nats.ErrConnectionReconnecting):
		return Errorf(CodeUnavailable, "%s: the server is unreachable (%w)", doing, err)
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

// receive runs on the goroutine of the inbox and must not block.
func (e *Endpoint) receive(m *nats.Msg) {
	switch {
	case strings.HasPrefix(m.Subject, e.callPrefix):
		e.receiveAside(m)
	case strings.HasPrefix(m.Subject, e.probePrefix):
		e.inboxAbsent(m)
	case m.Subject == e.timeline:
		e.spawn(func() { e.answerTimeline(m) })
	default:
		e.receiveFrame(m.Data)
	}
}

func (e *Endpoint) receiveFrame(data []byte) {
	var f wire.Frame
	if err := f.Parse(data, nil); err != nil {
		e.bus.cfg.Logger.Warn("bus: the inbox received a malformed frame", "error", err)
		return
	}
	if f.Kind == wire.KindAnswer || f.Kind == wire.KindResolved {
		e.CountReceived(PathInline, int64(len(f.Body)))
	}
	switch f.Kind {
	case wire.KindBundle:
		if !splitBundle(f.Body, e.receiveBundled) {
			e.bus.cfg.Logger.Warn("bus: the inbox received a malformed bundle")
		}
	case wire.KindAnswer:
		e.answered(&f)
	case wire.KindStatus:
		if g := e.gather(f.Header.Seq); g != nil {
			g.status(&f)
		}
	case wire.KindWant:
		e.uploads.wanted(&f)
	case wire.KindProgress:
		e.uploads.progressed(&f)
	case wire.KindDone:
		e.uploads.done(&f)
	case wire.KindGone:
		e.downloads.gone(f.Header.Ref)
	case wire.KindChunk:
		e.Chunk(&f)
	case wire.KindMissing:
		e.missing(&f)
	case wire.KindResolve, wire.KindResolved, wire.KindHold, wire.KindDrop, wire.KindHeld, wire.KindFree, wire.KindKept, wire.KindHandOver:
		e.references.receive(&f)
	default:
		e.bus.cfg.Logger.Warn("bus: the inbox received a frame of an unknown kind", "kind", f.Kind.String())
	}
}

// receiveBundled handles one frame of a bundle. It refuses nested bundles.
func (e *Endpoint) receiveBundled(data []byte) {
	if len(data) >= wire.HeadSize && wire.Kind(data[3]) == wire.KindBundle {
		e.bus.cfg.Logger.Warn("bus: the inbox received a nested bundle")
		return
	}
	e.receiveFrame(data)
}

// receiveAside handles messages that are not frames of this version: the server's "no responders", and a peer's answer
// that it uses another version.
func (e *Endpoint) receiveAside(m *nats.Msg) {
	seq, part, ok := parseReplyCall(m.Subject[len(e.callPrefix):])
	g := e.gather(seq)
	if !ok || g == nil {
		return
	}
	if len(m.Data) == 0 && m.Header.Get("Status") == "503" {
		g.noResponders(part)
		return
	}
	if len(m.Data) >= wire.HeadSize && wire.Kind(m.Data[3]) == wire.KindVersion {
		g.abort(Errorf(CodeVersion, "%s uses version %d of the wire, this process version %d; run the same major version on both", g.call.To.Role, m.Data[2], wire.Major))
	}
}

// ProbeInbox probes whether the inbox of another session has a subscriber. If not, the function of OnAbsent is called;
// if so, nothing happens. The probe may be lost, so callers repeat it.
func (e *Endpoint) ProbeInbox(session string) {
	_ = e.sendFrom(replyIn(e.namespace, session), e.probePrefix+session, &wire.Frame{Kind: wire.KindProgress}) // callers repeat it
}

// ProbeInbox probes whether the inbox of a session has a subscriber. If not, the server sends an empty message with the
// status 503 to reply; if so, nothing happens. The probe may be lost, so callers repeat it.
func (b *Bus) ProbeInbox(namespace, session, reply string) {
	_ = b.publish(replyIn(namespace, session), reply, (&wire.Frame{Kind: wire.KindProgress}).Append(nil))
}

// OnAbsent sets the function that is called when the inbox of a probed session has no subscriber. It runs on the
// goroutine of the inbox and must not block.
func (e *Endpoint) OnAbsent(tell func(session string)) { e.onAbsent.Store(&tell) }

func (e *Endpoint) inboxAbsent(m *nats.Msg) {
	if len(m.Data) != 0 || m.Header.Get("Status") != "503" {
		return
	}
	session := m.Subject[len(e.probePrefix):]
	e.downloads.absent(session, time.Now())
	e.references.absent(session, time.Now())
	if tell := e.onAbsent.Load(); tell != nil {
		(*tell)(session)
	}
}

// AnswerVersion sends the local wire version to the sender of a frame of another version. reply is the message's reply
// subject.
func (e *Endpoint) AnswerVersion(reply string) {
	if reply != "" {
		_ = e.send(reply, &wire.Frame{Kind: wire.KindVersion}) // the caller's next status request repeats it
	}
}

// answered handles an answer, which is mostly to the same call as the one before.
func (e *Endpoint) answered(f *wire.Frame) {
	g := e.lastGather.Load()
	if g == nil || g.seq != f.Header.Seq {
		if g = e.gather(f.Header.Seq); g != nil {
			e.lastGather.Store(g)
		}
	}
	if g != nil {
		if over := g.answer(f); over {
			e.lastGather.CompareAndSwap(g, nil) // do not keep a finished call in memory
		}
		return
	}
	e.refuse(&f.Header)
}

// refuse ends the body of an answer that is not needed: the call is over, or the answer is a repeat.
func (e *Endpoint) refuse(h *wire.Header) {
	switch {
	case h.Ref.Owner == "":
	case h.Keep:
		e.references.discard(h.Ref)
	default:
		e.release(h.Ref, wire.RankSet{})
	}
}

func (e *Endpoint) gather(seq uint64) *Gather {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.pending[seq]
}

// register assigns the sequence of g, and reserves inline bytes for its answers.
func (e *Endpoint) register(g *Gather) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.err != nil {
		return e.err
	}
	e.seq++
	g.seq = e.seq
	n := int64(len(g.slots))
	each := min(maxInlineReply, int64(e.bus.MaxPayload()-maxEnvelope), max((maxInlineIn-e.inlineIn)/n, minInlineReply))
	g.inline = uint32(each)
	e.inlineIn += each * n
	e.pending[g.seq] = g
	if len(e.pending) == 1 {
		g.only = true
		e.wakeSweep()
	}
	return nil
}

// unregister removes a finished gather, and advances acked.
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

// Pending counts the calls that are not over.
func (e *Endpoint) Pending() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.pending)
}

// Lost fails every pending call for a rank that is known to be dead. Calls to a later generation of the rank are not
// affected.
func (e *Endpoint) Lost(to Address, rank int, gen uint32, why error) {
	e.mu.Lock()
	all := e.pendingLocked()
	e.mu.Unlock()
	for _, g := range all {
		if g.call.To == to {
			g.lost(rank, gen, why)
		}
	}
	e.references.lost(to, rank, gen, why)
}

// Forget removes the state of a role that has ended.
func (e *Endpoint) Forget(to Address) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.senders, to)
}

// askNow requests the status of every pending call: after a reconnect, or when messages were dropped.
func (e *Endpoint) askNow() {
	select {
	case e.askCh <- struct{}{}:
	default:
	}
}

// sweepLoop recovers lost messages: it requests the status of calls without an answer, repeats requests of stalled
// downloads, and fails calls after a long outage. It sleeps while no call is pending.
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

// awoke clears an outage that began before the sweep slept.
func (e *Endpoint) awoke() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.outageSince = time.Time{}
}

// idle reports whether no message can be missing.
func (e *Endpoint) idle() bool {
	e.mu.Lock()
	pending := len(e.pending) + len(e.cancelsAt)
	e.mu.Unlock()
	return pending == 0 && e.downloads.len() == 0 && !e.uploads.inUse() && !e.references.active()
}

// wakeSweep starts the sweep if it sleeps.
func (e *Endpoint) wakeSweep() {
	select {
	case e.workCh <- struct{}{}:
	default:
	}
}

// sweep runs once. anew: messages may have been lost just now, by a reconnect or because they were dropped.
func (e *Endpoint) sweep(anew bool) {
	connected, now := e.bus.Connected(), time.Now()
	e.downloads.sweep(now, connected, anew)
	e.uploads.remind(now)
	e.references.sweep(now, connected, anew)
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
