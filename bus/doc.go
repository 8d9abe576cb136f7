// Package bus connects Troupe to NATS: servers and connections, the base of every subject, requests (Serve, Ask), sessions, and
// retries. bus/values moves large bodies and refers to them, bus/calls makes calls on the ranks of a role. Only bus and its subpackages import
// NATS: bus/wire has the bytes of frames, values and errors, bus/kv the keys, leases and leaders.
//
//	b, err := bus.Open(ctx, bus.Config{}) // a private embedded server
//	sub, err := b.Serve("troupe.example", func(m *bus.Msg) (any, error) { return len(m.Data), nil })
//	err = b.Ask(ctx, "troupe.example", "hello", &n)
//
// NATS may lose, duplicate and delay messages. Ask repeats a request, so that a handler may see it twice.
package bus
