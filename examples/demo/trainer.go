package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"strconv"

	"troupe"
	"troupe/dispatch"
)

// trainer is a rank of actor_train: one layer (its pipeline stage), half of the columns (its tensor-parallel share).
type trainer struct {
	*peers
	cfg   trainerConfig
	layer layer
	step  int
}

type trainerConfig struct {
	LearningRate float32 `msgpack:"learning_rate"`
	Clip         float32 `msgpack:"clip"` // of the ratio between the policy and the policy that wrote the answers
}

func trainerClass() *troupe.Class {
	c := troupe.NewClass("trainer", func(_ context.Context, s troupe.Setup) (*trainer, error) {
		t := &trainer{peers: newPeers(s)}
		return t, s.DecodeConfig(&t.cfg)
	})
	addPeerMethods(c, func(t *trainer) *peers { return t.peers }, (*trainer).initialise)
	troupe.Method(c, "begin_step", (*trainer).beginStep, troupe.MethodOptions{Mode: troupe.OneToAllOne})
	troupe.Method(c, "train_step", (*trainer).trainStep, troupe.MethodOptions{Mode: troupe.DPMPCompute})
	troupe.Method(c, "sync_weights", (*trainer).syncWeights)
	troupe.Method(c, "weights", (*trainer).weights)
	troupe.Method(c, "checkpoint", (*trainer).checkpoint, troupe.MethodOptions{Mode: troupe.RankZero})
	return c.Class
}

// initialise makes the rank's share of the model: small weights, the same in every replica.
func (t *trainer) initialise() {
	share := letters / t.at.TPSize
	t.layer = newLayer(t.at.PPRank, t.at.TPRank*share, (t.at.TPRank+1)*share)
	dice := rand.New(rand.NewPCG(uint64(t.at.PPRank), uint64(t.at.TPRank)))
	for i := range t.layer.table {
		t.layer.table[i] = 0.1 * (dice.Float32() - 0.5)
	}
}

func (t *trainer) beginStep(_ context.Context, step int) (float32, error) {
	t.step = step
	return t.cfg.LearningRate, nil
}

// trainStep is one step of policy gradient. The ranks of a replica gather their scores, each computes the gradient of its
// columns, and the replicas add theirs up.
func (t *trainer) trainStep(ctx context.Context, b troupe.Batch) (out troupe.Batch, err error) {
	tokens, err := troupe.Values[int32](b.Arrays["tokens"])
	if err != nil {
		return out, err
	}
	old, err := troupe.Values[float32](b.Arrays["log_probs"])
	if err != nil {
		return out, err
	}
	advantages, err := troupe.Values[float32](b.Arrays["advantages"])
	if err != nil {
		return out, err
	}
	scores, err := t.scores(ctx, tokens)
	if err != nil {
		return out, err
	}
	grad, out := t.loss(tokens, scores, old, advantages)
	table, err := t.sum(ctx, t.along(dispatch.DP), t.tag("table"), t.layer.backward(tokens, grad))
	for i, g := range table {
		t.layer.table[i] -= t.cfg.LearningRate * g / float32(t.at.DPSize)
	}
	if t.at.PPRank < t.at.PPSize-1 {
		out = troupe.Batch{} // the last stage reports
	}
	return out, err
}

func (t *trainer) tag(what string) string { return strconv.Itoa(t.step) + "/" + what }

// scores are the scores of all letters at each position: the columns of the tensor-parallel ranks side by side, the layers of
// the stages added.
func (t *trainer) scores(ctx context.Context, tokens []int32) ([]float32, error) {
	n, cols := len(tokens)/(promptLen+answerLen)*answerLen, t.layer.cols
	x := make([]float32, n*cols)
	t.layer.forward(tokens, x)
	replica, err := t.cluster.Slice(t.at.DPRank)
	if err != nil {
		return nil, err
	}
	group := make([]int, len(replica))
	for i, w := range replica {
		group[i] = w.Rank()
	}
	shares, err := t.exchange(ctx, group, t.tag("scores"), x)
	out := make([]float32, n*letters)
	for r, share := range shares {
		from := t.cluster.Record().Mesh.Coord(group[r]).TP * cols
		for i := range n {
			add(out[i*letters+from:], share[i*cols:(i+1)*cols])
		}
	}
	return out, err
}

// loss is the gradient of the clipped policy loss in this rank's columns, and the figures to report.
func (t *trainer) loss(tokens []int32, scores, old, advantages []float32) ([]float32, troupe.Batch) {
	cols, n := t.layer.cols, float32(len(old))
	grad := make([]float32, len(old)*cols)
	loss, drift := 0.0, 0.0
	positions(tokens, func(i int, text []int32, at int) {
		all := scores[i*letters : (i+1)*letters]
		norm := logSumExp(all)
		logProb := all[text[at]] - norm
		ratio := float32(math.Exp(float64(logProb - old[i])))
		loss -= float64(ratio * advantages[i])
		drift = max(drift, math.Abs(float64(logProb-old[i])))
		if advantages[i] > 0 && ratio > 1+t.cfg.Clip || advantages[i] < 0 && ratio < 1-t.cfg.Clip {
			return
		}
		weight := ratio * advantages[i] / n
		for c := range cols {
			grad[i*cols+c] = weight * float32(math.Exp(float64(all[t.layer.from+c]-norm)))
		}
		if c := int(text[at]) - t.layer.from; c >= 0 && c < cols {
			grad[i*cols+c] -= weight
		}
	})
	return grad, metrics(map[string]any{"loss": loss / float64(n), "drift": drift})
}

// syncWeights publishes this rank's share once, to all workers of the given role that need it, and answers with its size in
// bytes.
func (t *trainer) syncWeights(ctx context.Context, to troupe.Handle) (int, error) {
	target, err := to.Open(ctx)
	if err != nil {
		return 0, err
	}
	s := t.layer.shard()
	receivers, err := target.Where(fmt.Sprintf("pp=%d", min(s.Layer, target.PPSize()-1)))
	if err != nil {
		return 0, err
	}
	_, err = receivers.Call(ctx, "load_weights", s)
	return len(s.Table.Data), err
}

// weights is this rank's share, for the rank that writes the checkpoint.
func (t *trainer) weights(context.Context, troupe.None) (shard, error) { return t.layer.shard(), nil }

type checkpointInfo struct {
	Bytes int    `msgpack:"bytes"`
	Hash  string `msgpack:"hash"`
}

// checkpoint runs on rank 0 alone, which asks the other ranks of its replica for their shares.
func (t *trainer) checkpoint(ctx context.Context, _ troupe.None) (info checkpointInfo, err error) {
	replica, err := t.cluster.Slice(t.at.DPRank)
	if err != nil {
		return info, err
	}
	hash := fnv.New64a()
	for _, w := range replica {
		s := t.layer.shard()
		if w.Rank() != t.rank { // a serial worker that calls itself would wait for ever
			f, err := w.Go(ctx, troupe.FutureCall{Method: "weights"})
			if err != nil {
				return info, err
			}
			if s, err = troupe.Await[shard](ctx, f); err != nil {
				return info, err
			}
		}
		_, _ = hash.Write(s.Table.Data) // Write of a hash never fails
		info.Bytes += len(s.Table.Data)
	}
	info.Hash = hex.EncodeToString(hash.Sum(nil))
	return info, nil
}
