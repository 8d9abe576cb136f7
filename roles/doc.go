// Package roles manages roles from their spec to running workers, calls and their end. It alone combines messages with
// resources.
//
//	rt, err := roles.Open(ctx, roles.Config{Classes: []*actors.Class{trainer.Class}})
//	defer rt.Close(ctx)
//	cluster, err := rt.Create(ctx, roles.Spec{Name: "actor_train", Class: "trainer", World: 8, Mesh: dispatch.Mesh{TP: 2, PP: 2}})
//	losses, err := roles.Call[[]float64](ctx, cluster, "train_step", rows)
//	err = cluster.Destroy(ctx)
//
// Call uses the mode that the class declares for the method; Cluster.Go takes a dispatch.Call with all options and
// returns a Future. Ranks, Slice and Where address some of the workers, a Group any workers of any roles. Another
// program finds the role by its name:
//
//	cluster, err := rt.Attach(ctx, "actor_train")
//
// Workers are goroutines of this program, or, with a Process in the spec, processes on the nodes with devices of their
// own; a program that is both driver and worker calls Main first:
//
//	func main() {
//		roles.Main(trainer.Class)
//		...
//		spec.Process = &roles.Process{Command: roles.Self(), Needs: placement.Request{Bundles: []placement.Bundle{{Devices: placement.Wholes(1)}}}}
//
// A cluster and a worker can be arguments of calls; the method receives a Handle, and opens it:
//
//	func (t *Trainer) Sync(ctx context.Context, to roles.Handle) (int, error) {
//		infer, err := to.Open(ctx)
//		return roles.Call[int](ctx, infer, "load", t.weights)
//	}
package roles
