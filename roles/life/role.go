package life

// State is the state of a role, as one process sees it.
type State uint8

const (
	Starting   State = iota // its workers are being started here; the first failure is the error of the start
	Serving                 // it takes calls
	Recovering              // ranks are lost or being replaced, and their calls wait; the record is read until it is settled
	Restarting              // the same, and this process replaces the workers
	Failed                  // a worker's failure has ended it; the record has the cause until the role is destroyed
	Ending                  // it is being destroyed, here or elsewhere
	Finishing               // destroying it was interrupted, and is repeated here until the name is free
	Gone                    // it is destroyed, and its name is free
	Closed                  // this process has closed its handle
	states
)

// Over reports whether calls are refused.
func (s State) Over() bool { return s >= Failed }

// Part is what a process does in the life of a role.
type Part uint8

const (
	Creator Part = iota // it has created the role: it starts, restarts and ends it
	Guest               // it is attached by name, and ends what is left of a detached role that has failed
	Reader              // it has opened a handle, and only watches
	Monitor             // it restarts workers if the creator does not, and ends what is left of a role that has failed
	Ender               // it destroys the role, because its creator has ended
)

// Policy is what happens when a worker fails.
type Policy uint8

const (
	FailRole    Policy = iota // the role fails
	ReplaceRank               // the worker is replaced
	ReplaceAll                // all workers are replaced
	Continue                  // the others continue
)

// Config is what is known of a role from the beginning.
type Config struct {
	Part      Part
	Processes bool // workers are processes, whose exits agents report
	Detached  bool
	Policy    Policy
	World     int
	Gens      []uint32 // of the placed ranks, also beyond World
	Epoch     uint64   // of the membership
}

// End is why a role takes no calls any more: the first reason, which stays.
type End struct {
	Why     error
	Failure bool // a worker's failure is the reason
	Rank    int  // of that worker; -1: the record says it, or no worker is
	AtStart bool // the role had not started
}

// Record is the role's record in the registry, as it was read.
type Record struct {
	State      RecordState
	Config            // its Part does not count
	Restarting []int  // ranks of the restart in progress
	RestartGen uint32 // the generation that they get
	Why        error  // why a role that is absent or failed takes no calls
	Turn       bool   // this process may begin or take over a restart now
	Own        bool   // this process has written it, at the beginning or the end of a restart
}

// RecordState is the state of a role in its record.
type RecordState uint8

const (
	Absent     RecordState = iota // there is no record, or it says that the role is being destroyed
	Unready                       // being started
	Settled                       // ready
	Unsettled                     // restarting
	Unworkable                    // failed
)

// Kind is the kind of an event.
type Kind uint8

// What was heard of a worker: Rank, Gen, and Loss if it has ended.
const (
	SaysLoading Kind = iota
	SaysReady
	SaysStopping
	SaysStopped
	SaysFailed
	Exited      // its process has exited on request
	Crashed     // its process has exited
	Evicted     // an operator has ended its process
	Silent      // it has not been heard of for too long
	Unconfirmed // it said that it stopped, and no agent reports its exit
	rankEvents

	// What this process did, or asks for, about the ranks.
	Expect // a worker of Rank and Gen is to be started
	Remove // Rank is no longer in the role
	Resize // the role has World ranks, in an Epoch
	Retire // the worker of Rank is to be replaced: it gets no new calls from this process
)

// What happened to a role.
const (
	Started       Kind = iota + Retire + 1
	NotStarted         // the start has failed: Why
	WorkerLost         // Rank is Lost; from the table of ranks, or repeated after Check
	WorkerStopped      // Rank is Stopped, likewise
	Read               // Record was read
	Changed            // the record may have changed
	Deferred           // another process restarts the workers, or the record has changed
	GaveUp             // the workers cannot be restarted: Why; Final: nor can those that were lost meanwhile
	Destroy            // this process destroys it: Why
	Destroyed          // the name is free
	Interrupted        // an attempt to destroy it has failed
	Close              // the handle is closed: Why
	kinds
)

// Event is something that happened.
type Event struct {
	Kind   Kind
	Rank   int
	Gen    uint32
	Loss   Loss
	World  int
	Epoch  uint64
	Record Record
	Why    error
	Final  bool
	Again  bool // the end of a worker, after Check
}

// Act is the kind of an action.
type Act uint8

const (
	HoldCalls    Act = iota // let calls to Ranks wait; Loss is the reason, or the restart in the record
	SendCalls               // send the calls that wait, except those to Ranks
	TellSiblings            // tell the other handles of the role in this process of the loss, before calls fail
	FailCalls               // fail the calls that wait for the worker Rank, Gen: Loss, or it is replaced. Slow: answers may be in transit
	FailReplaced            // fail the calls to the workers of Ranks up to Gen, which the restart in the record replaces
	FailPending             // fail every call with the reason of the end
	EndCalls                // refuse calls, and fail those that wait
	AwaitExit               // report the exit of the worker Rank, Gen, or Unconfirmed
	Check                   // read the record, and report it and then the same end of Rank, Gen again
	Reshape                 // apply the size of the record
	ExpectBeats             // silence of ranks counts from now on
	Publish                 // tell those who wait that the membership has another epoch
	Recover                 // read the record, and report it, until the state is neither Recovering nor Restarting
	Wake                    // read it at once
	Restart                 // replace the lost workers of Ranks, then report Read, Deferred or GaveUp
	Report                  // tell the driver that Rank has failed, and that the role Fails or the others continue
	TearDown                // write the cause into the record, and end what is left of the role
	DestroyRole             // destroy the role
	Repeat                  // destroy the role, again and again
	Leave                   // close the handle
	LeaveSoon               // close the handle when the workers have ended
	Complain                // Event was reported in a state in which it cannot happen
)

// Action is something to do.
type Action struct {
	Kind  Act
	Rank  int
	Gen   uint32
	Ranks []int
	Loss  Loss
	Slow  bool
	Fails bool
	Event Kind
}

// Role is the life of a role. One goroutine at a time uses it.
type Role struct {
	cfg     Config
	state   State
	end     *End
	ranks   []Rank // at least cfg.World: those beyond are being added, or were removed
	restart uint32 // the last restart in the record whose calls have failed
	episode int    // counts the times that the role began to recover
	version int    // counts the changes that readers may wait for
	actions []Action

	replaced int
}

// New is the life of a role from now on. A Creator's is being started.
func New(cfg Config) *Role {
	r := &Role{cfg: cfg, state: Serving, ranks: make([]Rank, max(cfg.World, len(cfg.Gens)))}
	for rank, gen := range cfg.Gens {
		r.ranks[rank].Gen = gen
	}
	switch cfg.Part {
	case Creator:
		r.state = Starting
	case Ender:
		r.state = Ending
	}
	return r
}

// State is the current state. End is why the role has ended; nil: it has not.
func (r *Role) State() State { return r.state }
func (r *Role) End() *End    { return r.end }

// Ranks are the ranks; the caller does not change them. World is how many of them are in the role.
func (r *Role) Ranks() []Rank { return r.ranks }
func (r *Role) World() int    { return r.cfg.World }

// Episode counts the times that the role began to recover, Version the changes of any state, and Replaced those of a
// generation.
func (r *Role) Episode() int  { return r.episode }
func (r *Role) Version() int  { return r.version }
func (r *Role) Replaced() int { return r.replaced }

// Replaces reports whether lost workers are replaced.
func (r *Role) Replaces() bool { return r.state != Starting && r.replaces() }

func (r *Role) replaces() bool {
	return r.cfg.Processes && (r.cfg.Policy == ReplaceRank || r.cfg.Policy == ReplaceAll)
}

// LostRanks are the ranks whose workers are lost.
func (r *Role) LostRanks() (lost []int) {
	for rank, k := range r.ranks[:r.cfg.World] {
		if k.State == Lost {
			lost = append(lost, rank)
		}
	}
	return lost
}

// Handle handles an event and returns what is to be done, in order.
func (r *Role) Handle(e Event) []Action {
	r.actions = nil
	switch {
	case e.Kind < rankEvents:
		r.evidence(e)
	case e.Kind == Expect:
		r.grow(e.Rank + 1)
		if e.Gen > r.ranks[e.Rank].Gen {
			r.setRank(e.Rank, Rank{Gen: e.Gen, Held: r.ranks[e.Rank].Held})
		}
	case e.Kind == Remove && e.Rank >= len(r.ranks): // its start had not begun
	case e.Kind == Remove:
		r.setRank(e.Rank, Rank{State: Stopped, Gen: r.ranks[e.Rank].Gen})
	case e.Kind == Resize:
		r.grow(e.World)
		r.cfg.World = e.World
		r.version++
		r.publish(e.Epoch)
	case e.Kind == Retire:
		if k := &r.ranks[e.Rank]; r.state == Serving && e.Gen == k.Gen && !k.State.Over() {
			k.Retired = true
			r.hold(Action{Kind: HoldCalls, Ranks: []int{e.Rank}, Loss: e.Loss})
		}
	default:
		r.apply(e)
	}
	return r.actions
}

func (r *Role) do(a Action) { r.actions = append(r.actions, a) }

func (r *Role) grow(ranks int) {
	for len(r.ranks) < ranks {
		r.ranks = append(r.ranks, Rank{})
	}
}
