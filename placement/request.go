package placement

import "troupe/placement/planner"

// The vocabulary of a request, of its grant and of its refusal, and the states of nodes, under the name of this package: callers of a Client need
// no other import. Everything else that a plan consists of is in package planner.
type (
	Request  = planner.Request
	Bundle   = planner.Bundle
	Share    = planner.Share
	Mapping  = planner.Mapping
	Topology = planner.Topology
	Strategy = planner.Strategy

	Worker = planner.Worker
	Slot   = planner.Slot

	NodeState = planner.NodeState

	RequestError    = planner.RequestError
	NoCapacityError = planner.NoCapacityError
)

const (
	Whole = planner.Whole

	Pack         = planner.Pack
	Spread       = planner.Spread
	StrictPack   = planner.StrictPack
	StrictSpread = planner.StrictSpread

	NodeReady    = planner.NodeReady
	NodeLost     = planner.NodeLost
	NodeUnproven = planner.NodeUnproven
)

var (
	ErrInvalid   = planner.ErrInvalid
	ErrNeverFits = planner.ErrNeverFits
	ErrMustWait  = planner.ErrMustWait
	ErrDuplicate = planner.ErrDuplicate
)

// Wholes returns the share of n whole devices or CPUs.
func Wholes(n int) Share { return planner.Wholes(n) }

// Repeat returns n bundles that are equal to b.
func Repeat(n int, b Bundle) []Bundle { return planner.Repeat(n, b) }
