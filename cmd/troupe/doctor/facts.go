package doctor

import (
	"time"

	"troupe/actors/timeline"
	"troupe/bus"
	"troupe/cmd/troupe/dashboard"
	"troupe/nodes"
	"troupe/pipeline"
	"troupe/placement"
	"troupe/roles/registry"
)

// Facts is what is known at one moment. A part that could not be read has its error in Problems, and no findings.
type Facts struct {
	Now       time.Time
	Listened  time.Duration // how long heartbeats were collected
	Head      *Head         // nil: no head answers
	Server    *bus.ServerState
	Servers   []Reach // of several URLs of a NATS cluster
	Ledger    placement.LedgerStatus
	Nodes     []Node
	Lost      nodes.LostNodes // which the placement service may have forgotten
	Roles     []Role
	Waiting   []placement.Waiting
	Pipelines []Pipeline
	Leases    []Lease
	Problems  []Problem
}

// Head is the head that answers.
type Head struct {
	Version   string
	Replicas  int
	Clustered bool
	Member    string // of its cluster; empty: the servers are not the heads' own
	Clock     nodes.ClockReading
	Store     *bus.StoreUsage
}

// Node is a node of the placement service and what its agent has answered.
type Node struct {
	placement.NodeStatus
	Host  *nodes.HostInfo // nil: see HostErr
	Clock nodes.ClockReading
	Err   error   // why Host is nil
	Data  []Reach // the addresses of its data port
}

// Role is a role of the registry and the heartbeats of its workers.
type Role struct {
	registry.RoleRecord
	Ranks []dashboard.Rank
	Late  []timeline.Late // of a role that Hangs: the ranks that held others up, as the flight recorders have it
	// Stacks are of a role that hangs without a rank that its heartbeats or recorders name: the ranks that are elsewhere than most,
	// at several moments.
	Stacks [][]nodes.DifferingRank
}

// Pipeline is a pipeline and, if it runs, its state.
type Pipeline struct {
	Namespace, Name string
	Status          *pipeline.Status // nil: it does not run
	Dead            int
}

// Lease is a lease of a driver or a node.
type Lease struct {
	What      string // as in "driver ann@box train.py of namespace default"
	Lifetime  time.Duration
	Remaining time.Duration
}

// Problem is a part of the facts that could not be read.
type Problem struct {
	What string
	Err  error
}
