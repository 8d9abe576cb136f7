// Package roles is what a driver holds: from the spec of a role to its running workers, calls and end. It alone joins
// messages with resources.
//
//	rt, err := roles.Open(ctx, roles.Config{Classes: []*actors.Class{trainer.Class}})
//	defer rt.Close(ctx)
//	cluster, err := rt.Create(ctx, roles.Spec{Name: "actor_train", Class: "trainer", World: 8, Mesh: dispatch.Mesh{TP: 2, PP: 2}})
//	losses, err := roles.Call[[]float64](ctx, cluster, "train_step", rows)
//	err = cluster.Destroy(ctx)
package roles
