package life

// RankState is the state of the worker of a rank.
type RankState uint8

const (
	Expected RankState = iota // a worker is to come: nothing was heard of it yet
	Loading                   // its class is being constructed
	Ready                     // it takes calls
	Stopping                  // it finishes its calls
	Exiting                   // it has stopped in order, and its agent has not reported the exit
	Stopped                   // it has ended in order
	Lost                      // it has failed, was killed, or is silent
)

// Over reports whether the worker takes no calls any more.
func (s RankState) Over() bool { return s >= Exiting }

// Rank is one rank of a role.
type Rank struct {
	State RankState
	Gen   uint32 // generation of its worker
	Held  bool   // calls to it wait
	Loss  Loss   // why its worker has ended

	Retired bool // it is to be replaced, and finishes its calls
}

// Loss is the end of a worker.
type Loss struct {
	Why     error
	Killed  bool // on request, by SIGKILL: no answer of it is in transit
	Evicted bool // an operator stopped it, and it cannot be started on its node again
	Asked   bool // its replacement was asked for: it does not count as a failure
	Guessed bool // concluded from silence: neither the worker nor its agent reported it
}

// evidence handles what was heard of a worker.
func (r *Role) evidence(e Event) {
	if e.Rank < 0 || e.Rank >= len(r.ranks) {
		return
	}
	k := &r.ranks[e.Rank]
	if e.Gen < k.Gen {
		return
	}
	if e.Gen > k.Gen { // another process has replaced it
		r.do(Action{Kind: FailCalls, Rank: e.Rank, Gen: k.Gen})
		r.setRank(e.Rank, Rank{Gen: e.Gen, Held: k.Held})
		if r.replaces() {
			defer r.apply(Event{Kind: Changed})
		}
	}
	next, loss := k.State, e.Loss
	switch rankTable[e.Kind][k.State] {
	case "load":
		next = Loading
	case "serve":
		next = Ready
	case "stop":
		next = Stopping
	case "leave":
		if next = Stopped; r.cfg.Processes && !r.state.Over() { // its agent reports the exit
			next = Exiting
		}
	case "end":
		if next = Stopped; k.State == Exiting { // it had stopped in order, whatever its exit code
			loss = k.Loss
		}
	case "lose":
		next = Lost
	}
	if next == k.State {
		return
	}
	r.setRank(e.Rank, Rank{State: next, Gen: k.Gen, Held: k.Held, Loss: loss})
	switch next {
	case Exiting:
		r.do(Action{Kind: AwaitExit, Rank: e.Rank, Gen: k.Gen, Loss: loss})
	case Stopped, Lost:
		r.ended(e.Rank)
	}
}

// ended tells the role that a worker has ended. After the last one, a process that only watches closes its handle.
func (r *Role) ended(rank int) {
	kind := WorkerStopped
	if r.ranks[rank].State == Lost {
		kind = WorkerLost
	}
	r.apply(Event{Kind: kind, Rank: rank, Gen: r.ranks[rank].Gen, Loss: r.ranks[rank].Loss})
	if r.cfg.Part != Reader && r.cfg.Part != Monitor || r.replaces() {
		return
	}
	for _, k := range r.ranks {
		if k.State != Stopped && k.State != Lost {
			return
		}
	}
	r.do(Action{Kind: Leave})
}

func (r *Role) setRank(rank int, to Rank) {
	if r.version++; to.Gen != r.ranks[rank].Gen {
		r.replaced++
	}
	r.ranks[rank] = to
}
