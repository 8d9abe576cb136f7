package main

import (
	"context"
	"fmt"
	"strconv"
	"sync"

	"troupe"
	"troupe/dispatch"
)

// peers lets the ranks of one role send batches to each other, as a collective library does on GPUs. A rank waits for a
// batch inside a serial call; batches arrive on a concurrent lane.
type peers struct {
	rank    int
	cluster *troupe.Cluster // the rank's own role; set by join
	at      troupe.RankInfo

	mu    sync.Mutex
	boxes map[string]chan troupe.Batch
}

func newPeers(s troupe.Setup) *peers {
	return &peers{rank: s.Rank, boxes: map[string]chan troupe.Batch{}}
}

// mail is a batch from one rank to another. Tags on one rank are unique.
type mail struct {
	Tag   string       `msgpack:"tag"`
	Batch troupe.Batch `msgpack:"batch"`
}

// addPeerMethods adds the methods of a class whose workers send batches to each other. initialise runs once the rank knows
// its role.
func addPeerMethods[T any](c *troupe.ClassOf[T], of func(*T) *peers, initialise func(*T)) {
	join := func(obj *T, ctx context.Context, self troupe.Handle) (_ troupe.None, err error) {
		p := of(obj)
		if p.cluster, err = self.Open(ctx); err != nil {
			return troupe.None{}, err
		}
		if p.at, err = p.cluster.RankInfo(p.rank); err == nil {
			initialise(obj)
		}
		return troupe.None{}, err
	}
	deliver := func(obj *T, _ context.Context, m mail) (troupe.None, error) {
		of(obj).box(m.Tag) <- m.Batch
		return troupe.None{}, nil
	}
	troupe.Method(c, "initialise", join, troupe.MethodOptions{Mode: troupe.OneToAll})
	troupe.Method(c, "deliver", deliver, troupe.MethodOptions{Lane: troupe.Concurrent(64)})
}

// box holds one batch, so that sender and receiver may come in any order.
func (p *peers) box(tag string) chan troupe.Batch {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.boxes[tag] == nil {
		p.boxes[tag] = make(chan troupe.Batch, 1)
	}
	return p.boxes[tag]
}

// send returns when the other rank has the batch.
func (p *peers) send(ctx context.Context, to int, tag string, b troupe.Batch) error {
	f, err := p.cluster.Go(ctx, troupe.FutureCall{Method: "deliver", Ranks: []int{to}, Args: []any{mail{tag, b}}})
	if err != nil {
		return err
	}
	return f.Wait(ctx)
}

func (p *peers) receive(ctx context.Context, tag string) (troupe.Batch, error) {
	select {
	case b := <-p.box(tag):
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.boxes, tag)
		return b, nil
	case <-ctx.Done():
		return troupe.Batch{}, fmt.Errorf("rank %d waits for %s: %w", p.rank, tag, ctx.Err())
	}
}

func (p *peers) sendFloats(ctx context.Context, to int, tag string, values []float32) error {
	return p.send(ctx, to, tag, batch(1, "x", values))
}

func (p *peers) receiveFloats(ctx context.Context, tag string) ([]float32, error) {
	b, err := p.receive(ctx, tag)
	if err != nil {
		return nil, err
	}
	return troupe.Values[float32](b.Arrays["x"])
}

// exchange sends values to the other ranks of a group and returns the values of all of them, in the group's order.
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

// sum is the sum of the values of a group. It adds in the group's order, so that all ranks get the same bits.
func (p *peers) sum(ctx context.Context, group []int, tag string, values []float32) ([]float32, error) {
	all, err := p.exchange(ctx, group, tag, values)
	out := make([]float32, len(values))
	for _, v := range all {
		add(out, v)
	}
	return out, err
}

// along are the ranks that differ from this one on one axis only.
func (p *peers) along(axis dispatch.Axis) []int {
	mesh := p.cluster.Record().Mesh
	c := mesh.Coord(p.rank)
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
