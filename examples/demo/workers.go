package main

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"

	"troupe"
	"troupe/dispatch"
)

func classes() []*troupe.Class {
	return []*troupe.Class{trainerClass(), generatorClass(), scorerClass(), criticClass(), judgeClass()}
}

// generator is a rank of actor_infer: the whole policy and its own random numbers.
type generator struct {
	layers [layers]layer
	dice   *rand.Rand
}

func generatorClass() *troupe.Class {
	c := troupe.NewClass("generator", func(context.Context, troupe.Setup) (*generator, error) {
		g := &generator{}
		for i := range g.layers {
			g.layers[i] = newLayer(i, 0, letters)
		}
		return g, nil
	})
	troupe.Method(c, "seed", (*generator).seed, troupe.MethodOptions{Mode: troupe.AllToAll})
	troupe.Method(c, "load_weights", (*generator).loadWeights)
	troupe.Method(c, "generate", (*generator).generate, troupe.MethodOptions{Mode: troupe.DPMPCompute})
	return c.Class
}

func (g *generator) seed(_ context.Context, seed uint64) (troupe.None, error) {
	g.dice = rand.New(rand.NewPCG(seed, 0))
	return troupe.None{}, nil
}

func (g *generator) loadWeights(_ context.Context, s shard) (troupe.None, error) {
	return troupe.None{}, g.layers[s.Layer].load(s)
}

// generate answers the prompts letter by letter, with the log-probability of each letter.
func (g *generator) generate(_ context.Context, b troupe.Batch) (troupe.Batch, error) {
	prompts, err := troupe.Values[int32](b.Arrays["prompts"])
	if err != nil {
		return troupe.Batch{}, err
	}
	tokens := make([]int32, 0, b.Len()*(promptLen+answerLen))
	logProbs := make([]float32, 0, b.Len()*answerLen)
	for prompt := range slices.Chunk(prompts, promptLen) {
		start := len(tokens)
		tokens = append(tokens, prompt...)
		for range answerLen {
			next, logProb := g.next(tokens[start:])
			tokens, logProbs = append(tokens, next), append(logProbs, logProb)
		}
	}
	out := batch(b.Len(), "tokens", tokens)
	out.Arrays["log_probs"] = tensor(b.Len(), logProbs)
	return out, nil
}

// next draws the next letter of a text.
func (g *generator) next(text []int32) (int32, float32) {
	var scores [letters]float32
	for _, l := range g.layers {
		add(scores[:], l.row(text, len(text)))
	}
	norm := logSumExp(scores[:])
	left := g.dice.Float64()
	for i, s := range scores {
		if left -= math.Exp(float64(s - norm)); left < 0 || i == letters-1 {
			return int32(i), s - norm
		}
	}
	panic("unreachable: the last letter takes the rest of the probability")
}

// scorer is a rank of reference: one layer of the policy before training.
type scorer struct {
	*peers
	layer layer
	calls int
}

func scorerClass() *troupe.Class {
	c := troupe.NewClass("scorer", func(_ context.Context, s troupe.Setup) (*scorer, error) { return &scorer{peers: newPeers(s)}, nil })
	addPeerMethods(c, func(s *scorer) *peers { return s.peers }, func(s *scorer) { s.layer = newLayer(s.at.PPRank, 0, letters) })
	troupe.Method(c, "load_weights", (*scorer).loadWeights)
	troupe.Method(c, "log_probs", (*scorer).logProbs, troupe.MethodOptions{Mode: troupe.DPMPDispatchFirst})
	return c.Class
}

func (s *scorer) loadWeights(_ context.Context, w shard) (troupe.None, error) {
	return troupe.None{}, s.layer.load(w)
}

// logProbs is called with rows on the first stage only. The next stage is called without data and gets texts and scores from
// the first.
func (s *scorer) logProbs(ctx context.Context, b troupe.Batch) (troupe.Batch, error) {
	s.calls++
	tag, stages := strconv.Itoa(s.calls), s.along(dispatch.PP)
	if s.at.PPRank == 0 {
		b.Arrays["x"] = tensor(b.Len(), make([]float32, b.Len()*answerLen*letters))
	} else {
		var err error
		if b, err = s.receive(ctx, tag); err != nil {
			return troupe.Batch{}, err
		}
	}
	tokens, err := troupe.Values[int32](b.Arrays["tokens"])
	if err != nil {
		return troupe.Batch{}, err
	}
	x, err := troupe.Values[float32](b.Arrays["x"])
	if err != nil {
		return troupe.Batch{}, err
	}
	s.layer.forward(tokens, x)
	if s.at.PPRank < len(stages)-1 {
		b.Arrays["x"] = tensor(b.Len(), x)
		return troupe.Batch{}, s.send(ctx, stages[s.at.PPRank+1], tag, b)
	}
	out := make([]float32, b.Len()*answerLen)
	positions(tokens, func(n int, text []int32, at int) {
		row := x[n*letters : (n+1)*letters]
		out[n] = row[text[at]] - logSumExp(row)
	})
	return batch(b.Len(), "log_probs", out), nil
}

// critic estimates the reward of the next letter by the last letter. All its replicas keep the same estimates.
type critic struct {
	*peers
	values [letters]float32
	calls  int
}

func criticClass() *troupe.Class {
	c := troupe.NewClass("critic", func(_ context.Context, s troupe.Setup) (*critic, error) { return &critic{peers: newPeers(s)}, nil })
	addPeerMethods(c, func(k *critic) *peers { return k.peers }, func(*critic) {})
	troupe.Method(c, "values", (*critic).estimate, troupe.MethodOptions{Mode: troupe.DPMPCompute})
	troupe.Method(c, "update", (*critic).update, troupe.MethodOptions{Mode: troupe.DPMPCompute})
	return c.Class
}

func (k *critic) estimate(_ context.Context, b troupe.Batch) (troupe.Batch, error) {
	return perLetter(b, "values", func(last, _ int32) float32 { return k.values[last] })
}

// update moves each estimate most of the way to the mean reward that all replicas have seen, and reports the loss before.
func (k *critic) update(ctx context.Context, b troupe.Batch) (troupe.Batch, error) {
	tokens, err := troupe.Values[int32](b.Arrays["tokens"])
	if err != nil {
		return troupe.Batch{}, err
	}
	rewards, err := troupe.Values[float32](b.Arrays["rewards"])
	if err != nil {
		return troupe.Batch{}, err
	}
	seen, loss := make([]float32, 2*letters), 0.0 // sums of rewards, then counts
	positions(tokens, func(n int, text []int32, at int) {
		last := text[at-1]
		loss += float64((rewards[n] - k.values[last]) * (rewards[n] - k.values[last]))
		seen[last] += rewards[n]
		seen[letters+last]++
	})
	k.calls++
	if seen, err = k.sum(ctx, k.along(dispatch.DP), strconv.Itoa(k.calls), seen); err != nil {
		return troupe.Batch{}, err
	}
	for i := range k.values {
		if n := seen[letters+i]; n > 0 {
			k.values[i] += 0.7 * (seen[i]/n - k.values[i])
		}
	}
	return metrics(map[string]any{"loss": loss / float64(len(rewards))}), nil
}

// judge is a rank of reward: it knows the alphabet.
type judge struct{}

func judgeClass() *troupe.Class {
	c := troupe.NewClass("judge", func(context.Context, troupe.Setup) (*judge, error) { return &judge{}, nil })
	troupe.Method(c, "score", (*judge).score, troupe.MethodOptions{Mode: troupe.DPMPCompute})
	return c.Class
}

func (*judge) score(_ context.Context, b troupe.Batch) (troupe.Batch, error) {
	return perLetter(b, "rewards", func(last, next int32) float32 {
		if next == (last+1)%letters {
			return 1
		}
		return 0
	})
}

// perLetter is a batch with one value for each letter of the answers, by the letter before it and itself.
func perLetter(b troupe.Batch, name string, value func(last, next int32) float32) (troupe.Batch, error) {
	tokens, err := troupe.Values[int32](b.Arrays["tokens"])
	if err != nil {
		return troupe.Batch{}, err
	}
	out := make([]float32, b.Len()*answerLen)
	positions(tokens, func(n int, text []int32, at int) { out[n] = value(text[at-1], text[at]) })
	return batch(b.Len(), name, out), nil
}
