package main

import (
	"context"
	"fmt"
	"strconv"
	"sync"

	"troupe/actors"
	"troupe/bus/wire"
	"troupe/dispatch"
	"troupe/roles"
)

// peers lets the ranks of one role send each other tensors, worker to worker: what a collective library does on GPUs.
// A rank waits for a tensor inside a serial call; tensors come in by a concurrent lane.
type peers struct {
	rank    int
	cluster *roles.Cluster // its own role, once the driver has handed it over

	mu    sync.Mutex
	boxes map[string]chan wire.Tensor
}

func newPeers(s actors.Setup) peers { return peers{rank: s.Rank, boxes: map[string]chan wire.Tensor{}} }

// mail is what one rank sends another. No two have the same tag on the same rank.
type mail struct {
	Tag    string      `msgpack:"tag"`
	Tensor wire.Tensor `msgpack:"tensor"`
}

// peerMethods adds the methods of a class whose workers talk to each other.
func peerMethods[T any](c *actors.ClassOf[T], of func(*T) *peers, initialise func(*T, context.Context, roles.Handle) (actors.None, error)) {
	deliver := func(obj *T, _ context.Context, m mail) (actors.None, error) {
		of(obj).box(m.Tag) <- m.Tensor
		return actors.None{}, nil
	}
	actors.Method(c, "initialise", initialise, mode(dispatch.OneToAll))
	actors.Method(c, "deliver", deliver, actors.MethodOptions{Lane: actors.Concurrent(64)})
}

// open takes the role's own handle, which the driver sends like any other argument.
func (p *peers) open(ctx context.Context, self roles.Handle) (dispatch.RankInfo, error) {
	var err error
	if p.cluster, err = self.Open(ctx); err != nil {
		return dispatch.RankInfo{}, err
	}
	return p.cluster.RankInfo(p.rank)
}

// box holds one tensor, so that neither side waits for the other to be there.
func (p *peers) box(tag string) chan wire.Tensor {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.boxes[tag] == nil {
		p.boxes[tag] = make(chan wire.Tensor, 1)
	}
	return p.boxes[tag]
}

// send returns when the other rank has the tensor.
func (p *peers) send(ctx context.Context, to int, tag string, t wire.Tensor) error {
	f, err := p.cluster.Go(ctx, dispatch.Call{Method: "deliver", Ranks: []int{to}, Args: []any{mail{tag, t}}})
	if err != nil {
		return err
	}
	return f.Wait(ctx)
}

func (p *peers) receive(ctx context.Context, tag string) (wire.Tensor, error) {
	select {
	case t := <-p.box(tag):
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.boxes, tag)
		return t, nil
	case <-ctx.Done():
		return wire.Tensor{}, fmt.Errorf("rank %d waits for %s: %w", p.rank, tag, ctx.Err())
	}
}

func (p *peers) sendFloats(ctx context.Context, to int, tag string, values []float32) error {
	t, err := wire.TensorOf([]int{len(values)}, values)
	if err != nil {
		return err
	}
	return p.send(ctx, to, tag, t)
}

func (p *peers) receiveFloats(ctx context.Context, tag string) ([]float32, error) {
	t, err := p.receive(ctx, tag)
	if err != nil {
		return nil, err
	}
	return t.Float32s()
}

// exchange sends values to the others of a group and returns what all of it sent, in the group's order.
func (p *peers) exchange(ctx context.Context, group []int, tag string, values []float32) ([][]float32, error) {
	for _, rank := range group {
		if rank != p.rank {
			if err := p.sendFloats(ctx, rank, tag+"/"+strconv.Itoa(p.rank), values); err != nil {
				return nil, err
			}
		}
	}
	all := make([][]float32, len(group))
	for i, rank := range group {
		all[i] = values
		if rank != p.rank {
			var err error
			if all[i], err = p.receiveFloats(ctx, tag+"/"+strconv.Itoa(rank)); err != nil {
				return nil, err
			}
		}
	}
	return all, nil
}

// sum is exchange with the sum for a result. It adds in the group's order, so that all have the same to the last bit.
func (p *peers) sum(ctx context.Context, group []int, tag string, values []float32) ([]float32, error) {
	all, err := p.exchange(ctx, group, tag, values)
	if err != nil {
		return nil, err
	}
	out := make([]float32, len(values))
	for _, v := range all {
		for i := range out {
			out[i] += v[i]
		}
	}
	return out, nil
}
