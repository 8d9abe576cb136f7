package pipeline_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/bus/bustest"
	"troupe/bus/stream"
	"troupe/bus/wire"
	"troupe/pipeline"
)

// testContext ends long after anything a test waits for.
func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// open opens a pipeline that is closed at the end of the test.
func open(t testing.TB, b *bus.Bus, spec pipeline.Spec, more ...func(*pipeline.Config)) *pipeline.Pipeline {
	t.Helper()
	cfg := pipeline.Config{Bus: b, Grace: 2 * time.Second}
	for _, m := range more {
		m(&cfg)
	}
	p, err := pipeline.Open(testContext(t), cfg, spec)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(context.Background())) })
	return p
}

func newBus(t testing.TB) *bus.Bus { return bustest.Open(t) }

// items are n items whose body is their number.
func items(n int) []pipeline.Item {
	out := make([]pipeline.Item, n)
	for i := range out {
		body, _ := wire.Marshal(i)
		out[i] = pipeline.Item{ID: fmt.Sprintf("i%d", i), Body: body}
	}
	return out
}

// pass is a handler that returns its items.
func pass(_ context.Context, in []pipeline.Item) ([]pipeline.Out, error) {
	out := make([]pipeline.Out, len(in))
	for i := range in {
		out[i] = pipeline.Out{Item: pipeline.Item{ID: in[i].ID, Body: in[i].Body}}
	}
	return out, nil
}

// drainSink takes n items from a sink.
func drainSink(t testing.TB, p *pipeline.Pipeline, sink string, n int) []pipeline.Item {
	t.Helper()
	var got []pipeline.Item
	for len(got) < n {
		b, err := p.Take(testContext(t), sink, n-len(got))
		if err != nil {
			st, _ := json.Marshal(status(t, p))
			require.NoError(t, err, "%d of %d: %s", len(got), n, st)
		}
		got = append(got, b.Items...)
		require.NoError(t, b.Ack(testContext(t)))
	}
	return got
}

func newStream(name string) pipeline.StreamSpec { return pipeline.StreamSpec{Name: name} }
func newSink(name string) pipeline.StreamSpec {
	return pipeline.StreamSpec{Name: name, Sink: true}
}

func status(t testing.TB, p *pipeline.Pipeline) pipeline.Status {
	st, err := p.Status(testContext(t))
	require.NoError(t, err)
	return st
}

// findStream opens a JetStream stream of a pipeline.
func findStream(t testing.TB, b *bus.Bus, name string) *stream.Stream {
	t.Helper()
	s, err := stream.Find(testContext(t), b, name)
	require.NoError(t, err)
	return s
}

func stateOf(t testing.TB, s *stream.Stream) stream.State {
	t.Helper()
	st, err := s.State(testContext(t))
	require.NoError(t, err)
	return st
}

func appendMsg(t testing.TB, b *bus.Bus, m *bus.Msg) (seq uint64) {
	t.Helper()
	ack, err := stream.Append(testContext(t), b, []*bus.Msg{m}, "")
	require.NoError(t, err)
	return ack.Seq
}

// lastMessage is the newest message on a subject.
func lastMessage(t testing.TB, s *stream.Stream, subject string) (last stream.Message) {
	t.Helper()
	require.NoError(t, s.Each(testContext(t), stream.ReadOptions{Subject: subject}, func(m stream.Message) error { last = m; return nil }))
	require.NotZero(t, last.Seq)
	return last
}
