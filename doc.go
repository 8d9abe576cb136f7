// Package troupe is the API of a driver and of its workers under one name. It has no logic of its own: every name here is an
// alias of, or a thin function over, roles, actors, dispatch, placement, nodes and bus, which have the details.
//
//	judge := troupe.NewClass("judge", newJudge)
//	troupe.Method(judge, "score", (*Judge).Score, troupe.MethodOptions{Mode: troupe.DPMPCompute})
//
//	rt, err := troupe.Open(ctx, troupe.Config{Classes: []*troupe.Class{judge.Class}})
//	defer rt.Close(ctx)
//	reward, err := rt.Create(ctx, troupe.Spec{Name: "reward", Class: "judge", World: 4, Mesh: troupe.Mesh{TP: 2}})
//	scores, err := troupe.Call[[]string](ctx, reward, "score", texts)
//
// With a Process in the Spec, the workers are processes on nodes, with devices of their own:
//
//	troupe.Main(judge.Class) // first in main: in a worker process it does not return
//	spec.Process = &troupe.Process{Command: troupe.Self(), Needs: troupe.GPUs(1)}
package troupe
