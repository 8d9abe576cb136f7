// Package sessions is the control service of programs written for Ray (python/troupe/ray): jobs, a directory of actors with their
// names and handles, leases of workers that run tasks, placement groups, and through the scheduler package the resources of all of
// them. The head runs one service for each namespace that asks for one; calls of actors and tasks do not pass through it.
//
//	stop, err := sessions.Serve(ctx, sessions.Config{Bus: b})  // in the head
//	cluster, err := sessions.Find(ctx, rt)                     // in a client: the role whose method ask serves requests
//
// A request is ask(caller, number, method, arguments…), where the numbers count the requests of a caller, which begin in that order.
// What must survive the end of the head is in a bucket (store.go); the next head reads it and adopts the processes that run
// (recovery.go).
package sessions
