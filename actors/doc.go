// Package actors is the inside of a worker: classes and their methods, lanes, lifecycle, deadlines, cancellation,
// duplicate suppression and the heartbeat. It does not know roles, GPUs or why a worker was started.
//
//	type Counter struct{ n int }
//
//	func (c *Counter) Add(ctx context.Context, by int) (int, error) { c.n += by; return c.n, nil }
//
//	counter := actors.NewClass("counter", func(ctx context.Context, s actors.Setup) (*Counter, error) {
//		return &Counter{}, nil
//	})
//	actors.Method(counter, "add", (*Counter).Add)
//
//	host, err := actors.NewHost(endpoint, actors.HostConfig{Classes: []*actors.Class{counter.Class}})
//	worker, err := host.Start(ctx, actors.WorkerSpec{Address: address, Class: "counter", Rank: 0, World: 1})
package actors
