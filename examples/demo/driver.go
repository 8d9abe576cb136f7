package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"troupe"
	"troupe/bus"
	"troupe/dispatch"
	"troupe/roles"
)

const (
	rows        = 512
	callTimeout = 20 * time.Second
	klWeight    = 0.01 // cost of the distance from the reference policy
)

// specs are the roles, laid out as a real job would be on 20 GPUs.
func specs() []troupe.Spec {
	return []troupe.Spec{
		{Name: "actor_train", Class: "trainer", World: 8, Mesh: troupe.Mesh{DP: 2, TP: 2, PP: 2}, Config: trainerConfig{LearningRate: 120, Clip: 0.2}},
		{Name: "actor_infer", Class: "generator", World: 4},
		{Name: "reference", Class: "scorer", World: 4, Mesh: troupe.Mesh{PP: 2}},
		{Name: "critic", Class: "critic", World: 2},
		{Name: "reward", Class: "judge", World: 4},
	}
}

type driver struct {
	out  *printer
	dice *rand.Rand
	// The driver and the workers have a connection each, so that the driver's traffic can be counted.
	bus, workerBus *bus.Bus
	local          *roles.Local
	rt             *troupe.Runtime

	train, infer, reference, critic, reward *troupe.Cluster
}

// train runs the job.
func train(ctx context.Context, out *printer, steps int) (err error) {
	d := &driver{out: out, dice: rand.New(rand.NewPCG(1, 2))}
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
	out.end(d)
	return nil
}

func (d *driver) open(ctx context.Context) (err error) {
	if d.bus, err = bus.Open(ctx, bus.Config{Name: "demo-driver"}); err != nil {
		return err
	}
	if d.workerBus, err = d.bus.Dial(ctx, "demo-workers"); err != nil {
		return err
	}
	d.local = roles.NewLocal(d.workerBus, classes())
	if d.rt, err = troupe.Open(ctx, troupe.Config{Bus: d.bus, Local: d.local, Namespace: "demo"}); err != nil {
		return err
	}
	d.out.begin()
	clusters := []**troupe.Cluster{&d.train, &d.infer, &d.reference, &d.critic, &d.reward}
	for i, spec := range specs() {
		start := time.Now()
		if *clusters[i], err = d.rt.Create(ctx, spec); err != nil {
			return err
		}
		d.out.created(*clusters[i], time.Since(start))
	}
	return nil
}

// close ends everything, also when ctx has ended.
func (d *driver) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
	defer cancel()
	var errs []error
	if d.rt != nil {
		errs = append(errs, d.rt.Close(ctx))
	}
	if d.local != nil {
		errs = append(errs, d.local.Close(ctx))
	}
	for _, b := range []*bus.Bus{d.workerBus, d.bus} {
		if b != nil {
			errs = append(errs, b.Close())
		}
	}
	return errors.Join(errs...)
}

// prepare gives every role what it needs before the first step.
func (d *driver) prepare(ctx context.Context) error {
	d.out.section("getting ready")
	d.out.callHeader()
	for _, c := range []*troupe.Cluster{d.train, d.reference, d.critic} {
		if err := d.wait(ctx, c, "initialise", c.Handle()); err != nil { // a role can be an argument
			return err
		}
	}
	seeds := make([]uint64, d.infer.WorldSize())
	for i := range seeds {
		seeds[i] = d.dice.Uint64()
	}
	if err := d.wait(ctx, d.infer, "seed", seeds); err != nil {
		return err
	}
	if _, err := d.syncWeights(ctx, d.reference); err != nil { // the policy before training
		return err
	}
	shares, err := d.syncWeights(ctx, d.infer)
	total := 0
	for _, n := range shares {
		total += n
	}
	d.out.remark("a role is a value: %d workers were sent it and passed it their shares of the weights, %s, each published once", len(shares), size(total))
	return err
}

// wait calls a method and waits until every rank is done.
func (d *driver) wait(ctx context.Context, c *troupe.Cluster, method string, args ...any) error {
	p, err := d.send(ctx, c, method, args...)
	if err == nil {
		err = p.future.Wait(ctx)
	}
	if err == nil {
		d.out.called(p)
	}
	return err
}

// step is one round of reinforcement learning.
func (d *driver) step(ctx context.Context, step int, last bool) error {
	start := time.Now()
	d.out.section(fmt.Sprintf("step %d", step))
	if _, err := call[float32](ctx, d, d.train, "begin_step", step); err != nil {
		return err
	}
	answers, err := call[troupe.Batch](ctx, d, d.infer, "generate", d.prompts())
	if err != nil {
		return err
	}
	judged, err := d.judge(ctx, answers)
	if err != nil {
		return err
	}
	record, err := d.learn(ctx, answers, judged)
	if err != nil {
		return err
	}
	if _, err := d.syncWeights(ctx, d.infer); err != nil {
		return err
	}
	if last {
		if record.Checkpoint, err = call[checkpointInfo](ctx, d, d.train, "checkpoint"); err != nil {
			return err
		}
	}
	record.Step, record.Sample, record.Millis = step, sample(answers), millis(time.Since(start))
	return d.out.stepped(record)
}

func (d *driver) prompts() troupe.Batch {
	tokens := make([]int32, 0, rows*promptLen)
	for range rows {
		first := d.dice.Int32N(letters)
		tokens = append(tokens, first, (first+1)%letters)
	}
	return batch(rows, "prompts", tokens)
}

// judgement is what three roles say about the answers, one value for each letter.
type judgement struct{ rewards, reference, values []float32 }

// judge calls three roles at the same time. The answer of one role is the argument of the next ones.
func (d *driver) judge(ctx context.Context, answers troupe.Batch) (judgement, error) {
	texts := troupe.Batch{Arrays: map[string]troupe.Tensor{"tokens": answers.Arrays["tokens"]}}
	var out judgement
	parts := []struct {
		cluster *troupe.Cluster
		method  string
		array   string
		to      *[]float32
	}{
		{d.reward, "score", "rewards", &out.rewards},
		{d.reference, "log_probs", "log_probs", &out.reference},
		{d.critic, "values", "values", &out.values},
	}
	var sent []*pendingCall
	for _, p := range parts {
		f, err := d.send(ctx, p.cluster, p.method, texts)
		if err != nil {
			return out, err
		}
		sent = append(sent, f)
	}
	for i, p := range parts {
		b, err := receive[troupe.Batch](ctx, d, sent[i])
		if err != nil {
			return out, err
		}
		if *p.to, err = troupe.Values[float32](b.Arrays[p.array]); err != nil {
			return out, err
		}
	}
	d.out.together(sent)
	return out, nil
}

// learn updates the policy and the critic at the same time, and asks the policy's workers for their health meanwhile.
func (d *driver) learn(ctx context.Context, answers troupe.Batch, j judgement) (record stepRecord, err error) {
	old, err := troupe.Values[float32](answers.Arrays["log_probs"])
	if err != nil {
		return record, err
	}
	advantages, record := advantages(old, j)
	lessons := troupe.Batch{Arrays: map[string]troupe.Tensor{
		"tokens": answers.Arrays["tokens"], "log_probs": tensor(rows, old), "advantages": tensor(rows, advantages),
	}}
	seen := troupe.Batch{Arrays: map[string]troupe.Tensor{"tokens": answers.Arrays["tokens"], "rewards": tensor(rows, j.rewards)}}
	training, err := d.send(ctx, d.train, "train_step", lessons)
	if err != nil {
		return record, err
	}
	updating, err := d.send(ctx, d.critic, "update", seen)
	if err != nil {
		return record, err
	}
	health, err := d.start(ctx, d.train, troupe.FutureCall{Method: troupe.VerbHealth, Mode: troupe.OneToAll, Control: true, Timeout: callTimeout})
	if err != nil {
		return record, err
	}
	all, err := troupe.AwaitEach[troupe.Health](ctx, health.future)
	if err != nil {
		return record, err
	}
	for _, h := range all {
		if h.Busy > 0 {
			record.Busy++
		}
	}
	trained, err := receive[troupe.Batch](ctx, d, training)
	if err != nil {
		return record, err
	}
	updated, err := receive[troupe.Batch](ctx, d, updating)
	if err != nil {
		return record, err
	}
	d.out.called(health)
	d.out.remark("health never waits behind work: %d of %d workers answered in the middle of train_step", record.Busy, len(all))
	record.Drift, record.CriticLoss = metric(trained, "drift", math.Max), metric(updated, "loss", mean)
	return record, nil
}

// advantages is how much better than expected each letter was, less the cost of leaving the reference, scaled to a standard
// deviation of 1. The driver computes it.
func advantages(old []float32, j judgement) ([]float32, stepRecord) {
	out := make([]float32, len(old))
	var reward, kl, mean, square float64
	for i := range out {
		distance := old[i] - j.reference[i]
		out[i] = j.rewards[i] - j.values[i] - klWeight*distance
		reward, kl = reward+float64(j.rewards[i]), kl+float64(distance)
		mean, square = mean+float64(out[i]), square+float64(out[i])*float64(out[i])
	}
	n := float64(len(out))
	mean /= n
	spread := math.Sqrt(max(square/n-mean*mean, 1e-12))
	for i := range out {
		out[i] = float32((float64(out[i]) - mean) / spread)
	}
	return out, stepRecord{Reward: reward / n, KL: kl / n}
}

// syncWeights sends a role to the ranks of the first replica of actor_train, which send it their shares themselves. It
// returns the bytes of each share.
func (d *driver) syncWeights(ctx context.Context, to *troupe.Cluster) ([]int, error) {
	replica, err := d.train.Slice(0)
	if err != nil {
		return nil, err
	}
	sync := troupe.FutureCall{Method: "sync_weights", Args: []any{to.Handle()}, Timeout: callTimeout}
	for _, w := range replica {
		sync.Ranks = append(sync.Ranks, w.Rank())
	}
	p, err := d.start(ctx, d.train, sync)
	if err != nil {
		return nil, err
	}
	shares, err := troupe.AwaitEach[int](ctx, p.future)
	if err == nil {
		d.out.called(p)
	}
	return shares, err
}

// metric folds the values that the replicas report under a name.
func metric(b troupe.Batch, name string, fold func(a, b float64) float64) float64 {
	all, _ := b.Meta[dispatch.MetricsKey].(map[string]any)
	list, _ := all[name].([]any)
	out := 0.0
	for i, v := range list {
		if f, _ := v.(float64); i == 0 {
			out = f
		} else {
			out = fold(out, f)
		}
	}
	return out
}

// mean folds the values of the two replicas of the critic.
func mean(a, b float64) float64 { return (a + b) / 2 }

// sample is the first prompt of a batch and its answer.
func sample(b troupe.Batch) string {
	tokens, err := troupe.Values[int32](b.Arrays["tokens"])
	if err != nil || len(tokens) < promptLen+answerLen {
		return ""
	}
	var text []byte
	for _, t := range tokens[:promptLen+answerLen] {
		text = append(text, byte('a'+t))
	}
	return string(text[:promptLen]) + " → " + string(text[promptLen:])
}
