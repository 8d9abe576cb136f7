// Package nodes is the agent of a machine with devices, and its client. An [Agent] registers the machine's nodes,
// reports their devices, starts and stops worker processes, stores their output and publishes their exits. A driver's
// [Client] sends requests to it.
//
//	agent, err := nodes.NewAgent(nodes.AgentConfig{Bus: b, Dir: dir, Nodes: []nodes.Config{{Name: "host-7", Inventory: inventory}}})
//	...
//	err = agent.Run(ctx) // until ctx ends; then the workers are stopped and the nodes have left
//
//	client := nodes.NewClient(b)
//	stop, err := client.Exits(ctx, role, func(e nodes.Exit) { ... })
//	started, err := client.Launch(ctx, nodes.Launch{Node: "host-7", Program: program, Workers: workers})
//	exits, err := client.Stop(ctx, "host-7", ids, 5*time.Second)
package nodes
