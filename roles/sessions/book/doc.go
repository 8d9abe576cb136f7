// Package book translates the requests of programs written for Ray into those of the placement service, and keeps which of them hold
// what: actors and placement groups are reservations in the ledger, tasks without devices are volatile leases. It decides nothing
// itself: nodes and devices are those that the leader of placement grants at its desk.
//
//	b := book.New(book.Config{Desk: desk, Namespace: "ray", Locked: s.do, Decided: s.decided})
//	b.Request(book.Request{Key: "actor-1", Demand: map[string]float64{"GPU": 1}, Durable: true})   // Decided hears of the grant
//	b.Release("actor-1")
//
// Older requests come first, but one that does not fit holds up no other. Placement groups hold bundles of resources, all or none;
// requests may name a group, and then use its bundles alone.
package book
