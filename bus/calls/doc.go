// Package calls makes calls on the ranks of a role: it publishes their parts and gathers the answers.
//
//	ep, err := calls.Open(b, "default") // one inbox for all answers
//	g, err := ep.Scatter(ctx, calls.Call{To: address, Method: "step", World: 2, Parts: []calls.Part{
//		{Scope: calls.Everyone(), Ranks: []int{0, 1}, Body: body}, // published once
//	}})
//	<-g.Done()
//	answers := g.Answers()
//
// NATS may lose, duplicate and delay messages. A caller without an answer therefore asks for the status of its call, and a
// call that is sent again carries the same id, so that it runs at most once.
package calls
