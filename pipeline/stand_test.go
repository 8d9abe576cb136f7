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
	"troupe/bus/wire"
	"troupe/pipeline"
)

// patient is a context for what must end long before it does.
func patient(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 40*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// open is a pipeline that ends with the test.
func open(t testing.TB, b *bus.Bus, spec pipeline.Spec, more ...func(*pipeline.Config)) *pipeline.Pipeline {
	t.Helper()
	cfg := pipeline.Config{Bus: b, Grace: 2 * time.Second}
	for _, m := range more {
		m(&cfg)
	}
	p, err := pipeline.Open(patient(t), cfg, spec)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close(context.Background())) })
	return p
}

func newBus(t testing.TB) *bus.Bus { return bustest.Open(t) }

// items are bodies that say their number.
func items(n int) []pipeline.Item {
	out := make([]pipeline.Item, n)
	for i := range out {
		body, _ := wire.Marshal(i)
		out[i] = pipeline.Item{ID: fmt.Sprintf("i%d", i), Body: body}
	}
	return out
}

// pass is a handler that hands its item on.
func pass(_ context.Context, in []pipeline.Item) ([]pipeline.Out, error) {
	out := make([]pipeline.Out, len(in))
	for i := range in {
		out[i] = pipeline.Out{Item: pipeline.Item{ID: in[i].ID, Body: in[i].Body}}
	}
	return out, nil
}

// drainSink takes n items out of a sink.
func drainSink(t testing.TB, p *pipeline.Pipeline, sink string, n int) []pipeline.Item {
	t.Helper()
	var got []pipeline.Item
	for len(got) < n {
		b, err := p.Take(patient(t), sink, n-len(got))
		if err != nil {
			st, _ := json.Marshal(status(t, p))
			require.NoError(t, err, "%d of %d: %s", len(got), n, st)
		}
		got = append(got, b.Items...)
		require.NoError(t, b.Done(patient(t)))
	}
	return got
}

func stream(name string) pipeline.StreamSpec { return pipeline.StreamSpec{Name: name} }
func sink(name string) pipeline.StreamSpec {
	return pipeline.StreamSpec{Name: name, Sink: true}
}

func status(t testing.TB, p *pipeline.Pipeline) pipeline.Status {
	st, err := p.Status(patient(t))
	require.NoError(t, err)
	return st
}
