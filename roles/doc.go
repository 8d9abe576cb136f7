// Package roles manages roles from their spec to running workers, calls and their end. It alone combines messages with
// resources.
//
// \trt, err := roles.Open(ctx, roles.Config{Classes: []*actors.Class{trainer.Class}})
// \tdefer rt.Close(ctx)
// \tcluster, err := rt.Create(ctx, roles.Spec{Name: "actor_train", Class: "trainer", World: 8, Mesh: dispatch.Mesh{TP:
// 2, PP: 2}})
// \tlosses, err := roles.Call[[]float64](ctx, cluster, "train_step", rows)
// \terr = cluster.Destroy(ctx)
//
// Call uses the mode that the class declares for the method; Cluster.Go takes a dispatch.Call with all options and
// returns a Future. Ranks, Slice and Where address some of the workers, a Group any workers of any roles. Another
// program finds the role by its name:
//
// \tcluster, err := rt.Attach(ctx, "actor_train")
//
// Workers are goroutines of this program, or, with a Process in the spec, processes on the nodes with devices of their
// own; a program that is both driver and worker calls Main first:
//
// \tfunc main() {
// \t\troles.Main(trainer.Class)
// \t\t...
// \t\tspec.Process = &roles.Process{Command: roles.Self(), Needs: placement.Request{Bundles:
// []placement.Bundle{{Devices: placement.Wholes(1)}}}}
//
// A cluster and a worker can be arguments of calls; the method receives a Handle, and opens it:
//
// \tfunc (t *Trainer) Sync(ctx context.Context, to roles.Handle) (int, error) {
// \t\tinfer, err := to.Open(ctx)
// \t\treturn roles.Call[int](ctx, infer, "load", t.weights)
// \t}
package roles
