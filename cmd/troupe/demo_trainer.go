package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"strconv"

	"troupe/actors"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/roles"
)

// trainer is a rank of actor_train: one layer (its pipeline stage), half of the columns (its tensor-parallel share).
type trainer struct {
	peers
	cfg   trainerConfig
	at    dispatch.RankInfo
	layer layer
	step  int
}

type trainerConfig struct {
	LearningRate float32 `msgpack:"learning_rate"`
	Clip         float32 `msgpack:"clip"` // of the ratio between the policy and the one that wrote the answers
}

func trainerClass() *actors.Class {
	c := actors.NewClass("trainer", func(_ context.Context, s actors.Setup) (*trainer, error) {
		t := &trainer{peers: newPeers(s)}
		return t, s.DecodeConfig(&t.cfg)
	})
	peerMethods(c, func(t *trainer) *peers { return &t.peers }, (*trainer).initialise)
	actors.Method(c, "begin_step", (*trainer).beginStep, mode(dispatch.OneToAllOne))
	actors.Method(c, "train_step", (*trainer).trainStep, mode(dispatch.DPMPCompute))
	actors.Method(c, "sync_weights", (*trainer).syncWeights)
	actors.Method(c, "weights", (*trainer).weights)
	actors.Method(c, "checkpoint", (*trainer).checkpoint, mode(dispatch.RankZero))
	return c.Class
}

// initialise gives the rank its share of the model, small and the same in every replica.
func (t *trainer) initialise(ctx context.Context, self roles.Handle) (actors.None, error) {
	var err error
	if t.at, err = t.open(ctx, self); err != nil {
		return actors.None{}, err
	}
	share := letters / t.at.TPSize
	t.layer = newLayer(t.at.PPRank, t.at.TPRank*share, (t.at.TPRank+1)*share)
	dice := rand.New(rand.NewPCG(uint64(t.at.PPRank), uint64(t.at.TPRank)))
	for i := range t.layer.table {
		t.layer.table[i] = 0.1 * (dice.Float32() - 0.5)
	}
	return actors.None{}, nil
}

// along are the ranks that differ from this one on one axis only.
func (t *trainer) along(axis dispatch.Axis) []int {
	mesh := t.cluster.Record().Mesh
	c := mesh.Coord(t.rank)
	group := make([]int, mesh.Size(axis))
	for i := range group {
		switch axis {
		case dispatch.TP:
			c.TP = i
		case dispatch.DP:
			c.DP = i
		case dispatch.PP:
			c.PP = i
		}
		group[i] = mesh.Rank(c)
	}
	return group
}

// beginStep is called on all ranks; the driver hears what rank 0 says.
func (t *trainer) beginStep(_ context.Context, step int) (float32, error) {
	t.step = step
	return t.cfg.LearningRate, nil
}

// trainStep is one step of policy gradient. Scores go from stage to stage, the last stage's tensor-parallel ranks agree
// on the probabilities, gradients go back, and the replicas add theirs up.
func (t *trainer) trainStep(ctx context.Context, b dispatch.Batch) (dispatch.Batch, error) {
	tokens, err := wire.Values[int32](b.Arrays["tokens"])
	if err != nil {
		return dispatch.Batch{}, err
	}
	x := make([]float32, b.Len()*answerLen*t.layer.cols)
	stages := t.along(dispatch.PP)
	if t.at.PPRank > 0 {
		if x, err = t.receiveFloats(ctx, t.tag("scores")); err != nil {
			return dispatch.Batch{}, err
		}
	}
	t.layer.forward(tokens, x)
	var grad []float32
	out := dispatch.Batch{}
	if t.at.PPRank < t.at.PPSize-1 {
		grad, err = t.throughNext(ctx, stages[t.at.PPRank+1], x)
	} else {
		grad, out, err = t.loss(ctx, b, tokens, x)
	}
	if err != nil {
		return dispatch.Batch{}, err
	}
	if t.at.PPRank > 0 {
		if err := t.sendFloats(ctx, stages[t.at.PPRank-1], t.tag("gradients"), grad); err != nil {
			return dispatch.Batch{}, err
		}
	}
	table, err := t.sum(ctx, t.along(dispatch.DP), t.tag("table"), t.layer.backward(tokens, grad))
	if err != nil {
		return dispatch.Batch{}, err
	}
	for i, g := range table {
		t.layer.table[i] -= t.cfg.LearningRate * g / float32(t.at.DPSize)
	}
	return out, nil
}

func (t *trainer) tag(what string) string { return strconv.Itoa(t.step) + "/" + what }

// throughNext sends the scores on and waits for their gradient.
func (t *trainer) throughNext(ctx context.Context, next int, x []float32) ([]float32, error) {
	if err := t.sendFloats(ctx, next, t.tag("scores"), x); err != nil {
		return nil, err
	}
	return t.receiveFloats(ctx, t.tag("gradients"))
}

// loss is the last stage: the gradient of the clipped policy loss in this rank's columns, and what there is to report.
func (t *trainer) loss(ctx context.Context, b dispatch.Batch, tokens []int32, x []float32) ([]float32, dispatch.Batch, error) {
	old, err := wire.Values[float32](b.Arrays["log_probs"])
	if err != nil {
		return nil, dispatch.Batch{}, err
	}
	advantages, err := wire.Values[float32](b.Arrays["advantages"])
	if err != nil {
		return nil, dispatch.Batch{}, err
	}
	norm, chosen, err := t.normalise(ctx, tokens, x)
	if err != nil {
		return nil, dispatch.Batch{}, err
	}
	cols, n := t.layer.cols, float32(len(old))
	loss, drift := 0.0, 0.0
	places(tokens, func(i int, text []int32, at int) {
		logProb := chosen[i] - norm[i]
		ratio := float32(math.Exp(float64(logProb - old[i])))
		loss -= float64(ratio * advantages[i])
		drift = max(drift, math.Abs(float64(logProb-old[i])))
		weight := ratio * advantages[i] / n
		if advantages[i] > 0 && ratio > 1+t.cfg.Clip || advantages[i] < 0 && ratio < 1-t.cfg.Clip {
			weight = 0
		}
		row := x[i*cols : (i+1)*cols]
		for c := range row {
			row[c] = weight * float32(math.Exp(float64(row[c]-norm[i])))
		}
		if c := int(text[at]) - t.layer.from; c >= 0 && c < cols {
			row[c] -= weight
		}
	})
	metrics := map[string]any{"loss": loss / float64(n), "drift": drift}
	return x, dispatch.Batch{Meta: map[string]any{dispatch.MetricsKey: metrics}}, nil
}

// normalise gives, for each place, the logarithm of the sum over all columns of all tensor-parallel ranks, and the score
// of the letter that was chosen.
func (t *trainer) normalise(ctx context.Context, tokens []int32, x []float32) (norm, chosen []float32, err error) {
	cols := t.layer.cols
	n := len(x) / cols
	mine := make([]float32, 2*n)
	places(tokens, func(i int, text []int32, at int) {
		row := x[i*cols : (i+1)*cols]
		mine[i] = logSumExp(row)
		if c := int(text[at]) - t.layer.from; c >= 0 && c < cols {
			mine[n+i] = row[c]
		}
	})
	all, err := t.exchange(ctx, t.along(dispatch.TP), t.tag("norm"), mine)
	if err != nil {
		return nil, nil, err
	}
	norm, chosen = make([]float32, n), make([]float32, n)
	shares := make([]float32, len(all))
	for i := range n {
		for r := range all {
			shares[r] = all[r][i]
			chosen[i] += all[r][n+i] // 0 but on the rank that has the column
		}
		norm[i] = logSumExp(shares)
	}
	return norm, chosen, nil
}

// syncWeights sends this rank's share to a role that came as an argument: once, to all of its workers that want it. It
// answers with the bytes of the share.
func (t *trainer) syncWeights(ctx context.Context, to roles.Handle) (int, error) {
	target, err := to.Open(ctx)
	if err != nil {
		return 0, err
	}
	s, err := t.layer.shard()
	if err != nil {
		return 0, err
	}
	var receivers roles.Group
	if target.PPSize() > 1 {
		receivers, err = target.Where(fmt.Sprintf("pp=%d", s.Layer))
	} else {
		receivers, err = target.Where("pp=0")
	}
	if err != nil {
		return 0, err
	}
	_, err = receivers.Call(ctx, "load_weights", s)
	return len(s.Table.Data), err
}

// weights is this rank's share, for the rank that writes the checkpoint.
func (t *trainer) weights(context.Context, actors.None) (shard, error) { return t.layer.shard() }

// checkpointInfo says what a checkpoint holds.
type checkpointInfo struct {
	Bytes int    `msgpack:"bytes"`
	Hash  string `msgpack:"hash"`
}

// checkpoint runs on rank 0 alone, which asks the other ranks of its replica for their shares.
func (t *trainer) checkpoint(ctx context.Context, _ actors.None) (checkpointInfo, error) {
	replica, err := t.cluster.Slice(t.at.DPRank)
	if err != nil {
		return checkpointInfo{}, err
	}
	hash, info := fnv.New64a(), checkpointInfo{}
	for _, w := range replica {
		s, err := t.shardOf(ctx, w.Rank())
		if err != nil {
			return checkpointInfo{}, err
		}
		_, _ = hash.Write(s.Table.Data) // a hash takes whatever it is given
		info.Bytes += len(s.Table.Data)
	}
	info.Hash = hex.EncodeToString(hash.Sum(nil))
	return info, nil
}

func (t *trainer) shardOf(ctx context.Context, rank int) (shard, error) {
	if rank == t.rank { // a serial worker that called itself would wait for ever
		return t.layer.shard()
	}
	f, err := t.cluster.Go(ctx, dispatch.Call{Method: "weights", Ranks: []int{rank}})
	if err != nil {
		return shard{}, err
	}
	return dispatch.Await[shard](ctx, f)
}
