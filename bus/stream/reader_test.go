package stream

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
)

// A reader has not reached the end while the leader has a message for it that it has not read. A message that
// was deleted, or lies before its start, is not waited for.
func TestReaderBehindTheLeader(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	b := bustest.Open(t, bus.Config{InProcess: bustest.StartCluster(t)[0], OnError: func(error) {}})
	var s *Stream
	require.Eventually(t, func() (ok bool) { // the last peers may still be on their way
		var err error
		s, err = Create(ctx, b, Config{Name: "orders", Subject: "orders.>", MaxBytes: 1 << 20, Replicas: 3})
		return err == nil
	}, 2*time.Minute, 20*time.Millisecond)
	store := func(subject string) uint64 {
		var ack Ack
		var err error
		require.Eventually(t, func() bool { // the servers may not have told each other yet where the stream listens
			ack, err = Append(ctx, b, []*bus.Msg{{Subject: subject, Data: []byte("x")}}, "")
			return !errors.Is(err, nats.ErrNoResponders)
		}, 2*time.Minute, 20*time.Millisecond)
		require.NoError(t, err)
		return ack.Seq
	}
	behind := func(r *Reader) bool {
		is, err := r.behind(ctx)
		require.NoError(t, err)
		return is
	}
	store("orders.eu")
	second := store("orders.eu")
	store("orders.us")

	r := &Reader{s: s, o: ReadOptions{Subject: "orders.eu"}}
	require.True(t, behind(r), "nothing was read")
	r.highest = second
	require.False(t, behind(r), "everything was read")
	store("orders.eu")
	require.True(t, behind(r), "another was stored")

	require.False(t, behind(&Reader{s: s, o: ReadOptions{Subject: "orders.none"}}), "there is nothing to read")
	require.False(t, behind(&Reader{s: s, o: ReadOptions{Subject: "orders.us", From: second + 2}}), "it lies before the start")
	require.True(t, behind(&Reader{s: s}), "all subjects")

	late := &Reader{s: s, o: ReadOptions{Subject: "orders.us"}}
	require.True(t, behind(late))
	require.NoError(t, s.Purge(ctx, "orders.us", 0))
	require.False(t, behind(late), "it was deleted")
}

// A message that went to somebody else, as one does that was sent for a request which its process had given up, is read again.
func TestALostMessageIsReadAgain(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	b := bustest.Open(t, bus.Config{})
	s, err := Create(ctx, b, Config{Name: "lost", Subject: "lost.>", MaxBytes: 1 << 20})
	require.NoError(t, err)
	const stored = 10
	for range stored {
		_, err := Append(ctx, b, []*bus.Msg{{Subject: "lost.x", Data: []byte("x")}}, "")
		require.NoError(t, err)
	}
	r, err := s.Reader(ctx, ReadOptions{})
	require.NoError(t, err)
	defer r.Close(ctx)
	var got []uint64
	read := func(n int) (some bool) {
		msgs, err := r.Next(ctx, n)
		require.NoError(t, err)
		for _, m := range msgs {
			got = append(got, m.Seq)
		}
		return len(msgs) > 0
	}
	lose := func(n int) {
		c, err := b.JetStream().Consumer(ctx, "lost", r.consumer.CachedInfo().Name)
		require.NoError(t, err)
		batch, err := c.FetchNoWait(n)
		require.NoError(t, err)
		for range batch.Messages() {
			n--
		}
		require.Zero(t, n)
	}
	read(3)
	lose(2) // those that follow show it
	read(3)
	lose(stored - len(got)) // nothing follows
	for read(3) {
	}
	require.Equal(t, []uint64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, got)
}
