// Package bus connects Troupe to NATS: servers and connections, every subject, requests (Serve, Ask), calls on the ranks of
// a role (Endpoint, Call, Gather), large bodies, and retries. Only bus and its subpackages import NATS: bus/wire has the
// bytes of frames, values and errors, bus/kv the keys, leases and leaders.
//
//	b, err := bus.Open(ctx, bus.Config{}) // a private embedded server
//	ep, err := b.Endpoint("default")      // one inbox for all answers
//	g, err := ep.Scatter(ctx, bus.Call{To: address, Method: "step", World: 2, Parts: []bus.Part{
//		{Scope: bus.Everyone(), Ranks: []int{0, 1}, Body: body}, // published once
//	}})
//	<-g.Done()
//	answers := g.Answers()
//
// NATS may lose, duplicate and delay messages. A caller without an answer therefore asks for the status of its call, and a
// call that is sent again carries the same id, so that it runs at most once.
package bus
