// Package weights moves the weights of a model from the processes that train it to those that use it, as immutable versions: published
// by shards, staged beside the work, committed in one copy.
//
//	stop, err := weights.Serve(ctx, weights.Config{Bus: b, Leader: desk})          // in the head
//	client, err := weights.NewClient(weights.ClientConfig{Session: s, …})          // in each process
//	w, err := client.Open("policy")
//	err = w.Bind(ctx, versions.Any, tensors)
//	v, err := w.Publish(ctx, 7, weights.Full, nil)                                 // each rank of the trainers
//	err = w.Stage(ctx, v)                                                          // each receiver, beside its work
//	err = w.Commit(ctx, v)                                                         // … and in the pause
//
// weights/plan decides which bytes move, weights/versions which versions there are, and weights/pack moves the bytes in memory.
package weights
