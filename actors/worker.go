package actors

import (
	"sync"
	"time"
)

const (
	defaultQueueLimit = 10_000
	maxUnfetched      = 512 << 20 // bytes of large answers nobody has fetched yet; beyond it no new call starts
	maxStack          = 8 << 10
	maxMessage        = 16 << 10
	maxWord           = 64
	minErrorRoom      = 1 << 10         // what an error may always take
	lastGrace         = 2 * time.Second // for cancelled calls to notice, and for objects to close
)

// Worker plays one rank of a role. Calls reach it from its host; it is safe for concurrent use.
type Worker struct {
	spec  WorkerSpec
	host  *Host
	class *Class

	doneCh  chan struct{} // closed when the worker is over
	idleCh  chan struct{} // holds one; a call has ended, or a large answer is gone, since the worker is stopping
	hurryCh chan struct{} // closed when somebody who waits for its end has lost patience
	hurry   sync.Once
	ending  sync.Once

	mu        sync.Mutex // guards what follows
	state     State
	since     time.Time
	err       error
	cause     error // why its calls are cancelled; nil while it lives
	objects   map[string]Handler
	classes   map[string]*Class // of the objects
	env       map[string]string
	queues    map[Lane]*queue
	sessions  map[string]*session
	streams   map[streamID]*stream
	kept      callList // answered and not acknowledged
	keptBytes int
	stats     callStats
	unfetched int64
	active    []*call   // that run, in no order
	lastPurge time.Time // zero: nobody has been forgotten yet
	bindings  map[methodID]*binding
	buffers   [][]byte // for answers, to be used again

	// What was used last is most often used next.
	lastSession *session
	lastBinding *binding

	// While arrive runs:
	lend  bool      // the first call that may start is left to it,
	lent  job       // here
	spare *delivery // memory for the call that arrives; nil: it has been used
	alone bool      // nobody else uses that

	forgotten []*call // whose memory may be used again
}

const (
	maxBuffers  = 16      // of one worker
	newBuffer   = 256     // holds a short answer
	largeBuffer = 4 << 10 // a larger one is not kept
	maxSpare    = 4       // calls whose memory is to be used again; one at a time is, unless they overlap
)

func newWorker(h *Host, spec WorkerSpec, class *Class) *Worker {
	w := &Worker{
		spec: spec, host: h, class: class, state: Created, since: time.Now(),
		objects: map[string]Handler{}, classes: map[string]*Class{}, env: map[string]string{},
		queues: map[Lane]*queue{}, sessions: map[string]*session{}, streams: map[streamID]*stream{}, bindings: map[methodID]*binding{},
		doneCh: make(chan struct{}), idleCh: make(chan struct{}, 1), hurryCh: make(chan struct{}),
	}
	if w.spec.QueueLimit == 0 {
		w.spec.QueueLimit = defaultQueueLimit
	}
	return w
}

// Rank is the worker's number.
func (w *Worker) Rank() int { return w.spec.Rank }

// Done is closed when the worker is stopped or failed.
func (w *Worker) Done() <-chan struct{} { return w.doneCh }

// State is where the worker is in its life, and why it failed if it did.
func (w *Worker) State() (State, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.state, w.err
}

// become takes one step of the lifecycle; it reports false where the diagram has none.
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
