package actors

import (
	"errors"
	"sync"
	"time"
	"troupe/bus"
	"troupe/bus/recorder"
	"troupe/bus/wire"
)

const (
	defaultQueueLimit = 10_000
	maxUnfetched      = 512 << 20 // bytes of large answers that are not fetched; above it no call starts
	maxStack          = 8 << 10
	maxMessage        = 16 << 10
	maxWord           = 64
	minErrorRoom      = 1 << 10         // an error may always take this much
	defaultEndGrace   = 2 * time.Second // time for cancelled calls to end, and for objects to close
)

// Worker is one rank of a role. Its host passes calls to it. It is safe for concurrent use.
type Worker struct {
	spec  WorkerSpec
	host  *Host
	class *Class
	texts workerTexts

	doneCh    chan struct{} // closed when the state is final
	idleCh    chan struct{} // capacity 1; while the worker stops: a call ended, or a large answer was dropped
	forceCh   chan struct{} // closed when the context of a Stop has ended
	forceOnce sync.Once
	endOnce   sync.Once

	mu           sync.Mutex // guards what follows
	state        State
	since        time.Time
	err          error
	cause        error // why calls are cancelled; nil until the worker ends
	objects      map[string]Handler
	classes      map[string]*Class // of the objects, by the same names
	env          map[string]string
	queues       map[Lane]*queue
	callers      map[string]*callerState
	orders       map[orderID]*callOrder
	unacked      callList // answered and not acknowledged
	unackedBytes int
	unfetched    int64
	stats        callStats
	runs         recorder.Batch // for the flight recorder
	active       []*call        // running calls, unordered
	lastPurge    time.Time      // zero: no caller was purged
	bindings     map[methodID]*binding
	buffers      [][]byte // free buffers for answers

	// Caches: the next call mostly has the same caller and method.
	lastCaller  *callerState
	lastBinding *binding

	// Set while accept runs:
	accepting      bool
	mayRun         bool
	begin          job       // the first call that the receiver starts itself
	unusedDelivery *delivery // memory for the arriving call; nil once used
}

const (
	maxBuffers      = 16      // free buffers of one worker
	newBufferSize   = 256     // room for a short answer
	maxReusedBuffer = 4 << 10 // a larger buffer is not kept
)

func newWorker(h *Host, spec WorkerSpec, class *Class) *Worker {
	w := &Worker{
		spec: spec, host: h, class: class, texts: textsOf(spec.Address), state: Created, since: time.Now(),
		objects: map[string]Handler{}, classes: map[string]*Class{}, env: map[string]string{},
		queues: map[Lane]*queue{}, callers: map[string]*callerState{}, orders: map[orderID]*callOrder{}, bindings: map[methodID]*binding{},
		doneCh: make(chan struct{}), idleCh: make(chan struct{}, 1), forceCh: make(chan struct{}),
	}
	if w.spec.QueueLimit == 0 {
		w.spec.QueueLimit = defaultQueueLimit
	}
	return w
}

// Rank is the worker's rank.
func (w *Worker) Rank() int { return w.spec.Rank }

// Done is closed when the worker has stopped or failed.
func (w *Worker) Done() <-chan struct{} { return w.doneCh }

// State returns the worker's state, and its error if it failed.
func (w *Worker) State() (State, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.state, w.err
}

// become makes a transition of the lifecycle; it reports false if there is none.
func (w *Worker) become(to State, err error) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.becomeLocked(to, err)
}

func (w *Worker) becomeLocked(to State, err error) bool {
	if w.state.next(to) != nil {
		return false
	}
	w.state, w.since = to, time.Now()
	if err != nil {
		w.err = err
	}
	return true
}

// WorkerSpec describes the worker to start.
type WorkerSpec struct {
	Address bus.Address
	Class   string
	Rank    int
	World   int
	Gen     uint32
	Config  wire.Raw
	Slices  []Slice // the data-parallel slices that the rank belongs to
	Ordered bool    // the role has a sequencer; rank 0 runs it
	// QueueLimit bounds the queued calls of one lane; further ones are refused as busy. Zero: 10,000.
	QueueLimit int
	// PanicFails fails the worker when a method panics. Zero: only the call fails.
	PanicFails bool
}

// check reports every mistake in the spec.
func (s WorkerSpec) check(namespace string) error {
	errs := []error{s.Address.Check()}
	bad := func(format string, args ...any) { errs = append(errs, bus.Errorf(bus.CodeInvalid, format, args...)) }
	if s.Address.Namespace != namespace {
		bad("worker of %s: its namespace is %q, the host's %q", s.Address.Role, s.Address.Namespace, namespace)
	}
	if s.Rank < 0 || s.Rank >= s.World {
		bad("worker of %s: rank %d is not in a world of %d", s.Address.Role, s.Rank, s.World)
	}
	if s.QueueLimit < 0 {
		bad("worker of %s: QueueLimit %d must not be negative", s.Address.Role, s.QueueLimit)
	}
	for _, slice := range s.Slices {
		errs = append(errs, slice.check())
	}
	return errors.Join(errs...)
}

// Slice is one data-parallel slice of one mesh.
type Slice struct {
	Mesh string `msgpack:"mesh"`
	N    int    `msgpack:"n"`
}

func (s Slice) check() error {
	if s.N < 0 {
		return bus.Errorf(bus.CodeInvalid, "slice %d of mesh %q: the number must not be negative", s.N, s.Mesh)
	}
	return bus.CheckName("mesh", s.Mesh)
}
