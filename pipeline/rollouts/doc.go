// Package rollouts keeps groups of rollouts in durable streams: an engine in one process, clients in any. What happens to a
// group is decided by package groups; this package stores its events, asks the holders whether they live, and moves bodies.
//
//	r, err := rollouts.Serve(ctx, rollouts.Config{Bus: b}, "grpo", rollouts.Spec{Siblings: 8, Turns: 4, Fields: []string{"reward"}})
//	c, err := rollouts.Connect(b, "default", "grpo") // in any process
//	err = c.Put(ctx, "", 0, fields)                  // a prompt; workers: c.Take, c.Finish, c.Scoring, c.Set; a trainer: c.Batch, c.Done
package rollouts
