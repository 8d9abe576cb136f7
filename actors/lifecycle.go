package actors

import "fmt"

// State is where a worker is in its life.
//
//	created ──► initialising ──► ready ──► stopping ──► stopped
//	   │              │            │           │
//	   └──────────────┴────────────┴───────────┴──► failed
type State string

const (
	Created      State = "created"      // the host knows of it
	Initialising State = "initialising" // its constructor runs
	Ready        State = "ready"        // it takes calls
	Stopping     State = "stopping"     // it takes no more work; what runs may finish
	Stopped      State = "stopped"      // it has ended in order
	Failed       State = "failed"       // it has ended otherwise; its error says why
)

var successors = map[State][]State{
	Created:      {Initialising, Stopping, Failed},
	Initialising: {Ready, Stopping, Failed},
	Ready:        {Stopping, Failed},
	Stopping:     {Stopped, Failed},
}

// next is the lifecycle: it refuses a step that the diagram does not have.
func (s State) next(to State) error {
	for _, ok := range successors[s] {
		if ok == to {
			return nil
		}
	}
	return fmt.Errorf("a worker that is %s cannot become %s", s, to)
}

// Over reports whether the worker will take no call again.
func (s State) Over() bool { return s == Stopped || s == Failed }
