package calls

import (
	"cmp"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"troupe/bus"
	"troupe/bus/recorder"
	"troupe/bus/values"
	"troupe/bus/wire"

	"github.com/nats-io/nats.go"
)

const (
	maxInlineRole  = 8 << 20  // bytes of inline arguments in flight to one role
	maxInlineReply = 32 << 10 // largest answer that travels in its frame
	minInlineReply = 1 << 10  // inline limit of an answer that every call allows
	maxInlineIn    = 24 << 20 // bytes of inline answers in flight to one endpoint
	maxCancels     = 256      // cancels that are sent again after a reconnect
)

// Endpoint is what one process has of calls in one namespace: the calls that it makes, and the answers of its workers. It has the session, and
// its store of values. Callers and hosts of workers both have one. It is safe for concurrent use.
type Endpoint struct {
	session    *bus.Session
	values     *values.Store
	caller     string
	callPrefix string
	texts      endpointTexts
	sequencers *sequencers
	batcher    *answerBatcher
	lastGather atomic.Pointer[Gather] // of the last answer, if it is not over

	forgetRecords func() // ends the reports of pending calls to the flight recorder

	orders atomic.Uint64 // the last position that was assigned, in any role: it continues when a forgotten role is called again

	mu          sync.Mutex // guards what follows
	seq         uint64     // the last sequence that was assigned
	acked       uint64     // every call up to here is over
	pending     map[uint64]*Gather
	inlineIn    int64 // bytes of inline answers that may arrive
	senders     map[bus.Address]*roleSender
	err         error         // the reason for closing
	outageSince time.Time     // since calls are pending; zero: the server can be reached
	cancels     []cancelFrame // the last cancels, sent again after a reconnect
	cancelsAt   []time.Time   // times of the repetitions; several, because workers may reconnect later
}

// Open opens a session in the namespace with values and calls. It lives until it or its Bus is closed.
func Open(b *bus.Bus, namespace string) (*Endpoint, error) {
	session, err := b.NewSession(namespace)
	if err != nil {
		return nil, err
	}
	host, _ := os.Hostname()
	e := &Endpoint{
		session: session, values: values.New(session),
		caller:  filepath.Base(os.Args[0]) + "@" + host,
		pending: map[uint64]*Gather{}, senders: map[bus.Address]*roleSender{},
		callPrefix: replyCallPrefix(namespace, session.Name()),
		texts:      endpointTexts{recorder.TextOf(namespace), recorder.TextOf(session.Name())},
	}
	e.sequencers, e.batcher = newSequencers(e), newAnswerBatcher(e)
	session.Handle("call", e.receiveAside)
	session.Handle("timeline", func(m *bus.Msg) { session.Spawn(func() { e.answerTimeline(m) }) })
	e.forgetRecords = recorder.Register(recorder.Source{OpenFunc: e.openRecords})
	if err := session.Start(layer{e}, e.values); err != nil {
		e.forgetRecords()
		return nil, err
	}
	session.Spawn(e.batcher.loop)
	e.values.ReportTraffic(func() []values.PendingCalls { return e.pendingCalls(time.Now()) })
	return e, nil
}

// Bus is the bus of the endpoint.
func (e *Endpoint) Bus() *bus.Bus { return e.session.Bus() }

// Namespace is the namespace of the endpoint.
func (e *Endpoint) Namespace() string { return e.session.Namespace() }

// Session is the name of the endpoint's session, new at each opening.
func (e *Endpoint) Session() string { return e.session.Name() }

// Values is the store of the session's values, and References are its references.
func (e *Endpoint) Values() *values.Store          { return e.values }
func (e *Endpoint) References() *values.References { return e.values.References() }

// Close fails every pending call, ends every upload and download, and the session. It may be called more than once.
func (e *Endpoint) Close() { e.session.Close() }

// layer is the endpoint as a layer of its session.
type layer struct{ e *Endpoint }

// Receive handles answers, their status, and reports of missing calls.
func (l layer) Receive(f *wire.Frame) bool {
	switch f.Kind {
	case wire.KindAnswer:
		l.e.values.CountReceived(values.PathInline, int64(len(f.Body)))
		l.e.answered(f)
	case wire.KindStatus:
		if g := l.e.gather(f.Header.Seq); g != nil {
			g.status(f)
		}
	case wire.KindMissing:
		l.e.missing(f)
	default:
		return false
	}
	return true
}

// Absent does nothing: calls are addressed to roles, whose subjects tell by themselves that there is no subscriber.
func (layer) Absent(string, time.Time) {}

func (l layer) Idle() bool {
	l.e.mu.Lock()
	defer l.e.mu.Unlock()
	return len(l.e.pending)+len(l.e.cancelsAt) == 0
}

// Sweep requests the status of calls without an answer, and fails calls after a long outage.
func (l layer) Sweep(now time.Time, connected, anew bool) {
	e, limit := l.e, l.e.Bus().OutageLimit()
	e.repeatCancels(now, connected, anew)
	e.mu.Lock()
	if connected {
		e.outageSince = time.Time{}
	} else if e.outageSince.IsZero() {
		e.outageSince = now
	}
	outage := !connected && now.Sub(e.outageSince) > limit
	all := e.pendingLocked()
	e.mu.Unlock()
	for _, g := range all {
		switch {
		case outage:
			g.abort(bus.Errorf(bus.CodeUnavailable, "the server has been unreachable for %s%s; the call may or may not have run", limit, e.Bus().Away()))
		case connected:
			g.ask(now, anew)
		}
	}
}

// Fail ends every pending call with err and refuses new ones.
func (l layer) Fail(err error) {
	l.e.mu.Lock()
	if l.e.err == nil {
		l.e.err = err
	}
	all := l.e.pendingLocked()
	l.e.mu.Unlock()
	for _, g := range all {
		g.abort(err)
	}
}

func (l layer) Close() {
	l.e.forgetRecords()
	l.e.sequencers.closeAll()
}

func (e *Endpoint) pendingLocked() []*Gather {
	all := make([]*Gather, 0, len(e.pending))
	for _, g := range e.pending {
		all = append(all, g)
	}
	return all
}

// Send publishes a frame that is not a call: a host's status or heartbeat.
func (e *Endpoint) Send(subject string, f *wire.Frame) error { return e.session.Send(subject, f) }

// Tell publishes a frame to the inbox of another session of the namespace.
func (e *Endpoint) Tell(session string, f *wire.Frame) error { return e.session.Tell(session, f) }

// Probe and OnAbsent are those of the session.
func (e *Endpoint) Probe(session string)               { e.session.Probe(session) }
func (e *Endpoint) OnAbsent(tell func(session string)) { e.session.OnAbsent(tell) }

// AnswerVersion is that of the session.
func (e *Endpoint) AnswerVersion(reply string) { e.session.AnswerVersion(reply) }

// Traffic returns the bytes that the session has sent and received, and its pending calls.
func (e *Endpoint) Traffic() values.TrafficReport {
	r := e.values.Traffic()
	r.Pending = e.pendingCalls(time.Now())
	return r
}

// sendCall publishes a frame with arguments.
func (e *Endpoint) sendCall(subject, reply string, f *wire.Frame) error {
	err := e.session.SendWithReply(subject, reply, f)
	if err == nil {
		e.values.CountSent(values.PathInline, int64(len(f.Body)))
	}
	return err
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
		g.abort(bus.Errorf(bus.CodeVersion, "%s uses version %d of the wire, this process version %d; run the same major version on both", g.call.To.Role, m.Data[2], wire.Major))
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
		e.References().Discard(h.Ref)
	default:
		e.values.Release(h.Ref, wire.RankSet{})
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
	each := min(maxInlineReply, int64(e.Bus().MaxPayload()-bus.MaxEnvelope), max((maxInlineIn-e.inlineIn)/n, minInlineReply))
	g.inline = uint32(each)
	e.inlineIn += each * n
	e.pending[g.seq] = g
	if len(e.pending) == 1 {
		g.only, e.outageSince = true, time.Time{} // an outage counts while calls are pending
		e.session.WakeSweep()
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
func (e *Endpoint) Lost(to bus.Address, rank int, gen uint32, why error) {
	e.mu.Lock()
	all := e.pendingLocked()
	e.mu.Unlock()
	for _, g := range all {
		if g.call.To == to {
			g.lost(rank, gen, why)
		}
	}
	e.References().Lost(to, rank, gen, why)
}

// Forget removes the state of a role that has ended.
func (e *Endpoint) Forget(to bus.Address) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.senders, to)
}

// pendingCalls counts the pending calls by role. Control verbs and probes are left out: they are no work.
func (e *Endpoint) pendingCalls(now time.Time) []values.PendingCalls {
	e.mu.Lock()
	all := e.pendingLocked()
	e.mu.Unlock()
	byRole := map[string]*values.PendingCalls{}
	for _, g := range all {
		if g.call.Control {
			continue
		}
		p := byRole[g.call.To.Role]
		if p == nil {
			p = &values.PendingCalls{Role: g.call.To.Role}
			byRole[p.Role] = p
		}
		g.mu.Lock()
		p.Calls, p.Oldest = p.Calls+1, max(p.Oldest, now.Sub(g.sentAt))
		g.mu.Unlock()
	}
	out := make([]values.PendingCalls, 0, len(byRole))
	for _, p := range byRole {
		out = append(out, *p)
	}
	slices.SortFunc(out, func(a, b values.PendingCalls) int { // the oldest first: they are kept where there are too many
		return cmp.Or(cmp.Compare(b.Oldest, a.Oldest), cmp.Compare(a.Role, b.Role))
	})
	return out[:min(len(out), values.MaxPendingRoles)]
}
