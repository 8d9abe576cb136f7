// Package nodes is a machine that offers devices. So far it is the part of the agent that says so: a [Reporter] keeps
// the node's lease, gives a sign of life every second and reports its devices whenever something has changed.
//
//	reporter, err := nodes.NewReporter(nodes.Config{Bus: b, Name: "host-7", Inventory: inventory})
//	...
//	err = reporter.Run(ctx) // until ctx ends; then the node has left
package nodes
