package main

import (
	"context"
	"strings"

	"troupe/bus"
	"troupe/nodes"
)

// stacksResult is the stacks of a cluster's workers, and the same for a reader.
type stacksResult struct {
	Ranks []nodes.WorkerStacks `msgpack:"ranks"`
	Text  string               `msgpack:"text"`
}

func (c *core) stacks(ctx context.Context, r *request) (any, error) {
	cl, err := c.cluster(r.Cluster)
	if err != nil {
		return nil, err
	}
	all, err := cl.Stacks(ctx, r.Ranks...)
	if err != nil {
		return nil, err
	}
	var texts []string
	for _, group := range nodes.FoldStacks(all) {
		texts = append(texts, group.String())
	}
	return stacksResult{Ranks: all, Text: strings.Join(texts, "\n")}, nil
}

func (c *core) interrupt(ctx context.Context, r *request) (any, error) {
	cl, err := c.cluster(r.Cluster)
	if err != nil {
		return nil, err
	}
	if len(r.Ranks) != 1 {
		return nil, bus.Errorf(bus.CodeInvalid, "interrupt takes one rank, not %d", len(r.Ranks))
	}
	methods, err := cl.Interrupt(ctx, r.Ranks[0])
	return append([]string{}, methods...), err
}
