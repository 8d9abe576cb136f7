// Package dispatch turns one call on a role into many and many answers into one.
//
// A Mesh gives the ranks of a role their coordinates; a Mode defines which rank gets which part of a call and whose answers
// make the result. A Group is the ranks of one running role; Group.Go makes a call in a mode and returns a Future:
//
//	group := &dispatch.Group{Endpoint: ep, To: address, Mesh: mesh, MeshName: "main"}
//	f, err := group.Go(ctx, dispatch.Call{Method: "train_step", Args: []any{rows, 0.1}, Mode: dispatch.DPMPCompute})
//	losses, err := dispatch.Await[[]float64](ctx, f) // the rows that came out of the last stages, joined
//
// A Future can also be cancelled, report its Progress, stream answers in order of arrival, return them rank by rank
// (AwaitEach, AwaitOutcomes), and be an argument of another call. By default the first failure cancels the other ranks and
// is the error, a *CallError; Call.CollectAll waits for all ranks, Call.Need for a number of them.
//
// An argument can be marked with Split, Broadcast or Scatter; plan.Plan.Cut describes how unmarked ones are treated. Package
// dispatch/plan decides, without I/O, which rank gets which part and whose answers make the result.
package dispatch
