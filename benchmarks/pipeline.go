package benchmarks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"troupe/bus"
	"troupe/pipeline"
)

// PipelineConfig configures Pipelines: items per second for each number of stages and each size.
type PipelineConfig struct {
	Stages []int
	Bytes  []int
	Each   time.Duration // for one number and size; zero: 6 s
	Turn   int           // items in one turn of each; zero: 24 batches, 4,000 at most
	NoSync bool          // sync every two minutes, the default of NATS; zero: before each acknowledgement, as a head does
}

// PipelineResult is one number of stages at one size.
type PipelineResult struct {
	Stages     int     `json:"stages"`
	Bytes      int     `json:"bytes"`
	Items      int     `json:"items"` // measured items
	PerS       float64 `json:"items_per_s"`
	RawPerS    float64 `json:"raw_items_per_s"`
	Ratio      float64 `json:"ratio"`
	P50        float64 `json:"p50_us"` // one item through an idle pipeline
	P99        float64 `json:"p99_us"`
	RawP50     float64 `json:"raw_p50_us"`
	RawP99     float64 `json:"raw_p99_us"`
	Batch      int     `json:"batch"` // items per put, fetch and acknowledgement
	Durability string  `json:"durability"`
	Transport  string  `json:"transport"`
}

// pipelineMean is an implementation of the stages: a pipeline, or bare JetStream.
type pipelineMean interface {
	// through puts n items and returns when all have left and are acknowledged.
	through(ctx context.Context, n int) error
	stop()
}

// Pipelines measures every number of stages at every size and calls each with every result. Handlers return their item. The
// connection to the embedded server is TCP on loopback.
func Pipelines(ctx context.Context, cfg PipelineConfig, each func(PipelineResult) error) error {
	if cfg.Each == 0 {
		cfg.Each = 6 * time.Second
	}
	for _, stages := range cfg.Stages {
		for _, size := range cfg.Bytes {
			r, err := pipelineOne(ctx, cfg, stages, size)
			if err != nil {
				return fmt.Errorf("%d stages, %d bytes: %w", stages, size, err)
			}
			if err := each(r); err != nil {
				return err
			}
		}
	}
	return nil
}

func pipelineOne(ctx context.Context, cfg PipelineConfig, stages, size int) (_ PipelineResult, err error) {
	quiet := slog.New(slog.DiscardHandler)
	server, err := bus.Open(ctx, bus.Config{Name: "bench-head", Logger: quiet, Server: bus.ServerConfig{Listen: "127.0.0.1:0", SyncAlways: !cfg.NoSync}})
	if err != nil {
		return PipelineResult{}, err
	}
	defer func() { err = errors.Join(err, server.Close()) }()
	batch := max(1, min(500, (1<<20)/size))
	body := bytes.Repeat([]byte{7}, size)
	ours, err := newTroupePipeline(ctx, server.URL(), stages, batch, body)
	if err != nil {
		return PipelineResult{}, err
	}
	defer ours.stop()
	raw, err := newRawPipeline(ctx, server.URL(), stages, batch, body)
	if err != nil {
		return PipelineResult{}, err
	}
	defer raw.stop()
	r := PipelineResult{Stages: stages, Bytes: size, Batch: batch, Durability: "file, synced before it is acknowledged", Transport: "tcp"}
	if cfg.NoSync {
		r.Durability = "file, synced every two minutes"
	}
	if err := latencies(ctx, ours, &r.P50, &r.P99); err != nil {
		return r, fmt.Errorf("troupe: %w", err)
	}
	if err := latencies(ctx, raw, &r.RawP50, &r.RawP99); err != nil {
		return r, fmt.Errorf("raw: %w", err)
	}
	turn := cfg.Turn
	if turn == 0 {
		turn = min(24*batch, 4000)
	}
	err = throughputs(ctx, cfg.Each, ours, raw, turn, &r)
	return r, err
}

// latencies sends single items.
func latencies(ctx context.Context, m pipelineMean, p50, p99 *float64) error {
	var times []time.Duration
	for end := time.Now().Add(time.Second); len(times) < 20 || time.Now().Before(end) && len(times) < 500; {
		start := time.Now()
		if err := m.through(ctx, 1); err != nil {
			return err
		}
		times = append(times, time.Since(start))
	}
	*p50, *p99 = quantile(times, 0.5), quantile(times, 0.99)
	return nil
}

// throughputs sends n items at a time through both, in turns, after a warm-up of each.
func throughputs(ctx context.Context, d time.Duration, ours, raw pipelineMean, n int, r *PipelineResult) error {
	var took [2]time.Duration
	turns := 0
	for end := time.Now().Add(d); turns < 3 || time.Now().Before(end); turns++ {
		for i, m := range []pipelineMean{ours, raw} {
			start := time.Now()
			if err := m.through(ctx, n); err != nil {
				return fmt.Errorf("%s: %w", []string{"troupe", "raw"}[i], err)
			}
			if turns > 0 {
				took[i] += time.Since(start)
			}
		}
	}
	r.Items = (turns - 1) * n
	r.PerS, r.RawPerS = float64(r.Items)/took[0].Seconds(), float64(r.Items)/took[1].Seconds()
	r.Ratio = r.PerS / r.RawPerS
	return nil
}

// troupePipeline is a pipeline of functions.
type troupePipeline struct {
	b     *bus.Bus
	p     *pipeline.Pipeline
	batch int
	body  []byte
}

func newTroupePipeline(ctx context.Context, url string, stages, batch int, body []byte) (*troupePipeline, error) {
	b, err := bus.Open(ctx, bus.Config{URLs: []string{url}, Name: "bench-pipeline", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, err
	}
	spec := pipeline.Spec{Name: "bench"}
	name := func(i int) string { return fmt.Sprintf("s%d", i) }
	for i := range stages + 1 {
		spec.Streams = append(spec.Streams, pipeline.StreamSpec{Name: name(i), Sink: i == stages})
	}
	for i := range stages {
		spec.Stages = append(spec.Stages, pipeline.StageSpec{
			Name: fmt.Sprintf("stage%d", i), In: []string{name(i)}, Out: []string{name(i + 1)}, InFlight: 2 * batch,
			Func: func(_ context.Context, in []pipeline.Item) ([]pipeline.Out, error) {
				return []pipeline.Out{{Item: pipeline.Item{Body: in[0].Body}}}, nil
			},
		})
	}
	p, err := pipeline.Open(ctx, pipeline.Config{Bus: b, Namespace: "bench"}, spec)
	if err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return &troupePipeline{b: b, p: p, batch: batch, body: body}, nil
}

func (t *troupePipeline) stop() {
	_ = t.p.Close(context.Background())
	_ = t.b.Close()
}

func (t *troupePipeline) through(ctx context.Context, n int) error {
	errCh := make(chan error, 1)
	go func() { errCh <- t.feed(ctx, n) }()
	sink := fmt.Sprintf("s%d", len(t.p.Spec().Stages))
	for left := n; left > 0; {
		b, err := t.p.Take(ctx, sink, t.batch)
		if err != nil {
			return err
		}
		for _, it := range b.Items {
			if !bytes.Equal(it.Body, t.body) {
				return errors.New("an item came out changed")
			}
		}
		if err := b.Ack(ctx); err != nil {
			return err
		}
		left -= len(b.Items)
	}
	return <-errCh
}

// feed puts n items, two batches at a time.
func (t *troupePipeline) feed(ctx context.Context, n int) error {
	errCh := make(chan error, 2)
	errCh <- nil
	errCh <- nil
	for ; n > 0; n -= t.batch {
		items := make([]pipeline.Item, min(n, t.batch))
		for i := range items {
			items[i].Body = t.body
		}
		if err := <-errCh; err != nil {
			return err
		}
		go func() { errCh <- t.p.Put(ctx, "s0", items...) }()
	}
	return errors.Join(<-errCh, <-errCh)
}
