// Package pipeline connects roles by durable streams: event-driven stages. A stage is a method of a role, or a plain
// function; a stream between stages is stored, bounded, and shared by all the workers of the stage that reads it.
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
// An item's outputs are stored once, together with the mark that it is dealt with, whatever dies and whenever. A worker
// that dies gives its items back at once. A pipeline that is opened again goes on where it was. Other processes put items
// with a Producer and give orders with a Client; a Router spreads requests over the ranks of a role by the same credits.
package pipeline
