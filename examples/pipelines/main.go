// Command pipelines is rollout → reward → train as a pipeline: stages with durable streams between them, and a bound on the
// staleness of a training sample.
//
//	go run ./examples/pipelines            # ends by itself within seconds
//
// The policy is one number, the chance of answering well. Rollout workers answer prompts with it, eight samples a prompt;
// reward workers score them; the trainer takes the first six of each group, and every group is a new version of the
// policy. Samples that are more than two versions behind are dropped; the slow reward causes some.
package main

import (
	"context"
	"fmt"
	"log"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/pipeline"
	"troupe/roles"
)

const (
	prompts   = 60
	perPrompt = 8
	first     = 6
	staleness = 2.0
)

// sample is the body of an item.
type sample struct {
	Prompt int     `msgpack:"prompt"`
	Answer float64 `msgpack:"answer"`
	Reward float64 `msgpack:"reward"`
}

// policy is shared by rollout and trainer; in a real job it is weights that travel by NCCL.
var policy atomic.Int64 // thousandths

// Sampler is a rollout worker: it answers one prompt with several samples.
type Sampler struct{ dice *rand.Rand }

// item is an output of a method with the style "item".
type item struct {
	ID    string `msgpack:"id"`
	Group string `msgpack:"group"`
	Of    int    `msgpack:"of"`
	Body  sample `msgpack:"body"`
}

// prompt is an item of the stream prompts.
type prompt struct {
	ID      string  `msgpack:"id"`
	Group   string  `msgpack:"group,omitempty"`
	Version float64 `msgpack:"version"`
	Attempt int     `msgpack:"attempt"`
	Stream  string  `msgpack:"stream"`
	Body    int     `msgpack:"body"`
}

// Generate answers a prompt with its group of samples.
func (s *Sampler) Generate(_ context.Context, p prompt) ([]item, error) {
	chance := float64(policy.Load()) / 1000
	out := make([]item, perPrompt)
	for i := range out {
		answer := 0.0
		if s.dice.Float64() < chance {
			answer = 1
		}
		group := fmt.Sprintf("prompt-%d", p.Body)
		out[i] = item{ID: fmt.Sprintf("%s/%d", group, i), Group: group, Of: perPrompt, Body: sample{Prompt: p.Body, Answer: answer}}
	}
	return out, nil
}

// Judge is a reward worker.
type Judge struct{ dice *rand.Rand }

// Score takes a while, as a reward model does.
func (j *Judge) Score(ctx context.Context, s sample) (sample, error) {
	select {
	case <-ctx.Done():
		return s, ctx.Err()
	case <-time.After(time.Duration(j.dice.IntN(4)) * time.Millisecond):
	}
	s.Reward = s.Answer - 0.1
	return s, nil
}

func classes() []*actors.Class {
	sampler := actors.NewClass("sampler", func(_ context.Context, s actors.Setup) (*Sampler, error) {
		return &Sampler{dice: rand.New(rand.NewPCG(1, uint64(s.Rank)))}, nil
	})
	actors.Method(sampler, "generate", (*Sampler).Generate)
	judge := actors.NewClass("judge", func(_ context.Context, s actors.Setup) (*Judge, error) {
		return &Judge{dice: rand.New(rand.NewPCG(2, uint64(s.Rank)))}, nil
	})
	actors.Method(judge, "score", (*Judge).Score)
	return []*actors.Class{sampler.Class, judge.Class}
}

// train is a stage that is a function: one step per group, which improves the policy a little.
func train(_ context.Context, group []pipeline.Item) ([]pipeline.Out, error) {
	var sum float64
	for _, it := range group {
		var s sample
		if err := wire.Unmarshal(it.Body, &s); err != nil {
			return nil, err
		}
		sum += s.Reward
	}
	policy.Add(int64(10 + 5*sum/float64(len(group))))
	body, err := wire.Marshal(sum / float64(len(group)))
	return []pipeline.Out{{Item: pipeline.Item{Body: body}}}, err
}

func spec() pipeline.Spec {
	return pipeline.Spec{
		Name: "rl",
		Streams: []pipeline.StreamSpec{
			{Name: "prompts", Items: 4}, // a small bound: rollouts are made shortly before they are used
			{Name: "samples", Items: 64},
			{Name: "scored", Items: 256},
			{Name: "steps", Sink: true},
		},
		Stages: []pipeline.StageSpec{
			{Name: "rollout", In: []string{"prompts"}, Out: []string{"samples"}, Role: "rollout", Method: "generate", Style: pipeline.Items, Stamp: true},
			{Name: "reward", In: []string{"samples"}, Out: []string{"scored"}, Role: "reward", Method: "score", InFlight: 2},
			{
				Name: "train", In: []string{"scored"}, Out: []string{"steps"}, Func: train, Advance: pipeline.VersionOf(1),
				Group: &pipeline.GroupSpec{First: first, Every: 300 * time.Millisecond},
				Stale: &pipeline.StaleSpec{Bound: pipeline.VersionOf(staleness), Then: pipeline.Drop},
			},
		},
	}
}

func main() {
	if err := run(context.Background()); err != nil {
		log.SetFlags(0)
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	b, err := bus.Open(ctx, bus.Config{}) // no server given: a private one in this process
	if err != nil {
		return err
	}
	defer func() { _ = b.Close() }()
	rt, err := roles.Open(ctx, roles.Config{Bus: b, Classes: classes()})
	if err != nil {
		return err
	}
	defer func() { _ = rt.Close(ctx) }()
	rollout, err := rt.Create(ctx, roles.Spec{Name: "rollout", Class: "sampler", World: 2})
	if err != nil {
		return err
	}
	reward, err := rt.Create(ctx, roles.Spec{Name: "reward", Class: "judge", World: 3})
	if err != nil {
		return err
	}
	policy.Store(200)
	p, err := pipeline.Open(ctx, pipeline.Config{Bus: b, Clusters: []*roles.Cluster{rollout, reward}}, spec())
	if err != nil {
		return err
	}
	defer func() { _ = p.Close(ctx) }()
	for i := range prompts {
		body, err := wire.Marshal(i)
		if err != nil {
			return err
		}
		if err := p.Put(ctx, "prompts", pipeline.Item{Body: body}); err != nil { // waits while the stream is full
			return err
		}
	}
	if err := p.Drain(ctx); err != nil {
		return err
	}
	return report(ctx, p)
}

func report(ctx context.Context, p *pipeline.Pipeline) error {
	st, err := p.Status(ctx)
	if err != nil {
		return err
	}
	samples, scored := st.Streams[1], st.Streams[2]
	fmt.Printf("%d prompts, %d samples: %d steps to version %v; %d samples were stale, %d were late\n",
		st.Streams[0].In, samples.In, st.Stages[2].Handled, st.Version, scored.Stale, scored.Late)
	fmt.Printf("policy: 0.200 → %.3f; %d dead letters, %d left in the streams\n", float64(policy.Load())/1000, st.Dead, samples.Items+scored.Items)
	return nil
}
