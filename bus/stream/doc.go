// Package stream stores messages in JetStream streams and reads them back in order. Packages above bus use it instead of
// JetStream itself. Errors have the codes of bus: ErrNotFound for a stream or message that does not exist, ErrConflict for
// a write that does not follow the expected sequence, ErrNoSpace for a full store, ErrUnavailable for everything that may
// succeed later.
//
//	s, err := stream.Create(ctx, b, stream.Config{Name: "orders", Subject: "orders.>", MaxBytes: 1 << 20})
//	stream.ExpectLast(msgs[0], last)              // the write is refused unless it follows this sequence
//	ack, err := stream.Append(ctx, b, msgs, id)   // all messages or none
//	err = s.Each(ctx, stream.ReadOptions{Subject: "orders.eu"}, func(m stream.Message) error { … })
package stream
