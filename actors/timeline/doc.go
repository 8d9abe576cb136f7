// Package timeline merges the flight recorders of the workers of roles, and of the processes that call them, on one clock.
//
//	t, err := timeline.Collect(ctx, timeline.Config{Endpoint: ep, Roles: roles, Last: time.Minute})
//	err = t.WriteTrace(file)     // for Perfetto and chrome://tracing
//	for _, late := range t.Late() { … }
package timeline
