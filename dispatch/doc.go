// Package dispatch turns one call on a role into many and many answers into one.
//
// A Mesh gives the ranks of a role their coordinates; a Mode says which part of a call goes to whom and whose answers
// count. The two make a Plan, which depends on nothing else and is kept for every call. A call's arguments are cut for
// the plan, each part is published once, and the answers are merged:
//
//	mesh, err := dispatch.Mesh{TP: 2}.Resolve(world)           // dp is what tp leaves of the world
//	plan, err := dispatch.NewPlan(dispatch.DPMPCompute, mesh)  // once
//	shards, err := plan.Cut([]any{rows, 0.1}, dispatch.Options{})
//	for _, part := range shards.Plan.Parts {
//		publish(part.Target, part.Ranks, shards.Args(part))
//	}
//	result, err := shards.Merge(answersOf(shards.Plan.Collect))
//
// An argument can be marked with Split, Broadcast or Scatter; Plan.Cut says what becomes of the others.
package dispatch
