package bus

import (
	"time"

	"troupe/bus/wire"
)

// Call is one invocation over a role, as the bus sees it: parts, each published once, and the ranks that must answer.
type Call struct {
	To      Address
	Method  string
	Object  string
	Control bool // on the control subjects: never behind work, and without order
	Ordered bool // the role has a sequencer, and the call passes it
	World   int  // the role's world size
	Parts   []Part

	CollectSome bool         // only the answers of Collect carry a body
	Collect     wire.RankSet // when CollectSome
	Gens        map[int]uint32
	Meta        []byte
	Trace       string

	// Memory is where answers over MaxInline are put: the caller owns them, and frees them. Nil: Go's own.
	Memory Memory

	FailFast bool // the first failure ends the call, and the others are cancelled
	Need     int  // so many good answers end the call, and the others are cancelled; 0: all of them

	// Held keeps the call back until Gather.Send. Its timeout and its context count from now on.
	Held bool
	// Timeout ends the call, if the context does not end it first. Zero: the context alone.
	Timeout time.Duration
	// AskAfter is when ranks that have not answered are first asked about the call. Zero: 0.8 s.
	AskAfter time.Duration
	// ArrivedFunc is told when something has arrived, and OverFunc once, when the call is over: also when Scatter itself
	// ends it with an error. They are called from any goroutine and must not block.
	ArrivedFunc func(*Gather)
	OverFunc    func(*Gather)
	// GoneAfter is how long the server may say that nobody listens before a rank counts as lost. Zero: 3 s, in which a
	// worker that has lost its connection is back.
	GoneAfter time.Duration
}

// Part is what some ranks get, published once on a subject they all hear.
type Part struct {
	Scope  Scope
	Ranks  []int  // who it is for, rising
	Some   bool   // others hear the subject too
	Body   []byte // must not be changed until the call is over, or DoneFunc is called
	NoData bool   // called with the metadata alone
	// DoneFunc is called once, when nobody reads a body over MaxInline any more: before the call's end, or after it. If Scatter
	// fails without OverFunc being called, nobody reads it, and DoneFunc is called or not. It must not block.
	DoneFunc func()
}

// Scope is one of the subjects of a role.
type Scope struct {
	Mesh string // a data-parallel slice of this mesh, if set
	N    int    // its number, or the rank
	All  bool   // the whole role
}

// Everyone is the whole role, OneRank a rank, DPSlice a data-parallel slice of a mesh.
func Everyone() Scope                  { return Scope{All: true} }
func OneRank(rank int) Scope           { return Scope{N: rank} }
func DPSlice(mesh string, n int) Scope { return Scope{Mesh: mesh, N: n} }

func (s Scope) subject(to Address, control bool) string {
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
