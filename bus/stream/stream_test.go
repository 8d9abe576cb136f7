package stream_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/stream"
)

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func create(t testing.TB, b *bus.Bus) *stream.Stream {
	t.Helper()
	s, err := stream.Create(testContext(t), b, stream.Config{Name: "orders", Subject: "orders.>", MaxBytes: 1 << 20, Replace: true})
	require.NoError(t, err)
	return s
}

func message(subject, data string) *bus.Msg { return &bus.Msg{Subject: subject, Data: []byte(data)} }

// store appends one message per text to orders.eu.
func store(t testing.TB, b *bus.Bus, texts ...string) {
	t.Helper()
	for _, text := range texts {
		_, err := stream.Append(testContext(t), b, []*bus.Msg{message("orders.eu", text)}, "")
		require.NoError(t, err)
	}
}

func read(t testing.TB, s *stream.Stream, o stream.ReadOptions) (out []string) {
	t.Helper()
	require.NoError(t, s.Each(testContext(t), o, func(m stream.Message) error {
		out = append(out, string(m.Data))
		return nil
	}))
	return out
}

// A batch is stored whole, at consecutive sequences, or not at all.
func TestBatchIsAtomic(t *testing.T) {
	t.Parallel()
	b := bustest.Open(t)
	s := create(t, b)
	batch := func() []*bus.Msg {
		return []*bus.Msg{message("orders.eu", "a"), message("orders.us", "b"), message("orders.eu", "c")}
	}
	ack, err := stream.Append(testContext(t), b, batch(), "one")
	require.NoError(t, err)
	require.EqualValues(t, 3, ack.Seq)
	require.Equal(t, []string{"a", "b", "c"}, read(t, s, stream.ReadOptions{}))

	late := batch()
	stream.ExpectLast(late[0], 2)
	_, err = stream.Append(testContext(t), b, late, "two")
	require.ErrorIs(t, err, bus.ErrConflict)
	require.Len(t, read(t, s, stream.ReadOptions{}), 3, "nothing of a rejected batch is stored")

	next := batch()
	stream.ExpectLast(next[0], 3)
	ack, err = stream.Append(testContext(t), b, next, "three")
	require.NoError(t, err)
	require.EqualValues(t, 6, ack.Seq)
}

// AppendAsync sends the acknowledgement, or the error, to the reply subject.
func TestAppendAsync(t *testing.T) {
	t.Parallel()
	b := bustest.Open(t)
	create(t, b)
	ackCh := make(chan *bus.Msg, 2)
	inbox := b.NewInbox()
	sub, err := b.SubscribeChan(inbox, ackCh)
	require.NoError(t, err)
	defer func() { require.NoError(t, sub.Unsubscribe()) }()
	require.NoError(t, stream.AppendAsync(b, []*bus.Msg{message("orders.eu", "a"), message("orders.eu", "b")}, "one", inbox))
	ack, err := stream.ParseAck(<-ackCh)
	require.NoError(t, err)
	require.EqualValues(t, 2, ack.Seq)
	late := message("orders.eu", "c")
	stream.ExpectLast(late, 7)
	require.NoError(t, stream.AppendAsync(b, []*bus.Msg{late}, "", inbox))
	_, err = stream.ParseAck(<-ackCh)
	require.ErrorIs(t, err, bus.ErrConflict)
}

// Readers return the messages that are left, in order, by subject and from a sequence.
func TestRead(t *testing.T) {
	t.Parallel()
	b := bustest.Open(t)
	s := create(t, b)
	var texts, even []string
	for i := range 600 { // more than one fetch
		text := fmt.Sprint(i)
		texts = append(texts, text)
		if i%2 == 0 {
			even = append(even, text)
		}
		_, err := stream.Append(testContext(t), b, []*bus.Msg{message([]string{"orders.eu", "orders.us"}[i%2], text)}, "")
		require.NoError(t, err)
	}
	require.Equal(t, texts, read(t, s, stream.ReadOptions{}))
	require.Equal(t, even, read(t, s, stream.ReadOptions{Subject: "orders.eu"}))
	require.Equal(t, texts[99:], read(t, s, stream.ReadOptions{From: 100}))
	require.Empty(t, read(t, s, stream.ReadOptions{Since: time.Now().Add(time.Hour)}))
	for _, text := range read(t, s, stream.ReadOptions{HeadersOnly: true, From: 590}) {
		require.Empty(t, text)
	}
	require.NoError(t, s.DeleteMessages(testContext(t), []uint64{1, 2, 2, 9999}), "a message that does not exist is no error")
	require.NoError(t, s.Purge(testContext(t), "orders.eu", 300))
	require.Equal(t, texts[3], read(t, s, stream.ReadOptions{})[0])
	require.Equal(t, texts[300], read(t, s, stream.ReadOptions{Subject: "orders.eu"})[0])
	m, err := s.GetNext(testContext(t), "orders.eu", 1)
	require.NoError(t, err)
	require.EqualValues(t, 301, m.Seq)
	st, err := s.State(testContext(t))
	require.NoError(t, err)
	require.EqualValues(t, 600, st.LastSeq)
	require.EqualValues(t, 1<<20, st.MaxBytes)
}

// A reader continues where it was, and reports the end of the stream with no messages.
func TestReaderReachesTheEnd(t *testing.T) {
	t.Parallel()
	b := bustest.Open(t)
	s := create(t, b)
	store(t, b, "a", "b", "c")
	r, err := s.Reader(testContext(t), stream.ReadOptions{})
	require.NoError(t, err)
	defer r.Close(testContext(t))
	for _, want := range []int{2, 1, 0} {
		msgs, err := r.Next(testContext(t), 2)
		require.NoError(t, err)
		require.Len(t, msgs, want)
	}
	for range 500 { // the server counts a message for the reader a little after its acknowledgement
		store(t, b, "d")
		msgs, err := r.Next(testContext(t), 2)
		require.NoError(t, err)
		require.Len(t, msgs, 1)
	}
}

// A message that replaces others is the only one of its subject; it expires after its time.
func TestReplacing(t *testing.T) {
	t.Parallel()
	b := bustest.Open(t)
	s := create(t, b)
	store(t, b, "a", "b")
	m := message("orders.eu", "c")
	m.Header = stream.Replacing(0)
	_, err := stream.Append(testContext(t), b, []*bus.Msg{m}, "")
	require.NoError(t, err)
	require.Equal(t, []string{"c"}, read(t, s, stream.ReadOptions{}))
	m = message("orders.eu", "d")
	m.Header = stream.Replacing(time.Second)
	_, err = stream.Append(testContext(t), b, []*bus.Msg{m}, "")
	require.NoError(t, err)
	require.Eventually(t, func() bool { return len(read(t, s, stream.ReadOptions{})) == 0 }, 2*time.Minute, 20*time.Millisecond)
}

// Streams and messages that do not exist are bus.ErrNotFound; a deleted stream is gone.
func TestNotFound(t *testing.T) {
	t.Parallel()
	b := bustest.Open(t)
	_, err := stream.Find(testContext(t), b, "orders")
	require.ErrorIs(t, err, bus.ErrNotFound)
	require.NoError(t, stream.Delete(testContext(t), b, "orders"))
	s := create(t, b)
	_, err = s.Get(testContext(t), 1)
	require.ErrorIs(t, err, bus.ErrNotFound)
	names, err := stream.Names(testContext(t), b, "ord")
	require.NoError(t, err)
	require.Equal(t, []string{"orders"}, names)
	require.NoError(t, stream.Delete(testContext(t), b, "orders"))
	_, err = s.State(testContext(t))
	require.ErrorIs(t, err, bus.ErrNotFound)
}

// A full stream rejects writes; a lossy one drops its oldest messages, and keeps its bounds when it is opened again.
func TestBounds(t *testing.T) {
	t.Parallel()
	b := bustest.Open(t)
	fill := func(subject string) error {
		for range 8 {
			if _, err := stream.Append(testContext(t), b, []*bus.Msg{message(subject, string(make([]byte, 1000)))}, ""); err != nil {
				return err
			}
		}
		return nil
	}
	_, err := stream.Create(testContext(t), b, stream.Config{Name: "strict", Subject: "strict", MaxBytes: 4000})
	require.NoError(t, err)
	require.Error(t, fill("strict"))
	for _, bytes := range []int64{4000, 9000} {
		s, err := stream.Open(testContext(t), b, stream.Config{Name: "lossy", Subject: "lossy", MaxBytes: bytes, Lossy: true})
		require.NoError(t, err)
		require.NoError(t, fill("lossy"))
		st, err := s.State(testContext(t))
		require.NoError(t, err)
		require.EqualValues(t, 4000, st.MaxBytes)
		require.Less(t, st.Messages, uint64(8))
	}
}

// Follow delivers stored messages and later ones, until the callback returns an error.
func TestFollow(t *testing.T) {
	t.Parallel()
	b := bustest.Open(t)
	s := create(t, b)
	store(t, b, "a", "b")
	errEnough := errors.New("enough")
	var got []string
	err := s.Follow(testContext(t), stream.ReadOptions{Subject: "orders.eu", From: 2}, func(m stream.Message) error {
		if got = append(got, string(m.Data)); len(got) == 3 {
			return errEnough
		}
		store(t, b, "more")
		return nil
	})
	require.ErrorIs(t, err, errEnough)
	require.Equal(t, []string{"b", "more", "more"}, got)
	ctx, cancel := context.WithCancel(t.Context())
	err = s.Follow(ctx, stream.ReadOptions{}, func(stream.Message) error { cancel(); return nil })
	require.ErrorIs(t, err, bus.ErrCancelled)
}
