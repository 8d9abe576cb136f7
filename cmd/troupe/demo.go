package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/spf13/cobra"

	"troupe/actors"
	"troupe/bus"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/roles"
)

const (
	demoRows    = 512
	demoTimeout = 20 * time.Second // of one call: the demo may fail, but not hang
	klWeight    = 0.01             // what leaving the reference policy costs
)

func newDemo(c *cli) *cobra.Command {
	steps := 5
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Run a small reinforcement-learning job over five roles, in this process",
		Long: `Demo starts an embedded server and five roles as goroutines, and trains a toy policy that is to say the alphabet:
actor_infer writes answers, reward, reference and critic look at them at the same time, actor_train learns and hands its
weights over. Each method is called in the dispatch mode it would use on GPUs; tensors really travel, and what is printed
was measured. It needs no configuration and leaves nothing behind.`,
		Example: "  troupe demo\n  troupe demo --steps 20\n  troupe demo --json | jq '{step, reward, ms}'",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if steps < 1 || steps > 10_000 {
				return usagef("--steps %d: must be between 1 and 10000", steps)
			}
			return c.demo(cmd.Context(), steps)
		},
	}
	cmd.Flags().IntVar(&steps, "steps", steps, "training steps")
	c.jsonFlag(cmd, "print one JSON object a step, with every call in it")
	return cmd
}

// demoSpecs are the roles, as a real job would lay them out on 20 GPUs.
func demoSpecs() []roles.Spec {
	return []roles.Spec{
		{Name: "actor_train", Class: "trainer", World: 8, Mesh: dispatch.Mesh{DP: 2, TP: 2, PP: 2}, Config: trainerConfig{LearningRate: 120, Clip: 0.2}},
		{Name: "actor_infer", Class: "generator", World: 4},
		{Name: "reference", Class: "scorer", World: 4, Mesh: dispatch.Mesh{PP: 2}},
		{Name: "critic", Class: "critic", World: 2},
		{Name: "reward", Class: "judge", World: 4},
	}
}

// demo is the driver of the job.
func (c *cli) demo(ctx context.Context, steps int) (err error) {
	d := &demo{show: newDemoShow(c), dice: rand.New(rand.NewPCG(1, 2))}
	defer func() { err = errors.Join(err, d.close(ctx)) }()
	if err := d.open(ctx); err != nil {
		return err
	}
	if err := d.prepare(ctx); err != nil {
		return err
	}
	for step := 1; step <= steps; step++ {
		if err := d.step(ctx, step, step == steps); err != nil {
			return fmt.Errorf("step %d: %w", step, err)
		}
	}
	d.show.end(d)
	return nil
}

type demo struct {
	show   *demoShow
	dice   *rand.Rand
	head   *bus.Bus // the server, and the driver's connection
	inside *bus.Bus // the workers' connection: apart, so that what the driver sends can be counted
	local  *roles.Local
	rt     *roles.Runtime

	train, infer, reference, critic, reward *roles.Cluster
}

// open starts the server and the roles.
func (d *demo) open(ctx context.Context) (err error) {
	if d.head, err = bus.Open(ctx, bus.Config{Name: "demo-driver"}); err != nil {
		return err
	}
	if d.inside, err = d.head.Dial(ctx, "demo-workers"); err != nil {
		return err
	}
	d.local = roles.NewLocal(d.inside, demoClasses())
	if d.rt, err = roles.Open(ctx, roles.Config{Bus: d.head, Local: d.local, Namespace: "demo"}); err != nil {
		return err
	}
	clusters := []**roles.Cluster{&d.train, &d.infer, &d.reference, &d.critic, &d.reward}
	for i, spec := range demoSpecs() {
		start := time.Now()
		if *clusters[i], err = d.rt.Create(ctx, spec); err != nil {
			return err
		}
		d.show.created(*clusters[i], time.Since(start))
	}
	return nil
}

// close takes everything down, also when ctx has ended.
func (d *demo) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), demoTimeout)
	defer cancel()
	var errs []error
	if d.rt != nil {
		errs = append(errs, d.rt.Close(ctx))
	}
	if d.local != nil {
		errs = append(errs, d.local.Close(ctx))
	}
	for _, b := range []*bus.Bus{d.inside, d.head} {
		if b != nil {
			errs = append(errs, b.Close())
		}
	}
	return errors.Join(errs...)
}

// prepare hands every role what it needs before the first step.
func (d *demo) prepare(ctx context.Context) error {
	d.show.section(sectionReady)
	for _, c := range []*roles.Cluster{d.train, d.reference, d.critic} {
		if err := d.tell(ctx, c, "initialise", c.Handle()); err != nil { // a role is a value that can be sent
			return err
		}
	}
	seeds := make([]uint64, d.infer.WorldSize())
	for i := range seeds {
		seeds[i] = d.dice.Uint64()
	}
	if err := d.tell(ctx, d.infer, "seed", seeds); err != nil {
		return err
	}
	if _, err := d.syncWeights(ctx, d.reference); err != nil { // the policy as it is now
		return err
	}
	shares, err := d.syncWeights(ctx, d.infer)
	d.show.synced(shares)
	return err
}

// step is one round of reinforcement learning.
func (d *demo) step(ctx context.Context, step int, last bool) error {
	start := time.Now()
	d.show.section(fmt.Sprintf("step %d", step))
	if _, err := ask[float32](ctx, d, d.train, "begin_step", step); err != nil {
		return err
	}
	prompts, err := d.prompts()
	if err != nil {
		return err
	}
	answers, err := ask[dispatch.Batch](ctx, d, d.infer, "generate", prompts)
	if err != nil {
		return err
	}
	judged, err := d.judge(ctx, answers)
	if err != nil {
		return err
	}
	learned, err := d.learn(ctx, answers, judged)
	if err != nil {
		return err
	}
	if _, err := d.syncWeights(ctx, d.infer); err != nil {
		return err
	}
	if last {
		if learned.Checkpoint, err = ask[checkpointInfo](ctx, d, d.train, "checkpoint"); err != nil {
			return err
		}
	}
	learned.Step, learned.Sample, learned.Millis = step, sample(answers), millis(time.Since(start))
	return d.show.stepped(learned)
}

func (d *demo) prompts() (dispatch.Batch, error) {
	tokens := make([]int32, 0, demoRows*promptLen)
	for range demoRows {
		first := d.dice.Int32N(letters)
		tokens = append(tokens, first, (first+1)%letters)
	}
	return newBatch(demoRows, column("prompts", tokens))
}

// judged is what three roles say about the answers.
type judged struct{ rewards, reference, values []float32 }

// judge has three roles in flight at once. The answers that one role gave are the arguments of the next ones as they are.
func (d *demo) judge(ctx context.Context, answers dispatch.Batch) (judged, error) {
	texts := dispatch.Batch{Arrays: map[string]wire.Tensor{"tokens": answers.Arrays["tokens"]}}
	var out judged
	parts := []struct {
		cluster *roles.Cluster
		method  string
		array   string
		to      *[]float32
	}{
		{d.reward, "score", "rewards", &out.rewards},
		{d.reference, "log_probs", "log_probs", &out.reference},
		{d.critic, "values", "values", &out.values},
	}
	var sent []*inFlight
	for _, p := range parts {
		f, err := d.send(ctx, p.cluster, p.method, texts)
		if err != nil {
			return out, err
		}
		sent = append(sent, f)
	}
	for i, p := range parts {
		b, err := receive[dispatch.Batch](ctx, d, sent[i])
		if err != nil {
			return out, err
		}
		if *p.to, err = wire.Values[float32](b.Arrays[p.array]); err != nil {
			return out, err
		}
	}
	d.show.together(sent)
	return out, nil
}

// learn updates the policy and the critic at the same time, and asks the policy's workers how they are while they work.
func (d *demo) learn(ctx context.Context, answers dispatch.Batch, j judged) (demoStep, error) {
	old, err := wire.Values[float32](answers.Arrays["log_probs"])
	if err != nil {
		return demoStep{}, err
	}
	advantages, out := d.advantages(old, j)
	tokens := answers.Arrays["tokens"]
	lessons, err := newBatch(demoRows, column("log_probs", old), column("advantages", advantages))
	if err != nil {
		return out, err
	}
	lessons.Arrays["tokens"] = tokens
	seen, err := newBatch(demoRows, column("rewards", j.rewards))
	if err != nil {
		return out, err
	}
	seen.Arrays["tokens"] = tokens
	training, err := d.send(ctx, d.train, "train_step", lessons)
	if err != nil {
		return out, err
	}
	updating, err := d.send(ctx, d.critic, "update", seen)
	if err != nil {
		return out, err
	}
	health, err := d.health(ctx)
	if err != nil {
		return out, err
	}
	trained, err := receive[dispatch.Batch](ctx, d, training)
	if err != nil {
		return out, err
	}
	updated, err := receive[dispatch.Batch](ctx, d, updating)
	if err != nil {
		return out, err
	}
	d.show.healthy(health)
	out.Drift, out.CriticLoss = metric(trained, "drift", math.Max), metric(updated, "loss", nil)
	out.Busy = health.busy
	return out, nil
}

// advantages is the driver's own arithmetic: how much better than expected each letter was, less what leaving the
// reference costs, scaled to a spread of 1.
func (d *demo) advantages(old []float32, j judged) ([]float32, demoStep) {
	out := make([]float32, len(old))
	var reward, kl, mean, square float64
	for i := range out {
		away := old[i] - j.reference[i]
		out[i] = j.rewards[i] - j.values[i] - klWeight*away
		reward, kl = reward+float64(j.rewards[i]), kl+float64(away)
		mean, square = mean+float64(out[i]), square+float64(out[i])*float64(out[i])
	}
	n := float64(len(out))
	mean /= n
	spread := math.Sqrt(max(square/n-mean*mean, 1e-12))
	for i := range out {
		out[i] = float32((float64(out[i]) - mean) / spread)
	}
	return out, demoStep{Reward: reward / n, KL: kl / n}
}

// syncWeights has the ranks of the first replica of actor_train send their shares to another role themselves: the driver
// sends them the role. It returns the bytes of each share.
func (d *demo) syncWeights(ctx context.Context, to *roles.Cluster) ([]int, error) {
	replica, err := d.train.Slice(0)
	if err != nil {
		return nil, err
	}
	call := dispatch.Call{Method: "sync_weights", Args: []any{to.Handle()}, Timeout: demoTimeout}
	for _, w := range replica {
		call.Ranks = append(call.Ranks, w.Rank())
	}
	f, err := d.start(ctx, d.train, call)
	if err != nil {
		return nil, err
	}
	shares, err := dispatch.AwaitEach[int](ctx, f.future)
	if err == nil {
		d.show.called(f)
	}
	return shares, err
}

// healthSeen is what the workers said of themselves, on the lane that never waits behind work.
type healthSeen struct {
	call    *inFlight
	workers int
	busy    int
	longest time.Duration
}

func (d *demo) health(ctx context.Context) (healthSeen, error) {
	f, err := d.start(ctx, d.train, dispatch.Call{Method: actors.VerbHealth, Mode: dispatch.OneToAll, Control: true, Timeout: demoTimeout})
	if err != nil {
		return healthSeen{}, err
	}
	all, err := dispatch.AwaitEach[actors.Health](ctx, f.future)
	seen := healthSeen{call: f, workers: len(all)}
	for _, h := range all {
		if h.Busy > 0 {
			seen.busy++
		}
		seen.longest = max(seen.longest, h.Busy)
	}
	return seen, err
}

// metric is one number of what the replicas measured: by fold, or the mean.
func metric(b dispatch.Batch, name string, fold func(a, b float64) float64) float64 {
	metrics, _ := b.Meta[dispatch.MetricsKey].(map[string]any)
	list, _ := metrics[name].([]any)
	sum := 0.0
	for i, v := range list {
		f, _ := v.(float64)
		switch {
		case fold == nil:
			sum += f / float64(len(list))
		case i == 0:
			sum = f
		default:
			sum = fold(sum, f)
		}
	}
	return sum
}

// sample is the first text of a batch, prompt and answer.
func sample(b dispatch.Batch) string {
	tokens, err := wire.Values[int32](b.Arrays["tokens"])
	if err != nil || len(tokens) < promptLen+answerLen {
		return ""
	}
	text := make([]byte, 0, promptLen+answerLen)
	for _, t := range tokens[:promptLen+answerLen] {
		text = append(text, byte('a'+t))
	}
	return string(text[:promptLen]) + " → " + string(text[promptLen:])
}
