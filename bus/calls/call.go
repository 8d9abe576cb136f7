package calls

import (
	"time"

	"troupe/bus"
	"troupe/bus/values"
	"troupe/bus/wire"
)

// Call is one invocation on a role: parts, each published once, and the ranks that must answer.
type Call struct {
	To      bus.Address
	Method  string
	Object  string
	Control bool // on the control subjects: never behind work, and without order
	Ordered bool // the role has a sequencer, which publishes the call
	World   int  // the role's world size
	Parts   []Part

	CollectSome bool         // only the answers of Collect carry a body
	Collect     wire.RankSet // when CollectSome
	Gens        map[int]uint32
	Meta        []byte
	Trace       string

	// Memory allocates answers over MaxInline. The caller owns and frees them. Nil: Go's heap.
	Memory values.Memory

	// Keep leaves answers over MaxInline with their workers (Answer.Kept).
	Keep bool
	// Counted: the caller takes the references inside answers (Answer.References), and releases them.
	Counted bool
	// Arguments are the arguments that are references. Workers replace them by their values before the method runs. The caller
	// keeps them, and the references inside other arguments, until the call is over.
	Arguments []wire.Reference
	// OnDevice: the caller takes tensors that stay on their device; see References.Lend.
	OnDevice bool

	FailFast bool // the first failure ends the call and cancels the other ranks
	Need     int  // number of good answers that end the call and cancel the other ranks; 0: all

	// Deferred delays the publication until Gather.Send. Timeout and context count from Scatter.
	Deferred bool
	// Timeout ends the call, if the context does not end it first. Zero: the context alone.
	Timeout time.Duration
	// AskAfter is the time until the first status request to ranks without an answer. Zero: 0.8 s.
	AskAfter time.Duration
	// ArrivedFunc is called for each answer, and OverFunc once, when the call is over: also when Scatter itself ends it
	// with an error. They are called from any goroutine and must not block.
	ArrivedFunc func(*Gather)
	OverFunc    func(*Gather)
	// EndingFunc is OverFunc for what must have happened before anybody learns that the call is over: Done is closed after it. It must
	// not block either.
	EndingFunc func(*Gather)
	// GoneAfter is the time without a subscriber after which a rank counts as lost. Zero: 3 s, which is enough for a
	// worker to reconnect.
	GoneAfter time.Duration
}

// Part is the data for some ranks, published once on a subject that all of them subscribe to.
type Part struct {
	Scope  Scope
	Ranks  []int  // the receivers, rising
	Some   bool   // other ranks subscribe to the subject too
	Body   []byte // must not be changed until the call is over, or DoneFunc is called
	NoData bool   // the ranks get the metadata alone
	// DoneFunc is called once, when a body over MaxInline is not read any more: before or after the end of the call. If
	// Scatter fails without a call of OverFunc, the body is not read, and DoneFunc may or may not be called. It must
	// not block.
	DoneFunc func()
}

// Scope selects one of the subjects of a role.
type Scope struct {
	Mesh string // a data-parallel slice of this mesh, if set
	N    int    // its number, or the rank
	All  bool   // the whole role
}

// Everyone is the whole role, OneRank a rank, DPSlice a data-parallel slice of a mesh.
func Everyone() Scope                  { return Scope{All: true} }
func OneRank(rank int) Scope           { return Scope{N: rank} }
func DPSlice(mesh string, n int) Scope { return Scope{Mesh: mesh, N: n} }

func (s Scope) subject(to bus.Address, control bool) string {
	switch {
	case s.All && control:
		return to.Control()
	case s.All:
		return to.All()
	case s.Mesh != "":
		return to.Slice(s.Mesh, s.N)
	case control:
		return to.ControlRank(s.N)
	}
	return to.Rank(s.N)
}
