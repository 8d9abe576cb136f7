package main

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"

	"troupe/bus"
	"troupe/nodes"
)

// stacksResult is the stacks of a cluster's workers, and the same for a reader.
type stacksResult struct {
	Ranks []nodes.WorkerStacks `msgpack:"ranks"`
	Text  string               `msgpack:"text"`
}

func (c *core) stacks(ctx context.Context, cl *cluster, r ranksRequest) (stacksResult, error) {
	all, err := cl.Stacks(ctx, r.Ranks...)
	if err != nil {
		return stacksResult{}, err
	}
	var texts []string
	for _, group := range nodes.FoldStacks(all) {
		texts = append(texts, group.String())
	}
	return stacksResult{Ranks: all, Text: strings.Join(texts, "\n")}, nil
}

// interruptedRank is a worker whose methods were interrupted. Without methods, it is interrupted when it runs Python
// code again.
type interruptedRank struct {
	Rank    int      `msgpack:"rank"`
	Methods []string `msgpack:"methods"`
}

// interrupt interrupts the methods of some ranks, each of which must run one; without ranks, those of all ranks that
// run one.
func (c *core) interrupt(ctx context.Context, cl *cluster, r ranksRequest) ([]*interruptedRank, error) {
	ranks, all := r.Ranks, len(r.Ranks) == 0
	for rank := range cl.WorldSize() {
		if all {
			ranks = append(ranks, rank)
		}
	}
	found, errs := make([]*interruptedRank, len(ranks)), make([]error, len(ranks))
	var group sync.WaitGroup
	for i, rank := range ranks {
		group.Go(bus.Guard(func() {
			methods, err := cl.Interrupt(ctx, rank)
			switch {
			case err == nil:
				found[i] = &interruptedRank{Rank: rank, Methods: append([]string{}, methods...)}
			case !all || !errors.Is(err, bus.ErrNotFound): // an idle rank is nothing to interrupt
				errs[i] = err
			}
		}))
	}
	group.Wait()
	return slices.DeleteFunc(found, func(f *interruptedRank) bool { return f == nil }), errors.Join(errs...)
}
