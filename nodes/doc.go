// Package nodes is a machine that offers devices. Its [Agent] says that the machine is there and how its devices are,
// starts and ends worker processes on it, keeps what they print, and tells how they ended. A driver's [Client] asks it.
//
//	agent, err := nodes.NewAgent(nodes.AgentConfig{Bus: b, Dir: dir, Nodes: []nodes.Config{{Name: "host-7", Inventory: inventory}}})
//	...
//	err = agent.Run(ctx) // until ctx ends; then the workers have, and the node has left
//
//	client := nodes.NewClient(b)
//	stop, err := client.Exits(ctx, role, func(e nodes.Exit) { ... })
//	started, err := client.Launch(ctx, nodes.Launch{Node: "host-7", Program: program, Workers: workers})
//	exits, err := client.Stop(ctx, "host-7", ids, 5*time.Second)
package nodes
