package rollouts_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"troupe/bus"
	"troupe/pipeline/rollouts"
)

const (
	benchSiblings = 8
	benchWriters  = 32 // samples that are made at once
	benchBatch    = 4  // groups that are trained at once
)

// benchServer syncs to disk before it acknowledges, as a head does; clients have connections of their own.
func benchServer(b *testing.B) func(name string) *bus.Bus {
	server, err := bus.Open(b.Context(), bus.Config{Name: "server", Server: bus.ServerConfig{Listen: "127.0.0.1:0", StoreDir: b.TempDir(), SyncAlways: true}})
	require.NoError(b, err)
	b.Cleanup(func() { _ = server.Close() })
	return func(name string) *bus.Bus {
		c, err := bus.Open(b.Context(), bus.Config{Name: name, URLs: []string{server.URL()}})
		require.NoError(b, err)
		b.Cleanup(func() { _ = c.Close() })
		return c
	}
}

// inParallel runs do for each of n numbers, by writers.
func inParallel(b *testing.B, n int, do func(writer int) error) {
	var group sync.WaitGroup
	ch := make(chan struct{}, n)
	for range n {
		ch <- struct{}{}
	}
	close(ch)
	for w := range benchWriters {
		group.Go(func() {
			for range ch {
				if err := do(w); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	group.Wait()
}

// BenchmarkSamples makes samples of one turn, and reads and trains their groups. One operation is one sample.
func BenchmarkSamples(b *testing.B) {
	for _, size := range []int{1024, 65536} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			connectTo := benchServer(b)
			s, err := rollouts.Serve(b.Context(), rollouts.Config{Bus: connectTo("engine")}, "grpo", rollouts.Spec{Siblings: benchSiblings, Open: 10_000, Bytes: 512 << 20})
			require.NoError(b, err)
			b.Cleanup(s.Close)
			workers, trainer := connect(b, connectTo("workers")), connect(b, connectTo("trainer"))
			groups := (b.N + benchSiblings*benchBatch - 1) / (benchSiblings * benchBatch) * benchBatch
			data := fields("tokens", body(1, size))
			for range groups {
				require.NoError(b, workers.Put(b.Context(), "", 0, fields("prompt", []byte("p"))))
			}
			b.SetBytes(int64(size))
			b.ResetTimer()
			var all sync.WaitGroup
			all.Go(func() {
				for range groups / benchBatch {
					batch, err := trainer.Batch(b.Context(), benchBatch)
					require.NoError(b, err)
					var bodies []*rollouts.Body
					for _, g := range batch.Groups {
						for _, m := range g.Samples {
							bodies = append(bodies, m.Turns[0].Body)
						}
					}
					_, err = trainer.Read(b.Context(), bodies)
					require.NoError(b, err)
					require.NoError(b, batch.Done(b.Context()))
				}
			})
			inParallel(b, groups*benchSiblings, func(int) error {
				m, err := workers.Take(b.Context())
				if err != nil {
					return err
				}
				return m.Finish(b.Context(), 0, 0, true, data)
			})
			all.Wait()
		})
	}
}

// BenchmarkBare does the same with two work queues of bare JetStream: a sample is fetched, its result is published and then
// acknowledged, and a trainer fetches results and acknowledges them. The prompts are there before.
func BenchmarkBare(b *testing.B) {
	for _, size := range []int{1024, 65536} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			ctx := b.Context()
			connectTo := benchServer(b)
			workers, trainer := connectTo("workers").JetStream(), connectTo("trainer").JetStream()
			open := func(js jetstream.JetStream, name string) jetstream.Consumer {
				_, err := js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{Name: name, Subjects: []string{name}, Retention: jetstream.WorkQueuePolicy})
				require.NoError(b, err)
				c, err := js.CreateOrUpdateConsumer(ctx, name, jetstream.ConsumerConfig{Durable: name, AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: 1 << 16})
				require.NoError(b, err)
				return c
			}
			samples, results := open(workers, "samples"), open(trainer, "results")
			per := benchSiblings * benchBatch
			n := (b.N + per - 1) / per * per
			data := body(1, size)
			for range n {
				_, err := workers.Publish(ctx, "samples", []byte("p"))
				require.NoError(b, err)
			}
			b.SetBytes(int64(size))
			b.ResetTimer()
			var all sync.WaitGroup
			all.Go(func() {
				for got := 0; got < n; {
					batch, err := results.Fetch(per, jetstream.FetchMaxWait(time.Second))
					require.NoError(b, err)
					for m := range batch.Messages() {
						require.NoError(b, m.DoubleAck(ctx))
						got++
					}
				}
			})
			inParallel(b, n, func(int) error {
				for {
					m, err := samples.Next(jetstream.FetchMaxWait(time.Second))
					if err != nil {
						continue
					}
					if _, err := workers.Publish(ctx, "results", data); err != nil {
						return err
					}
					return m.DoubleAck(ctx)
				}
			})
			all.Wait()
		})
	}
}
