// Package planner decides which devices a request gets. It is pure: a [Snapshot] of nodes and reservations and a
// [Request] give a [Plan]. The only time is Snapshot.Now, there are no random numbers, and map order has no influence, so
// a plan can be reproduced from its recorded input.
//
//	ids, err := planner.ParseMapping("list(range(0,8))")
//	plan, err := planner.Decide(snapshot, planner.Request{
//		Mapping: &planner.Mapping{World: 4, Devices: ids},
//	})
//	if err != nil {
//		return err // the request is invalid: errors.Is(err, planner.ErrInvalid)
//	}
//	if err := plan.Err(); err != nil {
//		return err // it does not fit, now or ever: plan.Reasons, plan.WaitsFor
//	}
//	for _, w := range plan.Workers { … w.Node, w.Devices … }
//
// A [Planner] is a snapshot that is kept up to date, with an index of free resources: Plan returns what would be granted,
// Schedule decides on a queue, Grant and Release apply the result.
package planner
