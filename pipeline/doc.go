// Package pipeline connects roles by durable streams. A stage is a method of a role, or a function of the program; a
// stream between stages is stored, bounded, and shared by all workers of the stage that reads it.
//
//	p, err := pipeline.Open(ctx, pipeline.Config{Bus: b, Clusters: []*roles.Cluster{rollout, reward}}, pipeline.Spec{
//		Name:    "rl",
//		Streams: []pipeline.StreamSpec{{Name: "prompts", Items: 1000}, {Name: "samples"}, {Name: "scored"}},
//		Stages: []pipeline.StageSpec{
//			{Name: "rollout", In: []string{"prompts"}, Out: []string{"samples"}, Role: "rollout", Method: "generate", Stamp: true},
//			{Name: "reward", In: []string{"samples"}, Out: []string{"scored"}, Role: "reward", Method: "score", InFlight: 4},
//			{Name: "train", In: []string{"scored"}, Func: train, Group: &pipeline.GroupSpec{Count: 64},
//				Stale: &pipeline.StaleSpec{Bound: pipeline.VersionOf(1.5)}, Advance: pipeline.VersionOf(1)},
//		},
//	})
//	err = p.Put(ctx, "prompts", items...) // waits while the stream is full
//	err = p.Drain(ctx)
//	err = p.Close(ctx)
//
// The outputs of an item are stored once, together with its completion, whatever fails. The items of a worker that dies
// go to other workers at once. A pipeline that is opened again continues from its log. Other processes put items with a
// Producer and control a pipeline with a Client.
package pipeline
