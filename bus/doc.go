// Package bus is Troupe on NATS and knows nothing above it: servers and connections, every subject, the envelope and
// the codec of bodies, scatter and gather with byte budgets, and the key-value store with leases and fenced writes.
//
//	b, err := bus.Open(ctx, bus.Config{}) // a private embedded server
//	ep, err := b.Endpoint("default")      // one inbox for everything that comes back
//	g, err := ep.Scatter(ctx, bus.Call{To: address, Method: "step", World: 2, Parts: []bus.Part{
//		{Scope: bus.Everyone(), Ranks: []int{0, 1}, Body: body}, // published once
//	}})
//	<-g.Done()
//	answers := g.Answers()
//
// Delivery on NATS may be lost, doubled or late. A call is therefore never trusted to have arrived: who misses an
// answer asks, and what is asked again carries the same id, so that nothing runs twice.
package bus
