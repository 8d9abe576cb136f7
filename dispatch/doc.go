// Package dispatch turns one call on a role into many and many answers into one.
//
// A Mesh gives the ranks of a role their coordinates; a Mode says which part of a call goes to whom and whose answers
// count. A Group is the ranks of one running role; its Go makes a call in a mode and gives a Future:
//
//	group := &dispatch.Group{Endpoint: ep, To: address, Mesh: mesh, MeshName: "main"}
//	f, err := group.Go(ctx, dispatch.Call{Method: "train_step", Args: []any{rows, 0.1}, Mode: dispatch.DPMPCompute})
//	losses, err := dispatch.Await[[]float64](ctx, f) // the rows that came out of the last stages, joined
//
// A Future can also be cancelled, asked for its Progress, streamed in the order of arrival, read rank by rank with
// AwaitEach and AwaitOutcomes, or given to another call as an argument. By default the first failure cancels the other
// ranks and is the error, a *CallError; CollectAll waits for all of them, Need for so many, Timeout for so long.
//
// An argument can be marked with Split, Broadcast or Scatter; Plan.Cut says what becomes of the others. What a mode sends
// to whom on a mesh is a Plan, which depends on nothing else and is kept for every call:
//
//	mesh, err := dispatch.Mesh{TP: 2}.Resolve(world)           // dp is what tp leaves of the world
//	plan, err := dispatch.NewPlan(dispatch.DPMPCompute, mesh)  // once
//	shards, err := plan.Cut([]any{rows, 0.1}, dispatch.Options{})
//	for _, part := range shards.Plan.Parts {
//		publish(part.Target, part.Ranks, shards.Args(part))
//	}
//	result, err := shards.Merge(answersOf(shards.Plan.Collect))
package dispatch
