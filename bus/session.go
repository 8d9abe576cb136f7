package bus

import (
	"encoding/binary"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"troupe/bus/wire"

	"github.com/nats-io/nats.go"
)

const (
	// MaxEnvelope is the largest envelope of a frame.
	MaxEnvelope = 16 << 10
	minPayload  = 2 * MaxEnvelope // smallest max_payload of a server
	inboxBytes  = 256 << 20
	// SweepEvery is the time between two sweeps of a session that waits for something.
	SweepEvery = 200 * time.Millisecond
	// GoneAfter is the time without a subscriber after which a process has ended: enough for one to reconnect.
	GoneAfter = 3 * time.Second
)

// Session is the presence of one process in one namespace: a name that is new at each opening, and one inbox for everything that is
// sent to it. Its layers, values (bus/values) and calls (bus/calls), share the inbox and the sweep. It is safe for concurrent use.
type Session struct {
	bus         *Bus
	namespace   string
	name        string
	probePrefix string
	sub         *Subscription

	// These do not change after Start.
	layers  []Layer
	handled map[string]func(*Msg) // by the word after the session in the subject

	mu       sync.Mutex // guards what follows
	stopped  bool       // no goroutine starts any more
	onAbsent []func(session string)

	askCh    chan struct{} // holds one; messages may have been lost: sweep now
	workCh   chan struct{} // holds one; the sweep has work
	closedCh chan struct{}
	closing  sync.Once
	group    sync.WaitGroup
}

// Layer is one part of what a session does. Its functions are called from goroutines of the session, several at a time, and must not block,
// except Close.
type Layer interface {
	// Receive handles a frame, and reports whether its kind is one of this layer. The frame is not kept; its body and the slices of its header may be.
	Receive(f *wire.Frame) bool
	// Absent handles the server's report that the inbox of another session has no subscriber, which may be temporary.
	Absent(session string, now time.Time)
	// Idle reports whether no message can be missing. The sweep sleeps while all layers are idle; WakeSweep ends that.
	Idle() bool
	// Sweep recovers lost messages: it repeats what had no effect. anew: messages may have been lost just now, by a reconnect or because
	// they were dropped.
	Sweep(now time.Time, connected, anew bool)
	// Fail ends what is pending with err, and refuses what is new: the connection or the session has ended. It may be called twice.
	Fail(err error)
	// Close frees what the layer has. Nothing arrives any more, and no goroutine starts; it is called once.
	Close()
}

// NewSession makes a session in the namespace. Layers are made with it and passed to Start.
func (b *Bus) NewSession(namespace string) (*Session, error) {
	if err := CheckName("namespace", namespace); err != nil && namespace != NodesNamespace {
		return nil, err
	}
	s := &Session{
		bus: b, namespace: namespace, name: NewID(), handled: map[string]func(*Msg){},
		askCh: make(chan struct{}, 1), workCh: make(chan struct{}, 1), closedCh: make(chan struct{}),
	}
	if c, ok := ReadCredential(b.cfg.Token); ok && c.Kind == AgentCredential {
		s.name = c.ID // it may hear no other inbox, and has one session
	}
	s.probePrefix = ReplySubject(namespace, s.name, "probe.")
	return s, nil
}

// Handle has messages on troupe.<namespace>.reply.<session>.<word>, and on subjects below it, passed to handle, which must not block. It is
// called before Start.
func (s *Session) Handle(word string, handle func(*Msg)) { s.handled[word] = handle }

// Start opens the inbox. The session lives until it or its Bus is closed. Of several layers, those above come before those that they use.
func (s *Session) Start(layers ...Layer) error {
	s.layers = layers
	var err error
	if s.sub, err = s.bus.subscribe(&Subscription{subject: replyAll(s.namespace, s.name), handle: oneByOne(s.receive), bytes: inboxBytes}); err != nil {
		return err
	}
	s.bus.mu.Lock()
	if s.bus.closed {
		s.bus.mu.Unlock()
		_ = s.sub.Unsubscribe() // fails only on a closed connection
		return Errorf(CodeClosed, "the bus is closed")
	}
	defer s.bus.mu.Unlock()
	s.bus.sessions[s] = struct{}{}
	s.Spawn(s.sweepLoop)
	return nil
}

// Bus is the bus of the session.
func (s *Session) Bus() *Bus { return s.bus }

// Namespace is the namespace of the session.
func (s *Session) Namespace() string { return s.namespace }

// Name is the name of the session, new at each opening.
func (s *Session) Name() string { return s.name }

// Done is closed when the session is being closed.
func (s *Session) Done() <-chan struct{} { return s.closedCh }

// Spawn runs do in a goroutine that Close waits for. It does nothing and reports false if the session is closed.
func (s *Session) Spawn(do func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return false
	}
	s.group.Add(1)
	Go(func() {
		defer s.group.Done()
		do()
	})
	return true
}

// Close fails what is pending, ends the inbox, and closes the layers. It may be called more than once.
func (s *Session) Close() {
	s.bus.mu.Lock()
	delete(s.bus.sessions, s)
	s.bus.mu.Unlock()
	s.fail(Errorf(CodeClosed, "the session is closed"))
	s.closing.Do(func() {
		s.mu.Lock()
		s.stopped = true
		s.mu.Unlock()
		close(s.closedCh)
		_ = s.sub.Unsubscribe() // fails only on a closed connection
		for _, l := range s.layers {
			l.Close()
		}
		s.group.Wait()
	})
}

func (s *Session) fail(err error) {
	for _, l := range s.layers {
		l.Fail(err)
	}
}

var frameBuffers = sync.Pool{New: func() any { b := make([]byte, 0, 4096); return &b }}

// Send publishes one frame. NATS copies the bytes before it returns.
func (s *Session) Send(subject string, f *wire.Frame) error {
	return s.SendWithReply(subject, "", f)
}

// SendWithReply is Send with a subject for what the server or a peer of another version says of the message.
func (s *Session) SendWithReply(subject, reply string, f *wire.Frame) error {
	buf := frameBuffers.Get().(*[]byte)
	*buf = f.Append((*buf)[:0])
	err := s.bus.publish(subject, reply, *buf)
	if cap(*buf) <= 1<<20 {
		frameBuffers.Put(buf)
	}
	return err
}

// SendBody is Send of a frame with a large body, which is not copied where the connection allows it.
func (s *Session) SendBody(subject string, f *wire.Frame) error {
	head := wire.Frame{Kind: f.Kind, Header: f.Header}
	return s.bus.publishBody(subject, head.Append(make([]byte, 0, 128)), f.Body)
}

// Inbox is troupe.<namespace>.reply.<session>.in: the inbox of a session of this namespace.
func (s *Session) Inbox(session string) string { return replyIn(s.namespace, session) }

// Tell publishes a frame to the inbox of another session of the namespace.
func (s *Session) Tell(session string, f *wire.Frame) error { return s.Send(s.Inbox(session), f) }

// TellProbing is Tell, and a probe of the inbox: if it has no subscriber, the layers hear of it (Layer.Absent).
func (s *Session) TellProbing(session string, f *wire.Frame) error {
	return s.SendWithReply(s.Inbox(session), s.probePrefix+session, f)
}

// Probe probes whether the inbox of another session has a subscriber. If not, the layers and the functions of OnAbsent are told; if so, nothing
// happens. The probe may be lost, so callers repeat it.
func (s *Session) Probe(session string) {
	_ = s.TellProbing(session, &wire.Frame{Kind: wire.KindProgress}) // callers repeat it
}

// ProbeInbox probes whether the inbox of a session has a subscriber. If not, the server sends an empty message with the
// status 503 to reply; if so, nothing happens. The probe may be lost, so callers repeat it.
func (b *Bus) ProbeInbox(namespace, session, reply string) {
	if !isName(namespace) || !isName(session) {
		return
	}
	_ = b.publish(replyIn(namespace, session), reply, (&wire.Frame{Kind: wire.KindProgress}).Append(nil))
}

// OnAbsent adds a function that is called when the inbox of a probed session has no subscriber. It runs on the
// goroutine of the inbox and must not block.
func (s *Session) OnAbsent(tell func(session string)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onAbsent = append(s.onAbsent, tell)
}

func (s *Session) inboxAbsent(m *Msg) {
	if len(m.Data) != 0 || m.Header.Get("Status") != "503" {
		return
	}
	session, now := m.Subject[len(s.probePrefix):], time.Now()
	for _, l := range s.layers {
		l.Absent(session, now)
	}
	s.mu.Lock()
	tell := s.onAbsent
	s.mu.Unlock()
	for _, do := range tell {
		do(session)
	}
}

// AnswerVersion sends the local wire version to the sender of a frame of another version. reply is the message's reply
// subject.
func (s *Session) AnswerVersion(reply string) {
	if reply != "" {
		_ = s.Send(reply, &wire.Frame{Kind: wire.KindVersion}) // the caller's next status request repeats it
	}
}

// receive runs on the goroutine of the inbox.
func (s *Session) receive(m *nats.Msg) {
	tail := m.Subject[len(s.probePrefix)-len("probe."):]
	if tail == "in" {
		s.receiveFrame(m.Data)
		return
	}
	if strings.HasPrefix(tail, "probe.") {
		s.inboxAbsent(m)
		return
	}
	word, _, _ := strings.Cut(tail, ".")
	if handle := s.handled[word]; handle != nil {
		handle(m)
		return
	}
	s.bus.Malformed("a message to the inbox", Errorf(CodeMalformed, "the subject %q has no meaning", wire.Clip(m.Subject)))
}

// Listen receives frames on another subject as if they came to the inbox.
func (s *Session) Listen(subject string) (*Subscription, error) {
	handle := oneByOne(func(m *Msg) { s.receiveFrame(m.Data) })
	return s.bus.subscribe(&Subscription{subject: subject, handle: handle, bytes: inboxBytes})
}

// frames are those that are being received: layers take them through an interface, so each would be allocated.
var frames = sync.Pool{New: func() any { return new(wire.Frame) }}

func (s *Session) receiveFrame(data []byte) {
	f := frames.Get().(*wire.Frame)
	defer func() {
		*f = wire.Frame{}
		frames.Put(f)
	}()
	if err := f.Parse(data, nil); err != nil {
		s.bus.Malformed("a message to the inbox", err)
		return
	}
	if f.Kind == wire.KindBundle {
		if !splitBundle(f.Body, s.receiveBundled) {
			s.bus.Malformed("a message to the inbox", Errorf(CodeMalformed, "a bundle is cut off"))
		}
		return
	}
	for _, l := range s.layers {
		if l.Receive(f) {
			return
		}
	}
	s.bus.Malformed("a message to the inbox", Errorf(CodeMalformed, "unknown %s", f.Kind))
}

// receiveBundled handles one frame of a bundle. It refuses nested bundles.
func (s *Session) receiveBundled(data []byte) {
	if len(data) >= wire.HeadSize && wire.Kind(data[3]) == wire.KindBundle {
		s.bus.Malformed("a message to the inbox", Errorf(CodeMalformed, "a bundle in a bundle"))
		return
	}
	s.receiveFrame(data)
}

// splitBundle calls do for each frame of a bundle; it reports false if the bundle is malformed.
func splitBundle(body []byte, do func(frame []byte)) bool {
	for len(body) > 0 {
		if len(body) < 4 {
			return false
		}
		n := int64(binary.BigEndian.Uint32(body))
		if n > int64(len(body)-4) {
			return false
		}
		do(body[4 : 4+n])
		body = body[4+n:]
	}
	return true
}

// sweepNow sweeps at once: after a reconnect, or when messages were dropped.
func (s *Session) sweepNow() { signal(s.askCh) }

// WakeSweep starts the sweep if it sleeps.
func (s *Session) WakeSweep() { signal(s.workCh) }

// signal puts a token into a channel that holds one.
func signal(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// sweepLoop sweeps regularly while a layer waits for something, and at once when messages may have been lost.
func (s *Session) sweepLoop() {
	t := time.NewTimer(rand.N(SweepEvery))
	defer t.Stop()
	for {
		anew := false
		if s.idle() {
			select {
			case <-s.closedCh:
				return
			case <-s.askCh:
				anew = true
			case <-s.workCh:
			}
			t.Reset(SweepEvery)
		}
		if !anew {
			select {
			case <-s.closedCh:
				return
			case <-s.askCh:
				anew = true
			case <-t.C:
				t.Reset(SweepEvery)
			}
		}
		connected, now := s.bus.Connected(), time.Now()
		for _, l := range s.layers {
			l.Sweep(now, connected, anew)
		}
	}
}

func (s *Session) idle() bool {
	for _, l := range s.layers {
		if !l.Idle() {
			return false
		}
	}
	return true
}
