// Package scheduler decides which node a request for resources runs on, which devices it gets, and when. It is pure: every method
// changes the state in memory and returns the decisions that follow from the change. There are no clocks, goroutines or I/O; ties
// fall to the node that came first, so that equal histories have equal decisions.
//
//	s := scheduler.New()
//	s.SetNodes([]scheduler.NodeInfo{{Name: "a", Total: map[string]float64{"CPU": 4}}})
//	d := s.Request("actor-1", map[string]float64{"CPU": 1}, scheduler.Strategy{}) // d.Granted has one allocation
//	d = s.Release("actor-1")                                                      // d.Granted has what waited for the CPU
//
// A request is granted as soon as it fits. Older requests come first, but one that does not fit holds up no other. Placement groups
// hold bundles of resources, all or none; requests may name a group, and then use its bundles alone.
package scheduler
