package main

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"

	"troupe/actors"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/roles"
)

// demoClasses are the workers of the demo's roles.
func demoClasses() []*actors.Class {
	return []*actors.Class{trainerClass(), generatorClass(), scorerClass(), criticClass(), judgeClass()}
}

func mode(m dispatch.Mode) actors.MethodOptions { return actors.MethodOptions{Mode: string(m)} }

// generator is a rank of actor_infer: the whole policy, and dice of its own.
type generator struct {
	layers [layers]layer
	dice   *rand.Rand
}

func generatorClass() *actors.Class {
	c := actors.NewClass("generator", func(context.Context, actors.Setup) (*generator, error) {
		g := &generator{}
		for i := range g.layers {
			g.layers[i] = newLayer(i, 0, letters)
		}
		return g, nil
	})
	actors.Method(c, "seed", (*generator).seed, mode(dispatch.AllToAll))
	actors.Method(c, "load_weights", (*generator).loadWeights)
	actors.Method(c, "generate", (*generator).generate, mode(dispatch.DPMPCompute))
	return c.Class
}

func (g *generator) seed(_ context.Context, seed uint64) (actors.None, error) {
	g.dice = rand.New(rand.NewPCG(seed, 0))
	return actors.None{}, nil
}

func (g *generator) loadWeights(_ context.Context, s shard) (actors.None, error) {
	for _, l := range g.layers {
		if err := l.load(s); err != nil {
			return actors.None{}, err
		}
	}
	return actors.None{}, nil
}

// generate answers the prompts letter by letter and says how probable each letter was.
func (g *generator) generate(_ context.Context, b dispatch.Batch) (dispatch.Batch, error) {
	prompts, err := wire.Values[int32](b.Arrays["prompts"])
	if err != nil {
		return dispatch.Batch{}, err
	}
	tokens := make([]int32, 0, b.Len()*(promptLen+answerLen))
	logProbs := make([]float32, 0, b.Len()*answerLen)
	scores := make([]float32, letters)
	for prompt := range slices.Chunk(prompts, promptLen) {
		start := len(tokens)
		tokens = append(tokens, prompt...)
		for range answerLen {
			text := tokens[start:]
			next, logProb := g.next(append(text, 0), len(text), scores)
			tokens, logProbs = append(tokens, next), append(logProbs, logProb)
		}
	}
	return newBatch(b.Len(), column("tokens", tokens), column("log_probs", logProbs))
}

// next draws the letter at a place of a text.
func (g *generator) next(text []int32, at int, scores []float32) (int32, float32) {
	clear(scores)
	for _, l := range g.layers {
		for i, w := range l.row(text, at) {
			scores[i] += w
		}
	}
	norm := logSumExp(scores)
	left := g.dice.Float64()
	for i, s := range scores {
		if left -= math.Exp(float64(s - norm)); left < 0 || i == letters-1 {
			return int32(i), s - norm
		}
	}
	panic("unreachable: the last letter takes what is left")
}

// scorer is a rank of reference: one layer of the policy as it was at the start.
type scorer struct {
	peers
	at    dispatch.RankInfo
	layer layer
	calls int
}

func scorerClass() *actors.Class {
	c := actors.NewClass("scorer", func(_ context.Context, s actors.Setup) (*scorer, error) { return &scorer{peers: newPeers(s)}, nil })
	peerMethods(c, func(s *scorer) *peers { return &s.peers }, (*scorer).initialise)
	actors.Method(c, "load_weights", (*scorer).loadWeights)
	actors.Method(c, "log_probs", (*scorer).logProbs, mode(dispatch.DPMPDispatchFirst))
	return c.Class
}

func (s *scorer) initialise(ctx context.Context, self roles.Handle) (actors.None, error) {
	var err error
	if s.at, err = s.open(ctx, self); err != nil {
		return actors.None{}, err
	}
	s.layer = newLayer(s.at.PPRank, 0, letters)
	return actors.None{}, nil
}

func (s *scorer) loadWeights(_ context.Context, w shard) (actors.None, error) {
	return actors.None{}, s.layer.load(w)
}

// logProbs is called with rows on the first stage only; the next stage is called without data and gets what it needs,
// texts and scores, from the stage before it.
func (s *scorer) logProbs(ctx context.Context, b dispatch.Batch) (dispatch.Batch, error) {
	s.calls++
	tag := strconv.Itoa(s.calls)
	if s.at.PPRank == 0 {
		next := s.rank + s.at.WorldSize/s.at.PPSize // stages are the slowest axis
		return dispatch.Batch{}, s.firstStage(ctx, next, tag, b.Arrays["tokens"])
	}
	text, err := s.receive(ctx, tag+"/text")
	if err != nil {
		return dispatch.Batch{}, err
	}
	tokens, err := wire.Values[int32](text)
	if err != nil {
		return dispatch.Batch{}, err
	}
	x, err := s.receiveFloats(ctx, tag+"/scores")
	if err != nil {
		return dispatch.Batch{}, err
	}
	s.layer.forward(tokens, x)
	out := make([]float32, text.Rows()*answerLen)
	places(tokens, func(n int, text []int32, at int) {
		row := x[n*letters : (n+1)*letters]
		out[n] = row[text[at]] - logSumExp(row)
	})
	return newBatch(text.Rows(), column("log_probs", out))
}

func (s *scorer) firstStage(ctx context.Context, next int, tag string, text wire.Tensor) error {
	tokens, err := wire.Values[int32](text)
	if err != nil {
		return err
	}
	x := make([]float32, text.Rows()*answerLen*letters)
	s.layer.forward(tokens, x)
	if err := s.send(ctx, next, tag+"/text", text); err != nil {
		return err
	}
	return s.sendFloats(ctx, next, tag+"/scores", x)
}

// critic guesses the reward of the next letter by the last one. Its replicas keep the same guesses.
type critic struct {
	peers
	values [letters]float32
	calls  int
}

func criticClass() *actors.Class {
	c := actors.NewClass("critic", func(_ context.Context, s actors.Setup) (*critic, error) { return &critic{peers: newPeers(s)}, nil })
	peerMethods(c, func(k *critic) *peers { return &k.peers }, (*critic).initialise)
	actors.Method(c, "values", (*critic).guess, mode(dispatch.DPMPCompute))
	actors.Method(c, "update", (*critic).update, mode(dispatch.DPMPCompute))
	return c.Class
}

func (k *critic) initialise(ctx context.Context, self roles.Handle) (actors.None, error) {
	_, err := k.open(ctx, self)
	return actors.None{}, err
}

func (k *critic) guess(_ context.Context, b dispatch.Batch) (dispatch.Batch, error) {
	tokens, err := wire.Values[int32](b.Arrays["tokens"])
	if err != nil {
		return dispatch.Batch{}, err
	}
	out := make([]float32, b.Len()*answerLen)
	places(tokens, func(n int, text []int32, at int) { out[n] = k.values[text[at-1]] })
	return newBatch(b.Len(), column("values", out))
}

// update moves each guess most of the way to the mean reward that all replicas have seen, and reports the loss before.
func (k *critic) update(ctx context.Context, b dispatch.Batch) (dispatch.Batch, error) {
	tokens, err := wire.Values[int32](b.Arrays["tokens"])
	if err != nil {
		return dispatch.Batch{}, err
	}
	rewards, err := wire.Values[float32](b.Arrays["rewards"])
	if err != nil {
		return dispatch.Batch{}, err
	}
	seen, loss := make([]float32, 2*letters), 0.0 // sums of rewards, then how many
	places(tokens, func(n int, text []int32, at int) {
		last := text[at-1]
		loss += float64((rewards[n] - k.values[last]) * (rewards[n] - k.values[last]))
		seen[last] += rewards[n]
		seen[letters+last]++
	})
	k.calls++
	all := make([]int, k.cluster.WorldSize())
	for i := range all {
		all[i] = i
	}
	if seen, err = k.sum(ctx, all, strconv.Itoa(k.calls), seen); err != nil {
		return dispatch.Batch{}, err
	}
	for i := range k.values {
		if n := seen[letters+i]; n > 0 {
			k.values[i] += 0.7 * (seen[i]/n - k.values[i])
		}
	}
	metrics := map[string]any{"loss": loss / float64(len(rewards))}
	return dispatch.Batch{Meta: map[string]any{dispatch.MetricsKey: metrics}}, nil
}

// judge is a rank of reward: it knows the alphabet.
type judge struct{}

func judgeClass() *actors.Class {
	c := actors.NewClass("judge", func(context.Context, actors.Setup) (*judge, error) { return &judge{}, nil })
	actors.Method(c, "score", (*judge).score, mode(dispatch.DPMPCompute))
	return c.Class
}

func (*judge) score(_ context.Context, b dispatch.Batch) (dispatch.Batch, error) {
	tokens, err := wire.Values[int32](b.Arrays["tokens"])
	if err != nil {
		return dispatch.Batch{}, err
	}
	out := make([]float32, b.Len()*answerLen)
	places(tokens, func(n int, text []int32, at int) {
		if text[at] == (text[at-1]+1)%letters {
			out[n] = 1
		}
	})
	return newBatch(b.Len(), column("rewards", out))
}
