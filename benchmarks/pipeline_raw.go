package benchmarks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"troupe/bus"
)

// rawPipeline is the same hops with bare JetStream: a work queue before each stage; a stage fetches a batch, publishes it, waits
// for the store, and acknowledges. Deliveries may repeat, and an item may be stored twice.
type rawPipeline struct {
	b      *bus.Bus
	js     jetstream.JetStream
	batch  int
	body   []byte
	last   jetstream.Consumer
	cancel context.CancelFunc
	group  sync.WaitGroup

	mu  sync.Mutex
	err error
}

func rawSubject(i int) string { return fmt.Sprintf("raw.%d", i) }

func newRawPipeline(ctx context.Context, url string, stages, batch int, body []byte) (*rawPipeline, error) {
	b, err := bus.Open(ctx, bus.Config{URLs: []string{url}, Name: "bench-raw", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, err
	}
	js, err := jetstream.New(b.Conn(), jetstream.WithPublishAsyncMaxPending(16*batch+64))
	if err != nil {
		return nil, errors.Join(err, b.Close())
	}
	r := &rawPipeline{b: b, js: js, batch: batch, body: body}
	run, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	for i := range stages + 1 {
		c, err := r.queue(ctx, i)
		if err != nil {
			r.stop()
			return nil, err
		}
		if i == stages {
			r.last = c
			break
		}
		r.group.Go(func() {
			if err := r.stage(run, c, i+1); err != nil && run.Err() == nil {
				r.fail(err)
			}
		})
	}
	return r, nil
}

func (r *rawPipeline) queue(ctx context.Context, i int) (jetstream.Consumer, error) {
	name := fmt.Sprintf("RAW%d", i)
	s, err := r.js.CreateStream(ctx, jetstream.StreamConfig{
		Name: name, Subjects: []string{rawSubject(i)}, Retention: jetstream.WorkQueuePolicy, Storage: jetstream.FileStorage, MaxBytes: 1 << 30,
		Discard: jetstream.DiscardNew,
	})
	if err != nil {
		return nil, err
	}
	return s.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "stage", AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: 10_000})
}

func (r *rawPipeline) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err = errors.Join(r.err, err)
}

// stage passes items on until ctx ends.
func (r *rawPipeline) stage(ctx context.Context, c jetstream.Consumer, to int) error {
	for ctx.Err() == nil {
		msgs, err := r.fetch(c, r.batch)
		if err != nil {
			return err
		}
		acks := make([]jetstream.PubAckFuture, len(msgs))
		for i, m := range msgs {
			if acks[i], err = r.js.PublishMsgAsync(&nats.Msg{Subject: rawSubject(to), Data: m.Data()}, jetstream.WithStallWait(30*time.Second)); err != nil {
				return err
			}
		}
		if err := settleAll(ctx, acks); err != nil {
			return err
		}
		for _, m := range msgs {
			if err := m.Ack(); err != nil {
				return err
			}
		}
	}
	return nil
}

// fetch takes up to n items, and waits for the first.
func (r *rawPipeline) fetch(c jetstream.Consumer, n int) ([]jetstream.Msg, error) {
	batch, err := c.FetchNoWait(n)
	if err != nil {
		return nil, err
	}
	var msgs []jetstream.Msg
	for m := range batch.Messages() {
		msgs = append(msgs, m)
	}
	if len(msgs) > 0 || batch.Error() != nil {
		return msgs, batch.Error()
	}
	one, err := c.Fetch(1, jetstream.FetchMaxWait(time.Second))
	if err != nil {
		return nil, err
	}
	for m := range one.Messages() {
		msgs = append(msgs, m)
	}
	if err := one.Error(); err != nil && !errors.Is(err, nats.ErrTimeout) {
		return nil, err
	}
	return msgs, nil
}

// settleAll waits for the acknowledgement of every publish.
func settleAll(ctx context.Context, acks []jetstream.PubAckFuture) error {
	for _, a := range acks {
		select {
		case <-a.Ok():
		case err := <-a.Err():
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (r *rawPipeline) through(ctx context.Context, n int) error {
	errCh := make(chan error, 1)
	go func() { errCh <- r.feed(ctx, n) }()
	for left := n; left > 0; {
		msgs, err := r.fetch(r.last, r.batch)
		if err != nil {
			return err
		}
		for _, m := range msgs {
			if !bytes.Equal(m.Data(), r.body) {
				return errors.New("an item came out changed")
			}
			if err := m.Ack(); err != nil {
				return err
			}
		}
		left -= len(msgs)
		r.mu.Lock()
		err = r.err
		r.mu.Unlock()
		if err != nil {
			return err
		}
	}
	if err := <-errCh; err != nil {
		return err
	}
	return r.settled(ctx)
}

// settled waits until the last acknowledgement has reached the server, as Done of a batch does.
func (r *rawPipeline) settled(ctx context.Context) error {
	for {
		info, err := r.last.Info(ctx)
		if err != nil || info.NumAckPending == 0 {
			return err
		}
	}
}

// feed publishes n items, two batches at a time.
func (r *rawPipeline) feed(ctx context.Context, n int) error {
	var before []jetstream.PubAckFuture
	for ; n > 0; n -= r.batch {
		acks := make([]jetstream.PubAckFuture, min(n, r.batch))
		for i := range acks {
			var err error
			if acks[i], err = r.js.PublishMsgAsync(&nats.Msg{Subject: rawSubject(0), Data: r.body}, jetstream.WithStallWait(30*time.Second)); err != nil {
				return err
			}
		}
		if err := settleAll(ctx, before); err != nil {
			return err
		}
		before = acks
	}
	return settleAll(ctx, before)
}

func (r *rawPipeline) stop() {
	r.cancel()
	r.group.Wait()
	_ = r.b.Close()
}
