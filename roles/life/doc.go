// Package life decides what happens to a role and to its ranks: when calls wait, when lost workers are replaced, when the
// role fails, and what its end needs. It is pure: events come in, actions go out, and it has no clock and does no I/O. A
// loop, in package roles, reports what it saw and carries out the actions:
//
//	r := life.New(life.Config{Part: life.Creator, World: 8, Processes: true, Policy: life.ReplaceRank})
//	for _, a := range r.Handle(life.Event{Kind: life.Crashed, Rank: 3, Loss: why}) { … }
//
// A Role is the life as one process sees it. What processes agree on is the role's record in the registry, which changes by
// compare-and-set; Read reports it. There are two tables, and nothing else changes a state: ranks in rank.go, and roles in
// table.go.
package life
